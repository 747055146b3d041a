"""The model card of exported files: made from their headers, so it says nothing that a file does
not."""

import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ditkit_core.adapters.config import METHOD_NAMES
from ditkit_core.config.toml import flatten
from ditkit_core.errors import UserError, printable
from ditkit_core.io.files import parse_json_object
from ditkit_core.models.paths import is_hub_id
from ditkit_core.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class CardFile:
    """An exported file, or the folder of a whole transformer."""

    path: str
    header: Mapping[str, str]
    readers: Mapping[str, str] | None
    """For each program that reads adapter files: its problem with this one, empty if it loads all
    of it. None for a whole transformer."""
    transformer_class: str = ""
    """diffusers' class of a whole transformer in diffusers' form."""


@dataclass(frozen=True, kw_only=True)
class CardSample:
    """A generated sample."""

    path: str
    prompt: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a card is made from."""

    spec: ModelSpec
    name: str
    repository: str
    files: Sequence[CardFile]
    samples: Sequence[CardSample] = ()
    num_samples: int | None = None
    """Number of clips and images that were trained on; None if it is not known."""
    license: str = ""

    def text(self) -> str:
        """The card as Markdown, with the metadata that the hub reads in front."""
        from huggingface_hub import ModelCardData

        metadata = ModelCardData(**self._metadata()).to_yaml()
        sections = [
            f"# {self.name}",
            self._opening(),
            "<Gallery />" if self.samples else "",
            self._prompts(),
            self._use(),
            self._training(),
            self._license(),
        ]
        return f"---\n{metadata}\n---\n\n" + "\n\n".join(filter(None, sections)) + "\n"

    @property
    def _header(self) -> Mapping[str, str]:
        return self.files[0].header

    @property
    def _config(self) -> dict[str, Any]:
        """The configuration of the run by dotted key; empty if the header has none."""
        with suppress(tomllib.TOMLDecodeError, RecursionError, ValueError):
            return flatten(tomllib.loads(self._header.get("ditkit.config", "")))
        return {}

    @property
    def _is_adapter(self) -> bool:
        return self.files[0].readers is not None

    @property
    def _base(self) -> str:
        """Hub id of the base, or the name of its file or folder. A preset of several published
        models does not say which; the name of a folder like one's does."""
        base, preset = self._header.get("ditkit.base", ""), self._header.get("ditkit.preset", "")
        if is_hub_id(base):
            return base
        ids = [id for id, name in self.spec.architecture.hub_presets.items() if name == preset]
        named = [id for id in ids if id.partition("/")[2].lower() == base.lower()] or ids
        return named[0] if len(named) == 1 else base or self.spec.name

    @property
    def _goal(self) -> str:
        """What the model does, in the hub's words."""
        if self.spec.data.frame_step:
            return "text-to-video"
        arch = self.spec.architecture.presets.get(self._header.get("ditkit.preset", ""))
        spec = self.spec if arch is None else self.spec.for_arch(arch)
        edits = spec.data.needs_references or self._config.get("data.references")
        return "image-to-image" if edits else "text-to-image"

    @property
    def _method(self) -> str:
        config = self._config
        if not self._is_adapter:
            return (
                f"merged {name}"
                if (name := METHOD_NAMES.get(str(config.get("adapter.method"))))
                else "full fine-tune"
            )
        kind = (
            "DoRA"
            if config.get("adapter.use_dora")
            else METHOD_NAMES.get(str(config.get("adapter.method")), "LoRA")
        )
        return f"{kind} of rank {config['adapter.rank']}" if "adapter.rank" in config else kind

    def _metadata(self) -> dict[str, Any]:
        goal = self._goal
        kind = ["lora", "template:sd-lora"] if self._is_adapter else []
        trigger = self._config.get("data.trigger")
        return {
            "base_model": self._base if is_hub_id(self._base) else None,
            "base_model_relation": "adapter" if self._is_adapter else "finetune",
            "library_name": "diffusers",
            "license": self.license or None,
            "pipeline_tag": goal,
            "tags": [*kind, goal, self.spec.name, "diffusers", "ditkit"],
            "instance_prompt": trigger or None,
            "widget": [
                {"text": " ".join(sample.prompt.split()), "output": {"url": sample.path}}
                for sample in self.samples
            ]
            or None,
        }

    def _opening(self) -> str:
        step, preset = self._header.get("ditkit.step"), self._header.get("ditkit.preset")
        of = (
            f"[{self._base}](https://huggingface.co/{self._base})"
            if is_hub_id(self._base)
            else f"`{self._base}`"
        )
        steps = f", trained for {step} steps" if step else ""
        return (
            f"A {self._method} for {of}"
            + (f" (`{preset}`)" if preset else "")
            + f"{steps} with ditkit."
        )

    def _prompts(self) -> str:
        trigger = self._config.get("data.trigger")
        line = f"Write `{_code(trigger)}` in the prompt.\n\n" if trigger else ""
        examples = [
            f"- {_plain(prompt)}"
            for prompt in dict.fromkeys(sample.prompt for sample in self.samples)
        ]
        body = line + "\n".join(examples)
        return f"## Prompts\n\n{body.rstrip()}" if body else ""

    def _use(self) -> str:
        """How diffusers loads it, and which programs load which file."""
        parts = {expert.name: expert.part for expert in self._experts()}
        of_part: dict[str, str] = {}  # one file for each transformer, of those that diffusers loads
        for file in self.files:
            if "diffusers" in _loading(file) and file.readers is not None:
                of_part.setdefault(
                    parts.get(file.header.get("ditkit.expert", ""), "transformer"), file.path
                )
        lines = [
            f'pipeline.load_lora_weights("{self.repository}", weight_name="{path}"'
            + (")" if part == "transformer" else f", load_into_{part}=True)")
            for part, path in of_part.items()
        ]
        if lines:
            before = [
                "pipeline = DiffusionPipeline.from_pretrained(",
                f'    "{self._base}", torch_dtype=torch.bfloat16',
                ")",
            ]
            lines = ["import torch", "from diffusers import DiffusionPipeline", "", *before, *lines]
        elif transformer := next((file for file in self.files if file.transformer_class), None):
            lines = [
                "import torch",
                f"from diffusers import DiffusionPipeline, {transformer.transformer_class}",
                "",
                f"transformer = {transformer.transformer_class}.from_pretrained(",
                f'    "{self.repository}", subfolder="{transformer.path}", torch_dtype=torch.bfloat16',
                ")",
                "pipeline = DiffusionPipeline.from_pretrained(",
                f'    "{self._base}", transformer=transformer, torch_dtype=torch.bfloat16',
                ")",
            ]
        code = "\n".join(["```python", *lines, "```"]) if lines else ""
        rows = [
            f"| `{file.path}` | {', '.join(_loading(file)) or 'see the form'} |"
            for file in self.files
        ]
        table = "\n".join(["| file | loaded by |", "|---|---|", *rows])
        return "\n\n".join(filter(None, ["## Use", code, table]))

    def _experts(self) -> Sequence[Any]:
        arch = self.spec.architecture.presets.get(self._header.get("ditkit.preset", ""))
        return () if arch is None else self.spec.architecture.experts(arch)

    def _training(self) -> str:
        config, header = self._config, self._header
        rows = {
            "method": self._method,
            "alpha": self._alpha() if self._is_adapter else None,
            "ranks by layer": ", ".join(config.get("adapter.rank_pattern") or [])
            if self._is_adapter
            else None,
            "layers": ", ".join(
                config.get("adapter.targets") or next(iter(self.spec.adapters.targets.values()), ())
            )
            if self._is_adapter and config
            else None,
            "steps": header.get("ditkit.step"),
            "batch size": _product(config, "train.batch_size", "train.accumulation"),
            "learning rate": f"{config['optim.lr']:g} ({config.get('optim.name')})"
            if "optim.lr" in config
            else None,
            "learning rates by layer": ", ".join(config.get("optim.lr_pattern") or []),
            "learning rate of B over A": ratio
            if (ratio := config.get("optim.loraplus_lr_ratio", 1)) != 1
            else None,
            **_sizes(config),
            "clips and images": self.num_samples,
            "digest of the data": header.get("ditkit.data"),
            "dtype of the base": config.get("model.dtype"),
            "quantization": None
            if config.get("base.quantize") == "none"
            else config.get("base.quantize"),
            "seed": config.get("train.seed"),
            "versions": self._versions(),
        }
        shown = {name: value for name, value in rows.items() if value not in (None, "")}
        table = "\n".join(
            [
                "| setting | value |",
                "|---|---|",
                *(f"| {name} | {_plain(value)} |" for name, value in shown.items()),
            ]
        )
        config_text = header.get("ditkit.config", "")
        # Indented, so that nothing in it can end the block.
        block = "\n".join(f"    {line}" for line in config_text.splitlines())
        details = (
            f"<details><summary>Complete configuration</summary>\n\n{block}\n\n</details>"
            if config_text
            else ""
        )
        return "\n\n".join(filter(None, ["## Training", table, details]))

    def _alpha(self) -> Any:
        """The alpha that the adapter was trained with; 0 in a configuration means that it is the
        rank."""
        alpha, rank = self._config.get("adapter.alpha"), self._config.get("adapter.rank")
        return f"{rank}, as the rank" if alpha == 0 and rank is not None else alpha

    def _versions(self) -> str:
        """The versions of the header, which are JSON, for people; as they are if they are something
        else."""
        text = self._header.get("ditkit.versions", "")
        with suppress(UserError):
            return ", ".join(
                f"{name} {version}" for name, version in parse_json_object(text, "versions").items()
            )
        return text

    def _license(self) -> str:
        base = (
            f"that of [{self._base}](https://huggingface.co/{self._base})"
            if is_hub_id(self._base)
            else "that of the base"
        )
        license_line = f"`{_code(self.license)}`" if self.license else "not stated yet"
        return f"## License\n\n{license_line}; the license of the base applies too, see {base}."


