"""Ranks that do not see the same folder are refused, by all of them."""

import errno
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ditkit_core.distributed.ranks import Ranks
from ditkit_core.distributed.shared_folders import check_shared, open_run
from ditkit_core.errors import UserError


@dataclass
class OneOfTwo(Ranks):
    """A rank of two, with what the other one gives in each exchange."""

    size: int = 2
    given: list[object] = field(default_factory=list)

    def all_gather_object(self, value):
        other = self.given.pop(0)
        return [value, other] if self.is_first else [other, value]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is not seen at once is not seen."""
    monkeypatch.setattr("ditkit_core.distributed.shared_folders._SEEN_SECONDS", 0.0)


@pytest.mark.usefixtures("at_once")
def test_ranks_that_see_another_run_folder_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(
            UserError,
            match="is not the folder that rank 0 has locked .* one that all machines share",
        ),
        open_run(tmp_path, None, OneOfTwo(rank=1, given=["somebody else"])),
    ):
        pass


@pytest.mark.usefixtures("at_once")
def test_ranks_that_see_another_cache_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    check_shared(tmp_path, "encode.cache", OneOfTwo(rank=1, given=["mark", True]))
    said = "than rank 0; set encode.cache to a folder that all machines share"
    with pytest.raises(UserError, match=said):
        check_shared(tmp_path, "encode.cache", OneOfTwo(rank=1, given=["another mark", True]))
    with pytest.raises(UserError, match=said):
        check_shared(tmp_path, "encode.cache", OneOfTwo(rank=0, given=["", False]))
    assert [path.name for path in tmp_path.iterdir()] == ["mark"], "the first rank leaves nothing"


@pytest.mark.usefixtures("at_once")
def test_a_cache_that_nobody_can_write_is_no_reason_to_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object, **named: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "touch", fail)
    check_shared(tmp_path, "encode.cache", OneOfTwo(rank=0, given=["", True]))
    assert tmp_path.exists()
