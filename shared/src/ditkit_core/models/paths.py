"""Paths of a model's components: one base folder or hub id, and a separate path for each component
that needs one."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ditkit_core.config.field import setting
from ditkit_core.config.nearest import nearest_word, path_remedy
from ditkit_core.errors import UserError, argument
from ditkit_core.io.console import warn
from ditkit_core.io.files import PICKLES, local_path, readable, refuse_pickles
from ditkit_core.io.hub import bytes_to_fetch

# Weights, configurations and tokenizers. No code, and no second format of the same weights, which
# would double the download.
_WANTED_FROM_HUB = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")

_PIPELINE_INDEX = "model_index.json"

_WITH_PATHS = (
    "transformer",
    "transformer_2",
    "vae",
    "text_encoder",
    "tokenizer",
    "image_encoder",
    "audio_encoder",
)
"""Components that may have a path of their own."""

_ALSO_IN = {"tokenizer": "processor"}
"""The folder of a base that has a component where none has its name: a pipeline whose text encoder
sees has a processor, and the tokenizer is in it."""

_HUB_ID = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(/(?P<inner>\w[\w.-]*(/\w[\w.-]*)*))?")


_URL = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/(?:tree|blob|resolve)/[^/]+/?(.*?))?/?(?:\?.*)?"
)
_FILE_SUFFIXES = (*PICKLES, ".safetensors", ".gguf", ".json")


def is_hub_id(value: str) -> bool:
    """Whether a path is a hub id: it looks like one, no local file has that name, and it does not
    begin with a folder that is here."""
    match = _HUB_ID.fullmatch(value)
    # os.path.exists returns False for a name that no file system accepts; Path.exists raises.
    if match is None or os.path.exists(value) or _URL.fullmatch(value):
        return False
    # `runs/cats/inputs` with a typing error in its last part is no folder of the repository
    # `runs/cats`, and no repository is called like a file.
    is_local = (
        os.path.exists(match["repository"])
        if match["inner"]
        else value.lower().endswith(_FILE_SUFFIXES)
    )
    return not is_local


def repository_of(hub_id: str) -> str:
    """The repository of a hub id, which may name a file or folder inside it."""
    match = _HUB_ID.fullmatch(hub_id)
    assert match is not None, hub_id
    return match["repository"]


def not_there(key: str, value: str, *, folders: Iterable[Path] = ()) -> UserError:
    """The error for a path of a model that neither exists nor is a hub id; `folders` as for
    `path_remedy`."""
    if match := _URL.fullmatch(value):
        return UserError(
            f"{key} = {value!r} is an address; write the hub id "
            f"{'/'.join(filter(None, match.groups()))}"
        )
    if re.match(r"\w+://", value):
        return UserError(f"{key} = {value!r} is an address; download it, and name the file")
    remedy = path_remedy(value, folders=folders)
    return UserError(
        f"{key} = {value!r}: there is no such file or folder, and it is not a hub id (owner/name); "
        f"{remedy}"
    )


_CACHED = "models--"
"""Beginning of the name of a repository's folder in the hub's cache: models--owner--name."""


def model_path(value: str) -> Path:
    """The path of a model's files; of a repository's folder in the hub's cache, the snapshot that
    it has, or that `main` is."""
    path = local_path(value)
    with readable(path):
        folder = path if path.name == "snapshots" else path / "snapshots"
        if not folder.parent.name.startswith(_CACHED) or not folder.is_dir():
            return path
        snapshots = [entry for entry in folder.iterdir() if entry.is_dir()]
        main = folder.parent / "refs" / "main"
        if len(snapshots) > 1 and main.is_file():
            snapshots = [
                entry
                for entry in snapshots
                if entry.name == main.read_text("utf-8", "replace").strip()
            ]
    return snapshots[0] if len(snapshots) == 1 else path


def _without(part: str, key: str, value: str) -> str:
    """What a path that lacks a part of a model is instead, and what to name; empty if nothing is
    known of it."""
    path = model_path(value)
    with readable(path):
        if (path / "snapshots").is_dir() or path.name == "snapshots":
            return f"{key} = {value!r} is a repository in the hub's cache without one snapshot to take; name a folder in its snapshots"
        if path.is_dir() and any(path.glob(f"{_CACHED}*")):
            return f"{key} = {value!r} is the hub's cache; name one of its folders {_CACHED}…, or the hub id (owner/name)"
        is_file, weights = path.is_file(), path.is_dir() and any(path.glob("*.safetensors"))
    if not (is_file or weights):
        return ""
    one = "one file" if is_file else "a folder of weights"
    named = "transformer" if part in ("transformer", "transformer_2") else part
    return (
        f"{key} = {value!r} is {one}, and no folder with all parts of a model; name what it is, "
        f"such as {argument(f'model.{named}')}, and set {argument('model.base')} to a hub id or "
        "folder with the other parts"
    )


def check_preset(preset: str, presets: Iterable[str]) -> None:
    """Refuse an unknown `model.preset`."""
    if preset and preset not in (names := tuple(presets)):
        # As other programs write them: `wan_t2v_14B`, `flux2-klein-4b`.
        short = re.sub(r"^(wan|flux)[\d.]*[_-]", "", preset.lower().replace("_", "-"))
        near = nearest_word(short, names)
        remedy = f"did you mean {near}? Choose one of" if near else "choose one of"
        raise UserError(
            f"{argument('model.preset')} = {preset!r} is unknown; {remedy} {', '.join(names)}"
        )


_MAY_FETCH = ContextVar("may fetch", default=True)


@contextmanager
def nothing_fetched() -> Iterator[None]:
    """Inside the block, components with a hub id are only looked up in the local cache, and nothing
    is downloaded."""
    token = _MAY_FETCH.set(False)
    try:
        yield
    finally:
        _MAY_FETCH.reset(token)


@dataclass(frozen=True, kw_only=True)
class ModelPaths:
    """The `[model]` section: which model to train, and where its files are."""

    preset: str = setting("", resume="refused")
    """Architecture by name. Empty means that it is read from the config.json next to the
    transformer's weights, from their shapes, or, for a single file that fits no preset, from the
    base folder's transformer/config.json."""
    base: str = setting("", resume="refused", holds="part")
    """Folder in diffusers layout, or hub id, with every component that is not set below."""
    transformer: str = setting("", resume="refused", holds="part")
    """Folder, single .safetensors file, sharded index, or hub id of the transformer."""
    transformer_2: str = setting("", resume="refused", holds="part")
    """The same for the second expert (low noise), if the model has two."""
    vae: str = setting("", resume="free", holds="part")
    """Folder or single .safetensors file of the VAE."""
    text_encoder: str = setting("", resume="free", holds="part")
    """Folder or single .safetensors file of the text encoder."""
    tokenizer: str = setting("", resume="free", holds="part")
    """Folder of the tokenizer."""
    image_encoder: str = setting("", resume="free", holds="part")
    """Folder or single .safetensors file of the image encoder."""
    audio_encoder: str = setting("", resume="free", holds="part")
    """Folder of the speech encoder."""
    dtype: Literal["bf16", "fp16", "fp32"] = setting("bf16", resume="refused")
    """Dtype of the frozen base and of matmuls: bf16, fp16 or fp32. For all other dtypes see
    [precision]."""

    def here(self, part: str) -> Path | None:
        """The local file or folder of a component; None if it has no path or would have to be
        downloaded."""
        own_path = self._own_path(part)
        if not (own_path or self.base):
            return None
        path = model_path(own_path) if own_path else _folder_of(part, model_path(self.base))
        with readable(path):
            return path if path.exists() else None

    def is_elsewhere(self, part: str) -> bool:
        """Whether the path of a component is a hub id, so that it may have to be downloaded."""
        return is_hub_id(self._own_path(part) or self.base)

    def is_to_be_fetched(self, part: str) -> bool:
        """Whether a component has to be downloaded: it is neither local nor complete in the hub's
        local cache."""
        if not self.is_elsewhere(part):
            return False
        try:
            with nothing_fetched():
                path = self.locate(part)
            # The cache may contain the index of a download that was interrupted, without all of its
            # files.
            if any(path.glob("*.safetensors.index.json")):
                # Imported here, because it needs torch, which a mistake in a path must not wait
                # for.
                from ditkit_core.io.safetensors import SafetensorsSource

                SafetensorsSource.open(path)
        except UserError:
            return True
        return False

    def to_fetch(self, part: str) -> str:
        """What `locate` would download of a component, how large it is, from where and into which
        folder; empty if nothing."""
        if not self.is_to_be_fetched(part):
            return ""
        own_path = self._own_path(part)
        repository = repository_of(own_path or self.base)
        inner = (own_path or self.base).removeprefix(repository).lstrip("/")
        for _, wanted, ignored in _attempts(inner, part, from_base=not own_path):
            if download := _to_fetch(repository, part, wanted, ignored):
                return download
        return f"{part}, from {repository}: the hub cannot be reached, or does not have it"

    def _own_path(self, part: str) -> str:
        """The separate path of a component; empty if it has none."""
        return getattr(self, part) if part in _WITH_PATHS else ""

    def fetched_description(self, part: str) -> Path | None:
        """The folder with the `config.json` of a component whose path is a hub id, downloaded
        without weights; None if there is none."""
        own_path = self._own_path(part)
        # is_elsewhere first: a local folder whose name looks like a hub id is not on the hub.
        match = _HUB_ID.fullmatch(own_path or self.base) if self.is_elsewhere(part) else None
        if match is None or (match["inner"] or "").endswith(".safetensors"):
            return None
        inner = (match["inner"] or "") if own_path else f"{match['inner'] or ''}/{part}".lstrip("/")
        wanted = [f"{inner}/config.json".lstrip("/"), _PIPELINE_INDEX]
        where = (
            f"{argument(f'model.{part}')} = {own_path!r}"
            if own_path
            else f"{argument('model.base')} = {self.base!r}"
        )
        folder = _snapshot(match["repository"], part, wanted, [], where) / inner
        return folder if (folder / "config.json").is_file() else None

    def not_described(self) -> str:
        """The beginning of an error: no file that is here describes the transformer.

        Raises:
            UserError: If the base is something else than the folder of a model.
        """
        key, value = ("transformer", self.transformer) if self.transformer else ("base", self.base)
        if value and local_path(value).exists():
            if key == "base" and (
                instead := _without("transformer", argument("model.base"), value)
            ):
                raise UserError(instead)
            lacks = f"contains no transformer to say which architecture it is; set {argument('model.transformer')} to its file, and if need be"
        elif value and not is_hub_id(value):
            remedy = path_remedy(value)
            lacks = (
                "does not exist, and it is not a hub id (owner/name), so nothing says which "
                f"architecture it is; {remedy} {'Or' if remedy.endswith('?') else 'or'} set"
            )
        else:
            lacks = "is not here to say which architecture it is; set"
        return f"{argument(f'model.{key}')} = {value!r} {lacks}"

    def fetch_commands(self, parts: Sequence[str]) -> str:
        """The commands that download components with a hub id into the local cache, which a run
        looks into first."""
        wanted: dict[str, list[str]] = {}
        for part in parts:
            own_path = self._own_path(part)
            match = _HUB_ID.fullmatch(own_path or self.base)
            assert match is not None, "is_elsewhere says so"
            inner, patterns = match["inner"] or "", wanted.setdefault(match["repository"], [])
            if not own_path:
                folders = _folders_of(part)
                patterns += [
                    f"{inner}/{name}".lstrip("/")
                    for name in (_PIPELINE_INDEX, *(f"{folder}/*" for folder in folders))
                ]
            elif inner:
                patterns.append(inner if inner.endswith(".safetensors") else f"{inner}/*")
            else:  # whether the component is in a subfolder or at the root is only known after the download
                patterns.append("*")
        return " && ".join(
            " ".join(
                [
                    "hf download",
                    repository,
                    *(f'--include "{name}"' for name in dict.fromkeys(patterns)),
                ]
            )
            for repository, patterns in wanted.items()
        )

    def locate(self, part: str, *, safe_names: Mapping[str, str] = MappingProxyType({})) -> Path:
        """The local file or folder of a component, downloaded from the hub if its path is a hub id.

        Args:
            part: `transformer`, `vae`, `text_encoder`, `tokenizer`, `scheduler`, …
            safe_names: For known pickles of this model, by file name: the file to get instead.

        Raises:
            UserError: If the component has no path, the path does not exist, the download fails, or
                the file is a pickle.
        """
        own_path = self._own_path(part)
        key, value = (
            (argument(f"model.{part}"), own_path)
            if own_path
            else (argument("model.base"), self.base)
        )
        remedy = (
            f"set {argument(f'model.{part}')}"
            if part in _WITH_PATHS
            else f"set {argument('model.base')}"
        )
        if not value:
            raise UserError(
                f"the model has no {part}: {remedy} to its file or folder, or "
                f"{argument('model.base')} to a folder in diffusers layout"
            )
        path = model_path(value)
        with readable(path):
            is_local = path.exists()
        if is_local:
            path = path if own_path else _folder_of(part, path)
        elif is_hub_id(value) and (match := _HUB_ID.fullmatch(value)):
            path = _fetch(
                match["repository"],
                match["inner"] or "",
                part,
                f"{key} = {value!r}",
                from_base=not own_path,
            )
        else:
            raise not_there(key, value)
        with readable(path):
            if not path.exists():
                instead = "" if own_path else _without(part, key, value)
                raise UserError(
                    instead
                    or f"{key} = {value!r} contains no {part}; {remedy} to its file or folder"
                )
            refuse_pickles(path, safe_names)
        return path