def _loading(file: CardFile) -> list[str]:
    if file.transformer_class:
        return ["diffusers"]
    return [reader for reader, problem in (file.readers or {}).items() if not problem]


def _product(config: Mapping[str, Any], *keys: str) -> int | None:
    values = [config.get(key) for key in keys]
    sizes = [value for value in values if isinstance(value, int)]
    return sizes[0] * sizes[1] if len(sizes) == 2 else None


def _sizes(config: Mapping[str, Any]) -> dict[str, str]:
    """Rows about frames and pixels. A run of several resolutions has the largest as its height and
    width."""

    def several(key: str) -> str:
        values = config.get(key)
        return ", ".join(map(str, values)) if isinstance(values, list) else ""

    frames = several("data.frame_buckets").replace(", ", " or ") or str(
        config.get("data.frames") or ""
    )
    if resolutions := several("data.resolutions"):
        return {"frames": frames, "resolutions": f"{resolutions} (side of a square)"}
    sides = [str(config[key]) for key in ("data.height", "data.width") if config.get(key)]
    return {"frames, height, width": ", ".join(filter(None, [frames, *sides]))}


def _plain(value: Any) -> str:
    """A user's text escaped for one line of Markdown, so that it makes no markup, line break or
    table column."""
    text = printable(" ".join(str(value).split()))
    return "".join(
        f"\\{character}" if character in "\\`*_[]<>|#~" else character for character in text
    )


def _code(value: Any) -> str:
    return printable(" ".join(str(value).split())).replace("`", "'")


def name_of(files: Sequence[Path], repository: str) -> str:
    """The title of a card: the repository's own name; without a repository, the name of the first
    file."""
    return repository.rpartition("/")[2] or files[0].stem
