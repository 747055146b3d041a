"""Display times of a video's frames, read from its packets without decoding them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from av import Packet, VideoStream

SLACK_SECONDS = 0.001
"""Matroska rounds timestamps to a millisecond: a frame due at 1/24 s may say 0.042 s."""


class Timeline:
    """First and last display times of the packets added so far, in the file's own seconds."""

    def __init__(self) -> None:
        self.count = 0
        self.first = float("inf")
        self.last = float("-inf")
        self._end = float("-inf")

    def add(self, packet: "Packet[VideoStream]") -> None:
        """Add one packet; packets that an edit list hides do not count."""
        ticks = packet.dts if packet.pts is None else packet.pts
        if packet.is_discard or ticks is None or packet.time_base is None:
            return
        time = float(ticks * packet.time_base)
        self.count += 1
        self.first, self.last = min(self.first, time), max(self.last, time)
        self._end = max(self._end, time + float((packet.duration or 0) * packet.time_base))

    @property
    def end(self) -> float:
        """End time of the last frame; if the file gives no duration, the frame is shown for the average duration of the others."""
        if self._end > self.last:
            return self._end
        # A single frame has no average; anything above the slack counts as shown.
        return self.last + ((self.last - self.first) / (self.count - 1) if self.count > 1 else 2 * SLACK_SECONDS)

    @property
    def seconds(self) -> float:
        """Total time in seconds that the frames added so far are shown."""
        return self.end - self.first if self.count else 0.0
