"""Clocks of streams: what orders two accesses, and what does not."""

import pytest

from ditkit_core.testing.happens_before import HOST_THREAD, HappensBefore

MEMORY, OTHER = 1, 2
A, B = "a", "b"


@pytest.fixture
def log() -> HappensBefore:
    log = HappensBefore()
    log.allocate(MEMORY, A)
    log.launch(A, "write", writes=[MEMORY])
    return log


@pytest.mark.parametrize("access", [{"reads": [MEMORY]}, {"writes": [MEMORY]}])
def test_another_stream_has_to_wait_for_a_write(
    log: HappensBefore, access: dict[str, list[int]]
) -> None:
    log.launch(B, "access", **access)
    assert log.races == ["access on b does not wait for write on a"]


def test_a_stream_does_not_wait_for_itself(log: HappensBefore) -> None:
    log.launch(A, "read", reads=[MEMORY])
    log.launch(A, "write", writes=[MEMORY])
    log.free(MEMORY)
    assert log.races == []


def test_an_event_orders_what_came_before_it(log: HappensBefore) -> None:
    event = log.record(A)
    log.launch(A, "later", writes=[OTHER])
    log.wait(B, event)
    log.launch(B, "read", reads=[MEMORY])
    assert log.races == []
    log.launch(B, "read", reads=[OTHER])
    assert log.races == ["read on b does not wait for later on a"]


def test_an_event_that_somebody_else_waited_for_orders_nothing(log: HappensBefore) -> None:
    log.wait("c", log.record(A))
    log.launch(B, "read", reads=[MEMORY])
    assert len(log.races) == 1


def test_waits_add_up(log: HappensBefore) -> None:
    log.wait(B, log.record(A))
    log.wait("c", log.record(B))
    log.launch("c", "read", reads=[MEMORY])
    assert log.races == []


def test_the_host_orders_all_that_it_launches_later(log: HappensBefore) -> None:
    log.launch(HOST_THREAD, "look", reads=[MEMORY])
    assert log.races == ["look on the host does not wait for write on a"]
    log.synchronize(A)
    log.launch(HOST_THREAD, "look", reads=[MEMORY])
    log.launch(B, "read", reads=[MEMORY])
    assert len(log.races) == 1


def test_a_write_waits_for_every_reader(log: HappensBefore) -> None:
    event = log.record(A)
    for stream in (B, "c"):
        log.wait(stream, event)
        log.launch(stream, "read", reads=[MEMORY])
    log.wait(A, log.record(B))
    log.launch(A, "write", writes=[MEMORY])
    assert log.races == ["write on a does not wait for read on c"]


def test_memory_that_is_written_elsewhere_is_not_given_back(log: HappensBefore) -> None:
    log.wait(B, log.record(A))
    log.launch(B, "write", writes=[MEMORY])
    log.free(MEMORY)
    assert log.races == ["a release on a does not wait for write on b"]


def test_a_result_of_memory_that_was_given_back_is_worthless(log: HappensBefore) -> None:
    """And nothing is wrong as long as nobody reads it: the copy of a tensor that autograd
    dropped."""
    log.wait(B, log.record(A))
    log.launch(B, "copy", reads=[MEMORY], writes=[OTHER])
    log.free(MEMORY)
    assert log.races == []
    log.launch(B, "read", reads=[OTHER])
    assert log.races == ["read on b reads what copy on b made of memory that may be in use again"]
    log.launch(B, "write", writes=[OTHER])
    log.launch(B, "read", reads=[OTHER])
    assert len(log.races) == 1


def test_memory_that_was_read_elsewhere_is_not_given_back(log: HappensBefore) -> None:
    log.wait(B, log.record(A))
    log.launch(B, "copy", reads=[MEMORY], writes=[OTHER])
    log.launch(B, "read", reads=[OTHER])
    log.free(MEMORY)
    assert log.races == ["a release on a does not wait for copy on b"]


def test_a_new_allocation_may_be_what_its_stream_used_a_moment_ago(log: HappensBefore) -> None:
    log.allocate(OTHER, A)
    log.launch(B, "fill", writes=[OTHER])
    assert log.races == ["fill on b does not wait for its allocation on a"]
