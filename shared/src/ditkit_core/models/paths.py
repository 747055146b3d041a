"""Where a model's parts lie: one base folder or hub id, and a path of its own for each part that needs one."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ditkit_core.config.field import setting
from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import refuse_pickles

# Weights, configurations and tokenizers; nothing that runs, and no other format of the same weights.
_WANTED_FROM_HUB = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")

_PIPELINE_INDEX = "model_index.json"

_HUB_ID = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(/(?P<inner>\w[\w.-]*(/\w[\w.-]*)*))?")


def is_hub_id(value: str) -> bool:
    """Whether a path is the id of a hub: it looks like one, and nothing of that name lies here."""
    # os.path says of a name that no file system takes that nothing has it, where Path raises
    return _HUB_ID.fullmatch(value) is not None and not os.path.exists(value)


_MAY_FETCH = ContextVar("may fetch", default=True)


@contextmanager
def nothing_fetched() -> Iterator[None]:
    """Parts named by the id of a hub are found in the local cache alone."""
    token = _MAY_FETCH.set(False)
    try:
        yield
    finally:
        _MAY_FETCH.reset(token)


@dataclass(frozen=True, kw_only=True)
class ModelPaths:
    """The `[model]` section: which model, and where its files are."""

    preset: str = setting("", resume="refused")
    """Architecture by name; empty means: read it from the base folder's transformer/config.json."""
    base: str = setting("", resume="refused", holds="part")
    """A folder in diffusers layout, or a hub id, that holds every part not named below."""
    transformer: str = setting("", resume="refused", holds="part")
    """Folder, single .safetensors file, sharded index, or hub id of the transformer."""
    transformer_2: str = setting("", resume="refused", holds="part")
    """The same of the second expert (low noise), where a model has two."""
    vae: str = setting("", resume="free", holds="part")
    """Folder or single .safetensors file of the VAE."""
    text_encoder: str = setting("", resume="free", holds="part")
    """Folder or single .safetensors file of the text encoder."""
    tokenizer: str = setting("", resume="free", holds="part")
    """Folder of the tokenizer."""
    image_encoder: str = setting("", resume="free", holds="part")
    """Folder or single .safetensors file of the image encoder."""
    dtype: Literal["bf16", "fp16", "fp32"] = setting("bf16", resume="refused")
    """Dtype of the frozen base and the matmuls: bf16, fp16 or fp32. All else has a dtype of its own: see [precision]."""

    def here(self, part: str) -> Path | None:
        """The local file or folder of a part; None if it has no path or would have to be fetched."""
        own = self._own.get(part, "")
        if not (own or self.base):
            return None
        path = Path(own).expanduser() if own else Path(self.base).expanduser() / part
        return path if path.exists() else None

    def is_elsewhere(self, part: str) -> bool:
        """Whether a part has the id of a hub for a path, so that it may have to be fetched."""
        return is_hub_id(self._own.get(part, "") or self.base)

    def is_to_be_fetched(self, part: str) -> bool:
        """Whether a part is neither here nor, whole, in the local cache of the hub."""
        if not self.is_elsewhere(part):
            return False
        try:
            with nothing_fetched():
                path = self.locate(part)
        except UserError:
            return True
        return not all(
            (index.parent / name).exists()
            for index in path.glob("*.safetensors.index.json")
            for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        )

    @property
    def _own(self) -> dict[str, str]:
        """The paths of parts that may have one of their own."""
        return {
            "transformer": self.transformer,
            "transformer_2": self.transformer_2,
            "vae": self.vae,
            "text_encoder": self.text_encoder,
            "tokenizer": self.tokenizer,
            "image_encoder": self.image_encoder,
        }

    def fetched_description(self, part: str) -> Path | None:
        """The folder with the `config.json` of a part whose path is a hub id, fetched without its weights; None if it has none there.

        Raises:
            UserError: If the hub does not give it.
        """
        own = self._own.get(part, "")
        match = (
            _HUB_ID.fullmatch(own or self.base) if self.is_elsewhere(part) else None
        )  # a folder of that name is no hub's
        if match is None or (match["inner"] or "").endswith(".safetensors"):
            return None
        inner = (match["inner"] or "") if own else f"{match['inner'] or ''}/{part}".lstrip("/")
        wanted = [f"{inner}/config.json".lstrip("/"), _PIPELINE_INDEX]
        folder = _snapshot(match["repository"], wanted, [], f"model.{part}" if own else "model.base") / inner
        return folder if (folder / "config.json").is_file() else None

    def fetch_commands(self, parts: Sequence[str]) -> str:
        """The commands that bring parts named by the id of a hub into its local cache, which a run looks into first."""
        wanted: dict[str, list[str]] = {}
        for part in parts:
            own = self._own.get(part, "")
            match = _HUB_ID.fullmatch(own or self.base)
            assert match is not None, "is_elsewhere says so"
            inner, patterns = match["inner"] or "", wanted.setdefault(match["repository"], [])
            if not own:
                patterns += [f"{inner}/{name}".lstrip("/") for name in (_PIPELINE_INDEX, f"{part}/*")]
            elif inner:
                patterns.append(inner if inner.endswith(".safetensors") else f"{inner}/*")
            else:  # which of its folders, or none, is seen when it is there
                patterns.append("*")
        return " && ".join(
            " ".join(["hf download", repository, *(f'--include "{name}"' for name in dict.fromkeys(patterns))])
            for repository, patterns in wanted.items()
        )

    def locate(self, part: str, *, safe_names: Mapping[str, str] = MappingProxyType({})) -> Path:
        """The local file or folder of a part, fetched from the hub if its path is a hub id.

        Args:
            part: `transformer`, `vae`, `text_encoder`, `tokenizer`, `scheduler`, …
            safe_names: By name of a pickle that people have for this model: the file to get instead.

        Raises:
            UserError: If the part has no path, nothing lies there, the hub does not give it, or it is a pickle.
        """
        own = self._own
        key = f"model.{part}" if own.get(part) else "model.base"
        value = own.get(part) or self.base
        remedy = f"set model.{part}" if part in own else "set model.base"
        if not value:
            raise UserError(
                f"the model has no {part}: {remedy} to its file or folder, or model.base to a folder in diffusers layout"
            )
        from_base = key == "model.base"
        path = Path(value).expanduser()
        if path.exists():
            path = path / part if from_base else path
        elif match := _HUB_ID.fullmatch(value):
            path = _fetch(match["repository"], match["inner"] or "", part, key, from_base=from_base)
        else:
            raise UserError(f"{key} = {value!r}: there is no such file or folder, and it is not a hub id (owner/name)")
        if not path.exists():
            raise UserError(f"{key} = {value!r} holds no {part}; {remedy} to where the {part} lies")
        refuse_pickles(path, safe_names)
        return path


