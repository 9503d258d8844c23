"""The history of a timeline, by which the WAL of two servers is compared.

After a failover, two servers of a shard may have different WAL at the same positions, and even begin timelines with the
same number: each takes the next number that it knows of. So timelines are compared by their histories, not by their
numbers. Pure values: nothing here opens a connection.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import field

from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.fleet.record import Count, Record


class TimelineHistory(Record, frozen=True):
    """A timeline, and the positions at which the earlier timelines of its history ended.

    `switches` is empty for timeline 1; for another one it is empty if the server has lost its history file. Then the
    timeline is only known to be the same as itself.
    """

    timeline: Count
    switches: dict[int, Lsn] = field(default_factory=dict)

    @property
    def is_unknown(self) -> bool:
        """Whether the server has lost the history file."""
        return self.timeline > 1 and not self.switches

    @property
    def file_name(self) -> str:
        """The name of the history file in pg_wal (xlog_internal.h)."""
        return f"{self.timeline:08X}.history"

    def parted_from(self, other: TimelineHistory) -> Lsn | None:
        """Return the position after which the two have different WAL; None if they are the same history.

        It is 0/0 if they have no timeline in common, or if that is not known.
        """
        begun = ORIGIN
        for (timeline, end), (other_timeline, other_end) in zip(self._ends(), other._ends(), strict=False):
            if timeline != other_timeline:
                return begun
            ends = [one for one in (end, other_end) if one is not None]
            if end != other_end:
                return min(ends)
            begun = max(ends, default=begun)
        return None

    def _ends(self) -> Iterator[tuple[int, Lsn | None]]:
        """Yield the timelines in order, each with its end; the last one has none yet."""
        yield from sorted(self.switches.items())
        yield self.timeline, None
