"""Transactions that run during a create, at points that are known to be before or after its cut."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Silent
from tests.fuzz.script import Transaction
from tests.fuzz.servers import Shards
from tests.fuzz.state import Sequences, State, sequences_of, state_of

# Every node has its start marker, so no later transaction is in the cut of this attempt.
CUT = CrashPoint.STARTS_WRITTEN
AFTER = (CrashPoint.STARTS_WRITTEN, CrashPoint.FINISHES_WRITTEN, CrashPoint.ARCHIVED)
BEFORE = (CrashPoint.INTENT_STORED, CrashPoint.BASE_COPIED, CrashPoint.PREPARED_OVER)


@dataclass(slots=True)
class During(Silent):
    """Follows one create, and runs every transaction once, when its point is first reached.

    `states` are the shards' at the last cut made, the one that counts, if a transaction runs after it; `later` are
    the sequences after that cut, by DSN.
    """

    shards: Shards
    dsns: Sequence[str]
    waiting: list[Transaction]
    states: list[State] | None = None
    later: dict[str, list[Sequences]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reached(self, point: str, *, node: str = "") -> None:
        """Read the shards if this is the cut, and run the transactions of this point."""
        with self.lock:
            if point == CUT and (self.states is not None or any(one.at in AFTER for one in self.waiting)):
                self.shards.end_closing()
                self.states = [state_of(dsn) for dsn in self.dsns]
                self.later = {dsn: [] for dsn in self.dsns}
            for one in [one for one in self.waiting if one.at == point]:
                self.waiting.remove(one)
                self.shards.run_transaction(one)
                for dsn, seen in self.later.items():
                    seen.append(sequences_of(dsn))

    def run_rest(self) -> None:
        """Run the transactions whose points were not reached."""
        for one in self.waiting:
            self.shards.run_transaction(one)