def _fetch(repository: str, inner: str, part: str, key: str, *, from_base: bool) -> Path:
    """Download one part of a hub repository, or find it in the local cache.

    A base holds the part in a folder of its name, below `inner` if given. A part's own hub id may name a file or folder
    inside the repository; if it names neither, the part's folder is taken, and the repository's root if there is none.
    """
    beside: list[str] = []
    if from_base:
        beside = [f"{inner}/{_PIPELINE_INDEX}".lstrip("/")]  # says of the base what no part of it says of itself
        inner = f"{inner}/{part}".lstrip("/")
    if inner.endswith(".safetensors"):
        return _snapshot(repository, [inner], [], key) / inner
    if inner:
        wanted = [f"{inner}/{wanted}" for wanted in _WANTED_FROM_HUB]
        return _snapshot(repository, [*wanted, *beside], [], key) / inner
    folder = _snapshot(repository, [f"{part}/{wanted}" for wanted in _WANTED_FROM_HUB], [], key) / part
    if folder.exists():
        return folder
    return _snapshot(repository, list(_WANTED_FROM_HUB), ["*/*"], key)  # the root's files alone


def _snapshot(repository: str, allow: list[str], ignore: list[str], key: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    where, page = f"{key} = {repository!r}", f"https://huggingface.co/{repository}"
    try:
        fetched = snapshot_download if _MAY_FETCH.get() else partial(snapshot_download, local_files_only=True)
        return Path(fetched(repository, allow_patterns=allow, ignore_patterns=ignore))
    except GatedRepoError as error:
        raise UserError(f"{where} is gated: accept its licence on {page}, then log in with `hf auth login`") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"{where}: no such folder here, and no such model on the hub or no right to read it; mend the path, "
            f"or open {page} and log in with `hf auth login`"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise UserError(
            f"{where} is not in the local cache and the hub cannot be reached; go online once, or name a local folder"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        remedy = "try again later, or name a local folder"
        if status in (401, 403):
            remedy = f"accept its licence on {page} if it has one, then log in with `hf auth login`"
        raise UserError(f"{where}: the hub answered {status}; {remedy}") from error