def _folders_of(part: str) -> tuple[str, ...]:
    """The folders of a base that may have a component, the likeliest first."""
    return (part, _ALSO_IN[part]) if part in _ALSO_IN else (part,)


def _folder_of(part: str, base: Path) -> Path:
    """The folder of a component below a base: of its name, or the one in `_ALSO_IN`."""
    paths = [base / folder for folder in _folders_of(part)]
    with readable(base):
        return next((path for path in paths if path.exists()), paths[0])


def locate_model(value: str, key: str, part: str) -> Path:
    """The folder of a model that stands for itself and is no part of a run's, downloaded from the
    hub if its path is a hub id.

    Args:
        key: The setting that has this path, for messages.
        part: The model's kind, likewise.

    Raises:
        UserError: If there is no such folder, or the download fails.
    """
    path = model_path(value)
    with readable(path):
        if path.is_dir():
            return path
        if path.exists():
            raise UserError(f"{key} {value} is a file; name the folder of the model")
    if not is_hub_id(value):
        raise not_there(key, value)
    inner, wanted, ignored = _files_of_model(value)
    instead = f"a folder that is here, given as {key} FOLDER"
    where = f"{key} {value}"
    return _snapshot(repository_of(value), part, wanted, ignored, where, instead) / inner


def model_to_fetch(value: str, part: str) -> str:
    """What `locate_model` would download, how large it is, from where and into which folder; empty
    if nothing, or if the hub cannot be reached."""
    if not is_hub_id(value):
        return ""
    _, wanted, ignored = _files_of_model(value)
    return _to_fetch(repository_of(value), part, wanted, ignored)


