"""Finds accesses to memory that nothing orders, from a log of streams: vector clocks, as race
detectors of threads have them.

Work on one stream runs in order. Work on two streams does not, unless one waits for an event of the
other, or the host waited in between. Whatever is launched comes after all that the host knows to be
done. A stream's clock says how far every stream is, at least, when its next work runs; an access
that an earlier one must precede is a race if the clock does not reach it.

Freed memory goes to the next work of the stream that allocated it, whatever other streams still do
with it. If one still writes it, that is a race. If one still reads it, what it makes of the bytes
is worthless, and a race only if somebody reads that.

`torch.cuda._sanitizer` has such clocks, too, but is private, knows no host and checks no freed
memory.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

HOST_THREAD = "the host"

Clock = Counter[str]
"""How much of each stream's work is done, by its name."""


@dataclass(eq=False, slots=True)  # frozen ones are made in twice the time
class _Access:
    """One piece of work that reads or writes: its stream, its number there, what it is, and the
    memory that it writes."""

    stream: str
    time: int
    action: str
    written: tuple["_Memory", ...] = ()

    def __str__(self) -> str:
        return f"{self.action} on {self.stream}"


@dataclass(slots=True)
class _Memory:
    """One allocation: the stream to which its bytes return, the last write, and each stream's last
    read since."""

    owner: str
    write: _Access
    reads: dict[str, _Access] = field(default_factory=dict)
    spoiled: str = ""
    """Why the bytes are worthless; empty if they are not."""


class HappensBefore:
    """Records what streams do, in the order of the host's calls.

    Attributes:
        races: What nothing orders, one line for each pair of accesses.
    """

    def __init__(self) -> None:
        self.races: list[str] = []
        self._clocks: dict[str, Clock] = {HOST_THREAD: Clock()}
        self._behind: set[str] = set()
        """Streams that do not know yet what the host has learned."""
        self._memory: dict[int, _Memory] = {}

    def launch(
        self, stream: str, action: str, reads: Iterable[int] = (), writes: Iterable[int] = ()
    ) -> None:
        """Run something on a stream, or on the host: it reads and writes memory, which is named by
        a number."""
        clock = self._reached(stream)
        clock[stream] += 1
        if stream == HOST_THREAD:
            self._behind = {*self._clocks}
        written = {key: self._of(key, stream) for key in writes}
        access = _Access(stream, clock[stream], action, tuple(written.values()))
        for key in reads:
            if key not in written:
                memory = self._of(key, stream)
                self._check(clock, access, memory.write)
                memory.reads[stream] = access
                if memory.spoiled:
                    self.races.append(f"{access} reads what {memory.spoiled}")
        for memory in written.values():
            self._check(clock, access, memory.write, *memory.reads.values())
            memory.write, memory.reads, memory.spoiled = access, {}, ""

    def record(self, stream: str) -> Clock:
        """An event: everything that the stream was given so far is done."""
        return self._reached(stream).copy()

    def wait(self, stream: str, event: Clock) -> None:
        """Let the stream's next work, or the host, wait for an event."""
        clock = self._reached(stream)
        for other, time in event.items():
            clock[other] = max(clock[other], time)
        if stream == HOST_THREAD:
            self._behind = {*self._clocks}

    def synchronize(self, *streams: str) -> None:
        """Let the host wait for streams."""
        for stream in streams:
            self.wait(HOST_THREAD, self.record(stream))

    def allocate(self, key: int, stream: str) -> None:
        """Allocate memory on a stream, which may have had its bytes in use a moment ago."""
        self._memory[key] = _Memory(
            stream, _Access(stream, self._reached(stream)[stream], "its allocation")
        )

    def free(self, key: int) -> None:
        """Free memory: its bytes are given to whatever the stream that allocated it is given
        next."""
        if (memory := self._memory.pop(key, None)) is None:
            return
        clock = self._reached(memory.owner)
        released = _Access(memory.owner, 0, "a release")
        self._check(clock, released, memory.write)
        for read in memory.reads.values():
            if any(derived.write is not read or derived.reads for derived in read.written):
                self._check(clock, released, read)
            elif clock[read.stream] < read.time:
                for derived in read.written:
                    derived.spoiled = f"{read} made of memory that may be in use again"

    def _reached(self, stream: str) -> Clock:
        """A stream's clock at its next work, which the host launches after all that it waited
        for."""
        if stream not in self._clocks:
            self._clocks[stream] = self._clocks[HOST_THREAD].copy()
        elif stream in self._behind:
            self._behind.discard(stream)
            self.wait(stream, self._clocks[HOST_THREAD])
        return self._clocks[stream]

    def _of(self, key: int, stream: str) -> _Memory:
        return self._memory.setdefault(key, _Memory(stream, _Access(stream, 0, "its allocation")))

    def _check(self, clock: Clock, access: _Access, *before: _Access) -> None:
        self.races += [
            f"{access} does not wait for {other}"
            for other in before
            if clock[other.stream] < other.time
        ]
