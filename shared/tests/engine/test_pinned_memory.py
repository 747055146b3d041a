"""Buffers of the host for one device's copies: used again, bounded, page-locked once."""

import gc
import mmap
from types import SimpleNamespace

import torch
from torch import nn

from ditkit_core.engine import pinned_memory
from ditkit_core.engine.pinned_memory import HostBuffers, Streamed, host_memory, page_lock

PAGE = mmap.PAGESIZE
HOST, ONE = torch.device("cpu"), torch.device("cpu:1")


def test_memory_for_a_gpu_shares_no_page():
    """Small blocks of the allocator are next to each other."""
    there = [
        host_memory(size, torch.device("cuda", 0))
        for size in (1, 100, PAGE, PAGE + 1, 3 * PAGE - 1) * 4
    ]
    pages = [range(x.data_ptr(), x.data_ptr() + x.nbytes, PAGE) for x in there]
    assert all(x.data_ptr() % PAGE == x.nbytes % PAGE == 0 for x in there)
    assert len(set().union(*pages)) == sum(map(len, pages)) == 4 * (1 + 1 + 1 + 2 + 3)
    assert (
        host_memory(100, HOST).nbytes == 100 and host_memory(0, torch.device("cuda", 0)).nbytes == 0
    )


def test_streamed_tensors_are_in_such_memory(monkeypatch):
    asked, whole = [], torch.full((PAGE,), 7, dtype=torch.uint8)
    monkeypatch.setattr(pinned_memory, "host_memory", lambda *given: asked.append(given) or whole)
    layer = nn.Linear(3, 2)
    streamed = Streamed([(layer._parameters, name) for name in ("weight", "bias")], ONE)
    assert asked == [(512, ONE)] and streamed.host.nbytes == 512
    assert streamed.host.data_ptr() == whole.data_ptr()


def test_buffers_are_used_again_and_never_more_than_at_once():
    buffers = HostBuffers(ONE)
    small, large = buffers.take(100), buffers.take(300)
    assert buffers.num_bytes == 400 and small.dtype == torch.uint8 and small.device == HOST
    for buffer in (small, large):
        buffers.give(buffer)
    assert buffers.take(90) is small, "the smallest that is enough"
    assert buffers.take(200) is large
    for buffer in (small, large):
        buffers.give(buffer)
    taken = [buffers.take(350)]  # in place of both
    assert buffers.num_bytes <= 450 and taken[0].nbytes == 350
    taken.append(buffers.take(300))
    assert buffers.num_bytes == 650, "needed at once"
    for buffer in taken:
        buffers.give(buffer)
    for size in (10, 20, 340, 5, 300, 200):
        buffers.give(buffers.take(size))
        assert buffers.num_bytes == 650


def test_memory_for_a_gpu_is_page_locked_once_and_by_whole_pages(monkeypatch, capsys):
    locked, unlocked, waits, allowed = [], [], [], True

    def lock(tensor, device, record):
        if allowed:
            locked.append((tensor.data_ptr(), tensor.nbytes))
            record[tensor.data_ptr()] = device
        return allowed

    monkeypatch.setattr(pinned_memory, "page_lock", lock)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    monkeypatch.setattr(
        torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostUnregister=unlocked.append)
    )
    buffers = HostBuffers(torch.device("cuda:0"))
    for _ in range(3):
        buffers.give(buffers.take(PAGE + 1))
    assert locked == [(locked[0][0], 2 * PAGE)] and locked[0][0] % PAGE == 0 and not unlocked
    buffers.give(buffers.take(2 * PAGE + 1))
    assert unlocked == [locked[0][0]] and buffers.num_bytes == 3 * PAGE
    for buffer in [buffers.take(PAGE), buffers.take(2 * PAGE)]:
        buffers.give(buffer)
    assert len(locked) == 3 and len(waits) == 1
    buffers.give(buffers.take(5 * PAGE))
    assert unlocked == [address for address, _ in locked[:3]] and len(waits) == 2, (
        "one wait for all that make room"
    )
    allowed = False
    held = [buffers.take(5 * PAGE), buffers.take(5 * PAGE), buffers.take(5 * PAGE)]
    assert capsys.readouterr().err.count("could not be page-locked") == 1
    assert len(locked) == 4 and len(held) == 3
    del buffers, held
    gc.collect()
    assert unlocked == [address for address, _ in locked]


def test_the_error_of_memory_that_cannot_be_locked_is_taken_at_once(monkeypatch):
    """CUDA keeps it for whoever launches the next kernel, on this device."""
    refused = SimpleNamespace(cudart=lambda: SimpleNamespace(cudaHostRegister=lambda *given: 1))
    launched, locked = [], {}

    def ones(*shape, device):
        launched.append(device)
        raise RuntimeError("CUDA error: invalid argument")

    memory = torch.zeros(8, dtype=torch.uint8)
    monkeypatch.setattr(pinned_memory, "runtime_of", lambda device: refused)
    monkeypatch.setattr(torch, "ones", ones)
    assert not page_lock(memory, ONE, locked)
    assert launched == [ONE] and not locked