def _files_of_model(hub_id: str) -> tuple[str, list[str], list[str]]:
    """The folder of a model in its repository, and the patterns of its files and of those to
    ignore."""
    inner = hub_id.removeprefix(repository_of(hub_id)).lstrip("/")
    wanted = [f"{inner}/{name}".lstrip("/") for name in _WANTED_FROM_HUB]
    # Not the same weights in another form, which some repositories have next to them.
    return inner, wanted, [f"{inner}/*/*".lstrip("/"), "*consolidated*"]


def _fetch(repository: str, inner: str, part: str, where: str, *, from_base: bool) -> Path:
    """Download one part of a hub repository, or find it in the local cache.

    A base contains the part in a folder of its name, below `inner` if given. A part's own hub id
    may name a file or folder inside the repository; if it names neither, the part's folder is
    taken, and the repository's root if there is none.
    """
    for path, wanted, ignored in _attempts(inner, part, from_base=from_base):
        folder = _snapshot(repository, part, wanted, ignored, where) / path
        if folder.exists():
            break
    return folder


def _attempts(inner: str, part: str, *, from_base: bool) -> list[tuple[str, list[str], list[str]]]:
    """Where a part may be in a repository, one place after the other: its path there, the patterns
    of its files, and of those to ignore. Arguments as for `_fetch`."""
    index: list[str] = []
    if from_base:
        # describes the whole pipeline, such as its pair of experts
        index = [f"{inner}/{_PIPELINE_INDEX}".lstrip("/")]
        folders = [f"{inner}/{name}".lstrip("/") for name in _folders_of(part)]
    else:
        folders = [inner] if inner else []
    if inner.endswith(".safetensors") and not from_base:
        return [(inner, [inner], [])]
    if folders:
        return [
            (folder, [*(f"{folder}/{wanted}" for wanted in _WANTED_FROM_HUB), *index], [])
            for folder in folders
        ]
    return [
        (part, [f"{part}/{wanted}" for wanted in _WANTED_FROM_HUB], []),
        ("", list(_WANTED_FROM_HUB), ["*/*"]),  # only the files at the root
    ]


