"""What is done while a create runs, at points of it where it is known on which side of the cut that lies."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from fleet.progress import Silent
from snapshots.operations.crash_points import CrashPoint
from tests.fuzz.script import Transaction
from tests.fuzz.servers import Shards
from tests.fuzz.state import Sequences, State, sequences_of, state_of

# All nodes' start markers are there, so what is done from now on is in no cut of this attempt.
CUT = CrashPoint.STARTS_WRITTEN
AFTER = (CrashPoint.STARTS_WRITTEN, CrashPoint.FINISHES_WRITTEN, CrashPoint.ARCHIVED)
BEFORE = (CrashPoint.INTENT_STORED, CrashPoint.BASE_COPIED, CrashPoint.PREPARED_OVER)


@dataclass(slots=True)
class During(Silent):
    """Watches one create; every transaction is run once, where its point is first reached.

    `states` are the shards' at the cut that counts, which is the last one made, where something is done after it;
    `later` are the sequences after that, by DSN.
    """

    shards: Shards
    dsns: Sequence[str]
    waiting: list[Transaction]
    states: list[State] | None = None
    later: dict[str, list[Sequences]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reached(self, point: str, *, node: str = "") -> None:
        """Read the shards if this is the cut, and run what belongs here."""
        with self.lock:
            if point == CUT and (self.states is not None or any(one.at in AFTER for one in self.waiting)):
                self.shards.close_halves()
                self.states = [state_of(dsn) for dsn in self.dsns]
                self.later = {dsn: [] for dsn in self.dsns}
            for one in [one for one in self.waiting if one.at == point]:
                self.waiting.remove(one)
                self.shards.transaction(one)
                for dsn, seen in self.later.items():
                    seen.append(sequences_of(dsn))

    def rest(self) -> None:
        """Run what belongs to points that were not reached."""
        for one in self.waiting:
            self.shards.transaction(one)
