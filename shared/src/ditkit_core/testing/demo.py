"""Checks of every family's demo: short runs, with inputs and a cache that are made once."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import ClassVar

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from ditkit_core.commands import cli
from ditkit_core.data.media.clip import called_like_media, probe, write_image, write_video
from ditkit_core.diagnostics.report.overview import RANDOM_SAMPLES
from ditkit_core.families.demo_places import IMAGES, LOOKS, PLACES, DemoImage, render
from ditkit_core.families.vae import DiffusersVae, VaeFamily
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.spec import ModelSpec
from ditkit_core.testing.specs import altered

_FEW = (
    "--train.steps", "2", "--train.batch_size", "2", "--held_out.clips", "1", "--held_out.sigmas",
    "[0.3, 0.7]",
    "--sample.captions", "1", "--sample.steps", "2",
)  # fmt: skip
_ONE_IN = 4
"""Of how many samples a run keeps one: of an edit, of each format and of several shapes some are
left, and each caption takes as long as several steps."""
_NO_PREVIEWS = ("--sample.prompts", "[]", "--sample.every_steps", "0")

LEVERS: tuple[tuple[str, ...], ...] = (
    ("--adapter.method", "lokr", "--adapter.rank", "2", "--adapter.decompose_factor", "4",
    "--export.merged", "true"),
    ("--adapter.method", "loha", "--adapter.rank", "2", "--train.checkpointing", "full",
    "--ema.decay", "0.9"),
    ("--model.dtype", "bf16", "--train.checkpointing", "attn_only", "--adapter.dropout", "0.1"),
    ("--train.checkpointing", "full", "--adapter.method", "full", "--optim.lr", "1e-4",
    "--export.forms", '["diffusers"]'),
    ("--adapter.use_dora", "true", "--train.caption_dropout", "0.5", "--adapter.rank_pattern",
    '["*.0.*=3"]'),
    (
        "--export.forms", '["official", "diffusers"]', "--export.dtype", "fp32",
        "--adapter.use_rslora", "true", "--adapter.rank_pattern",
        '["*.0.*=3"]', "--adapter.alpha_pattern", '["*.1.*=5"]', "--optim.lr_pattern",
        '["*.0.*=1e-3"]',
        "--optim.loraplus_lr_ratio", "4",
    ),
)  # fmt: skip
"""Flags that every family takes."""


@dataclass(frozen=True)
class Demo:
    """A family's demo in short runs."""

    spec: ModelSpec
    inputs: Path
    """Folder of its inputs, which runs copy instead of making them again."""
    cache: Path

    @classmethod
    def write(cls, spec: ModelSpec, folder: Path) -> "Demo":
        """Write the inputs into an empty folder."""
        spec.demo.write(folder / "inputs")
        return cls(spec, folder / "inputs", folder / "cache")

    def train(self, run: Path, *flags: str) -> int:
        """Two steps on some of the samples into the folder of a run, without the diagrams."""
        return self._train(run, "--log.tensorboard", "false", *flags)

    def check_run(self, run: Path, output: Callable[[], str], *, samples: str) -> dict[str, Tensor]:
        """Assert that the demo ends complete, and says so when it is started again.

        Args:
            run: The run's folder.
            said: What was printed since the last call.
            samples: Pattern of the files of samples.

        Returns:
            The tensors of the adapter's file.
        """
        assert self._train(run) == 0
        verified = f"diffusers loads {run.name}.safetensors and agrees with our model"
        printed, page = output(), (run / "report.html").read_text(encoding="utf-8")
        assert (verified if self.spec.adapters.verify else "which has no such model") in printed
        assert (RANDOM_SAMPLES in printed, RANDOM_SAMPLES in page) == (
            not self.spec.demo.trained_base,
        ) * 2
        assert list((run / "samples").glob(samples)) and list((run / "tensorboard").iterdir())
        tensors: dict[str, Tensor] = load_file(run / "exports" / f"{run.name}.safetensors")
        steps = [record["step"] for record in _metrics(run)]
        assert steps == sorted(steps) and steps[0] == 0
        assert self._train(run) == 0
        assert "complete at step 2" in output()
        return tensors

    def write_masks(self, folder: Path) -> Path:
        """Write a mask for each of the demo's media into a folder: an image whose left half is
        white, or for a clip a video of two halves, in which the right half is white after the
        middle."""
        for media in self.inputs.glob("*/*"):
            if not called_like_media(media):
                continue
            info = probe(media)
            mask = torch.zeros(3, max(1, round(info.seconds * info.fps)), info.height, info.width)
            mask[..., : info.width // 2] = 1
            if info.kind == "image":
                write_image(folder / f"{media.stem}.png", mask[:, 0])
                continue
            later = mask[:, mask.shape[1] // 2 :]
            later.copy_(1 - later)
            folder.mkdir(exist_ok=True)
            write_video(folder / f"{media.stem}.mp4", mask, info.fps)
        return folder

    def held_out(self, run: Path) -> list[float]:
        """The validation losses of a run."""
        return [record["held_out"] for record in _metrics(run) if "held_out" in record]

    def _train(self, run: Path, *flags: str) -> int:
        def copy(folder: Path) -> None:
            shutil.copytree(self.inputs, folder, dirs_exist_ok=True)
            _keep_few(folder)

        arguments = ("--demo", "--run.folder", str(run), "--encode.cache", str(self.cache))
        return cli.run(
            altered(self.spec, write=copy), "train", [*arguments, *_FEW, *_NO_PREVIEWS, *flags]
        )


def _keep_few(folder: Path) -> None:
    """Leave one in `_ONE_IN` of the samples of a demo's inputs."""
    media = [file for file in sorted(folder.glob("*/*")) if called_like_media(file)]
    for file in sorted(set(media) - set(media[::_ONE_IN])):
        file.unlink()
        file.with_suffix(".txt").unlink(missing_ok=True)
    for table in folder.glob("*/metadata.jsonl"):
        rows = table.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [row for row in rows if (table.parent / json.loads(row)["file_name"]).exists()]
        table.write_text("".join(kept), encoding="utf-8")


def check_loss(spec: ModelSpec, run: Path) -> None:
    """Assert that the whole demo lowers the loss on the held-out samples by a fifth, and beyond
    chance."""
    assert cli.run(spec, "train", ["--demo", "--run.folder", str(run)]) == 0
    first, *_, last = (record for record in _metrics(run) if "held_out" in record)
    assert last["held_out"] <= 0.8 * first["held_out"] and last["held_out_high"] < first["held_out"]


def decibels_of_places(family: VaeFamily, checkpoint: Path) -> float:
    """How well the VAE of a checkpoint reproduces images of a demo that teaches a place, which the
    demo's data do not have: their PSNR."""
    encoder = DiffusersVae(family, ModelPaths(base=str(checkpoint)), torch.device("cpu"))
    encoder.load()
    shown, random, wrong = {example.image for example in IMAGES}, np.random.default_rng(5), []
    for position, (colour, shape) in zip(PLACES, LOOKS, strict=False):
        shift = tuple(random.uniform(-0.04, 0.04, 2))
        image = DemoImage(colour=colour, shape=shape, position=position, shift=shift)
        assert image not in shown
        pixels = torch.from_numpy(render(image)).permute(2, 0, 1)[:, None].float() / 255
        decoded = encoder.decode(encoder.encode([pixels * 2 - 1])[0]["latents"])
        wrong.append(float((decoded - pixels).square().mean()))
    return float(-10 * np.log10(np.mean(wrong)))


def check_separate_words(
    checkpoint: Path,
    layers: Sequence[int],
    kind: str = "Qwen3ForCausalLM",
    tokenizer_folder: str = "tokenizer",
) -> None:
    """Assert that hidden states of a word after these layers are its embedding, and that words of a
    caption are orthogonal; `kind` is the text encoder's class in transformers."""
    kinds = [resolve_name(f"transformers:{name}") for name in ("AutoTokenizer", kind)]
    tokenizer = kinds[0].from_pretrained(checkpoint / tokenizer_folder, local_files_only=True)
    model = kinds[1].from_pretrained(checkpoint / "text_encoder", local_files_only=True).eval()
    ids = tokenizer("a red triangle on both sides", return_tensors="pt").input_ids
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    assert all(torch.equal(states[0], states[layer]) for layer in layers)
    words = states[0][0, 1:]
    torch.testing.assert_close(
        words @ words.T, words.shape[1] * torch.eye(len(words)), rtol=0, atol=1e-5
    )


class BaseFilesChecks:
    """Checks of the files of a demo's trained base. Inherit, set what has no value here, and have a
    fixture `demo` of the module: `Demo.write(spec, folder)`."""

    spec: ClassVar[ModelSpec]
    most_bytes: ClassVar[int] = 3_200_000
    """Of all weights."""

    def test_the_base_is_small_and_trained_and_the_checkpoint_has_its_weights(
        self, demo: Demo
    ) -> None:
        folder = self.spec.demo.config.parent / "base"
        files = {file.stem: file for file in folder.iterdir()}
        assert sorted(files) == ["transformer", "vae"] and self.spec.demo.trained_base
        assert sum(file.stat().st_size for file in files.values()) < self.most_bytes
        for part, file in files.items():
            weights = demo.inputs / "checkpoint" / part / "diffusion_pytorch_model.safetensors"
            stored, written = load_file(file), load_file(weights)
            assert stored.keys() == written.keys()
            for name, tensor in stored.items():
                assert torch.equal(written[name], tensor.to(written[name].dtype)), name


class TrainedBaseChecks(BaseFilesChecks):
    """Checks of the trained base of a demo that teaches a place; to inherit likewise."""

    vae: ClassVar[VaeFamily]
    text_encoder: ClassVar[str]
    """Its class in transformers."""
    tokenizer_folder: ClassVar[str] = "tokenizer"
    layers: ClassVar[tuple[int, ...]]
    """As of `check_separate_words`."""

    def test_the_vae_reproduces_other_images_at_30_db(self, demo: Demo) -> None:
        assert decibels_of_places(self.vae, demo.inputs / "checkpoint") >= 30

    def test_words_of_captions_are_orthogonal_and_the_layers_leave_them_alone(
        self, demo: Demo
    ) -> None:
        checkpoint = demo.inputs / "checkpoint"
        check_separate_words(checkpoint, self.layers, self.text_encoder, self.tokenizer_folder)


def _metrics(run: Path) -> list[dict[str, float | int]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