def is_hub_file(value: str) -> bool:
    """Whether a path is the hub id of one file of weights: `owner/name/file.safetensors`, and no
    local file."""
    match = _HUB_ID.fullmatch(value)
    return bool(match and match["inner"]) and value.endswith(".safetensors") and is_hub_id(value)


def hub_file(hub_id: str, key: str) -> Path:
    """The file that a hub id names, from the local cache or downloaded; under `nothing_fetched`
    from the cache alone. `key` is its setting, for messages."""
    repository, where = repository_of(hub_id), f"{argument(key)} = {hub_id!r}"
    inner = hub_id.removeprefix(f"{repository}/")
    with suppress(UserError), nothing_fetched():
        if (path := _snapshot(repository, key, [inner], [], where) / inner).exists():
            return path
    path = _snapshot(repository, key, [inner], [], where) / inner
    if not path.exists():
        raise UserError(f"{where}: {repository} contains no {inner}; correct the name")
    return path


def _announce(
    repository: str, part: str, allow: list[str], ignore: list[str], instead: str
) -> None:
    """Print what a download brings, how large it is, and what would do instead; nothing if the
    cache has all of it. `part` is a component of a model, or the key of another file."""
    # Ranks look for parts before they are connected, and only then do all but the first print
    # nothing.
    if os.environ.get("RANK", "0") != "0" or not (
        download := _to_fetch(repository, part, allow, ignore)
    ):
        return
    file_or_folder = "folder" if part == "tokenizer" else "file or folder"
    key = part if "." in part else f"model.{part}"
    if not instead:
        instead = f"a {file_or_folder} that is here, set as {argument(key)}"
        if part == key:
            instead = f"a file that is here, set as {argument(key)}"
        elif part not in _WITH_PATHS:
            instead = f"a folder with all parts of the model, set as {argument('model.base')}"
    warn(f"fetching {download}; {instead}, does instead")


