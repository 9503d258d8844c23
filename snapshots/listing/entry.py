"""What a listing has of one snapshot, and the states in which it can be."""

from __future__ import annotations

from dataclasses import dataclass

from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import CommitSummary
from cutline.snapshots.records.lost_chains import LostChain
from cutline.wal.slots.retained import Retained

COMPLETE, BROKEN, LOST, ENDED, ONLY_FULL = "complete", "broken", "lost", "ended", "only-full"


@dataclass(frozen=True, slots=True)
class Entry:
    """One snapshot. If its chain can't be read, `problem` says why and `chain` is the part before that, if any.

    `has_damaged_mark`: all of the chain can be read, and `problem` is that of a mark.
    `lost` is set if the chain was given up and can't be continued; `retained` is the WAL that the nodes keep for it.
    `is_only_full`: its increments were pruned. `summaries` are of the increments.
    """

    name: str
    chain: Chain | None
    problem: str | None = None
    has_damaged_mark: bool = False
    lost: LostChain | None = None
    retained: tuple[Retained, ...] = ()
    is_only_full: bool = False
    summaries: tuple[CommitSummary, ...] = ()

    @property
    def state(self) -> str:
        """Broken: a commit is missing, or one that was read is damaged. Lost, ended, only-full: no increment follows.

        Because a node kept too much WAL for it, a command ended it, or its increments were pruned. Ended is also one
        whose mark is damaged. The objects that the commits list are read by `check` alone.
        """
        if self.problem and not self.has_damaged_mark:
            return BROKEN
        if self.is_only_full:
            return ONLY_FULL
        if self.lost:
            return ENDED if self.lost.is_planned else LOST
        return ENDED if self.has_damaged_mark else COMPLETE

    @property
    def remark(self) -> str:
        """The explanation of the state for people, "" if it needs none."""
        pruned = "its increments were pruned, and no others can be added" if self.is_only_full else ""
        return self.problem or pruned or (self.lost.text if self.lost else "")
