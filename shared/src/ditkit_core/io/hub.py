"""Uploads files to a model repository of the hub, in one commit."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ditkit_core.errors import UserError

_REPOSITORY = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Hub:
    """Where exported files are uploaded to."""

    repository: str = ""
    """Id of the repository; without a name in front it is the user's own. Empty to upload
    nothing."""
    card: str = ""
    """File for the model card, `-` to print it; empty for neither."""
    private: bool = False
    """Whether a new repository is private; one that exists stays as it is."""
    revision: str = ""
    """The branch; empty for the main one."""
    license: str = ""


def check_hub(hub: Hub) -> None:
    """Refuse, before anything slow and without asking the network, what could not be uploaded or
    written."""
    card = Path(hub.card) if hub.card not in ("", "-") else None
    if not hub.repository:
        if card is not None and card.exists():
            raise UserError(
                f"--card {card} exists; name another file, or add --push NAME/REPO to upload it as "
                f"the card"
            )
        return
    from huggingface_hub import constants, get_token

    where = f"--push {hub.repository}"
    if not _REPOSITORY.fullmatch(hub.repository):
        raise UserError(
            f"{where} is not the id of a repository; write it as NAME/REPO, such as me/my-lora"
        )
    if card is not None and not card.is_file():
        raise UserError(
            f"--card {card} does not exist; leave out --push to write it, or leave out --card to "
            f"upload a generated one"
        )
    if constants.is_offline_mode():
        raise UserError(
            f"{where}: the hub is set to offline; unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE"
        )
    if not get_token():
        raise UserError(
            f"{where}: nobody is logged in to the hub; run `hf auth login`, or set HF_TOKEN to a "
            f"token that may write"
        )


def upload(hub: Hub, files: Mapping[str, Path | bytes], message: str) -> str:
    """Upload files in one commit; the repository and the branch are created if they do not exist.

    Args:
        files: By path in the repository, a local file or its content.

    Returns:
        The page of what was uploaded.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():  # they would fill a log
        disable_progress_bars()
    api = HfApi(library_name="ditkit")
    where = f"--push {hub.repository}"
    revision = hub.revision or None
    try:
        adds = [
            CommitOperationAdd(path_in_repo=path, path_or_fileobj=content)
            for path, content in files.items()
        ]
        full = api.create_repo(hub.repository, private=hub.private or None, exist_ok=True).repo_id
        if revision:
            api.create_branch(full, branch=revision, exist_ok=True)
        api.create_commit(full, adds, commit_message=message, revision=revision)
    except errors.HFValidationError as error:
        raise UserError(
            f"{where} is not the id of a repository ({_line(error)}); write it as NAME/REPO"
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        remedy = _REMEDIES.get(status, "the local files stay; give the same command again later")
        raise UserError(
            f"{where}: the hub answered {status} ({error.server_message or _line(error)}); {remedy}"
        ) from error
    # OSError: also a file that cannot be read. RuntimeError and ValueError are what its upload
    # libraries raise.
    except (_http_error(), OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"{where}: not uploaded to {api.endpoint} ({_line(error)}); check the network and give "
            f"the same command again"
        ) from error
    return f"{api.endpoint}/{full}" + (f"/tree/{revision}" if revision else "")


_REMEDIES = {
    401: "the token is not accepted: log in again with `hf auth login`",
    403: "the token may not write there: use one with the role write, and a repository of your own or of your organization",
    404: "there is no such user, organization or repository that the token sees: check the name, or log in with `hf auth login`",
}


def bytes_to_fetch(repository: str, allow: Sequence[str], ignore: Sequence[str]) -> int | None:
    """Size of the files of a model's repository that patterns allow and the hub's cache lacks.

    0 also where nothing can be fetched: the client is offline, the hub is out of reach, or it
    refuses the repository. None if the hub does not tell the sizes.
    """
    from huggingface_hub import HfApi, constants, errors
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    try:
        info = HfApi().model_info(repository, files_metadata=True)
    except errors.HfHubHTTPError as error:
        return 0 if error.response.status_code in (401, 403, 404) else None
    except (_http_error(), OSError):
        return 0
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")
    files = {file.rfilename: file for file in info.siblings or ()}
    size = 0
    for name in filter_repo_objects(files, allow_patterns=[*allow], ignore_patterns=[*ignore]):
        file = files[name]
        # A file that an older commit has, too, is not fetched again; blobs have the names of their
        # hashes.
        blob = file.lfs.sha256 if file.lfs else file.blob_id
        if (folder / "snapshots" / str(info.sha) / name).exists() or (
            blob and (folder / "blobs" / blob).exists()
        ):
            continue
        if file.size is None:
            return None
        size += file.size
    return size


def _http_error() -> type[Exception]:
    """What a connection that fails raises: an error of httpx or httpx2, whichever the library uses
    and has as the base of its own."""
    from huggingface_hub.errors import HfHubHTTPError

    base: type[Exception] = HfHubHTTPError.__bases__[0]
    return base


def _line(error: BaseException) -> str:
    # The library names the file and has the reason as the cause.
    text = str(error) if error.__cause__ is None else f"{error} {error.__cause__}"
    return " ".join(text.split())[:300] or type(error).__name__