def _to_fetch(repository: str, part: str, allow: list[str], ignore: list[str]) -> str:
    """What a download brings, how large it is, from where and into which folder; empty if the cache
    has all of it."""
    # Imported here: a mistake in a path must not wait for the library.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    size = bytes_to_fetch(repository, allow, ignore)
    if size == 0:
        return ""
    if size is None:
        with suppress(LocalEntryNotFoundError):
            snapshot_download(
                repository, allow_patterns=allow, ignore_patterns=ignore, local_files_only=True
            )
            return ""
        amount = "of unknown size"
    else:
        amount = f"{size / 1e9:.2f} GB" if size >= 1e7 else "less than 0.01 GB"
    return f"{part}, {amount}, from {repository} on the hub into {constants.HF_HUB_CACHE}"


def _snapshot(
    repository: str, part: str, allow: list[str], ignore: list[str], where: str, instead: str = ""
) -> Path:
    """The folder of a repository with the files that patterns allow; for messages `where` is the
    key with its value, and `instead` what does without a download, if it is no key of
    `[model]`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    page, remedy = f"https://huggingface.co/{repository}", path_remedy(repository)
    # Somebody who mistyped a path has never heard of the hub.
    near = f" ({remedy})" if remedy.endswith("?") else ""
    try:
        if _MAY_FETCH.get():
            _announce(repository, part, allow, ignore, instead)
        fetched = (
            snapshot_download
            if _MAY_FETCH.get()
            else partial(snapshot_download, local_files_only=True)
        )
        return Path(fetched(repository, allow_patterns=allow, ignore_patterns=ignore))
    except GatedRepoError as error:
        raise UserError(
            f"{where} is gated: accept its licence on {page}, then log in with `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"{where}: no such folder here{near}, and no such model on the hub or no right to read "
            f"it; check the path, or open {page} and log in with `hf auth login`"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise UserError(
            f"{where}: no such folder here{near}, and no such model in the local cache of the hub, "
            "which cannot be reached; correct the path, or go online once"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        remedy = "try again later, or set a local folder"
        if status in (401, 403):
            remedy = f"accept its licence on {page} if it has one, then log in with `hf auth login`"
        raise UserError(f"{where}: the hub answered {status}; {remedy}") from error
