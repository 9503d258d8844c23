"""Running a case on two real shards: a full snapshot, increments, all of them restored, and compared with the source.

There is no model of what rows there should be. Where nobody writes the source is read by PostgreSQL's own COPY, sorted
by PostgreSQL: after a create, or, where something is done while one runs, at its cut. What is restored must be that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import psycopg

from fleet.config import Fleet
from fleet.nodes.connections import with_database
from fleet.nodes.relation_locks import RelationLockedError
from snapshots.create.full import create_full
from snapshots.create.increment import create_increment
from snapshots.create.request import CreateRequest
from storage.errors import RefusedError, SnapshotError
from tests.fuzz.databases import drop_databases
from tests.fuzz.during import During
from tests.fuzz.figures import Figures
from tests.fuzz.remedies import mend
from tests.fuzz.script import Case, Transaction
from tests.fuzz.servers import Shards
from tests.fuzz.state import FoundError, Sequences, State, compare, sequences_of, state_of
from tests.snapshot_runs import Runs
from wal.slots.waiting import SlotWaitError

WAIT_SECONDS = 3.0
NAME = "fuzzed"
# Refused is what would wait for a transaction, or for a lock that one holds.
WAITED = {SlotWaitError("").slug, RelationLockedError("").slug}


@dataclass(slots=True)
class Run:
    """One case under way. `states` by increment and shard; `later`: the sequences as they were after a cut too."""

    case: Case
    runs: Runs
    target: Fleet
    figures: Figures
    states: list[list[State]] = field(default_factory=list)
    later: list[list[list[Sequences]]] = field(default_factory=list)

    def whole(self) -> None:
        with Shards(self.dsns, has_origin=self.case.options.get("origin") == "yes") as shards:
            try:
                with self.figures.timed("setup"):
                    self.set_up(shards)
                for number, transactions in enumerate(self.case.intervals):
                    with self.figures.timed("transactions"):
                        shards.interval([one for one in transactions if not one.at])
                        if not number:
                            shards.end_all()
                    self.take(shards, [one for one in transactions if one.at])
                shards.end_all()
            finally:
                self.figures.add(shards)
        for number in self.judged():
            self.judge(number)

    @property
    def dsns(self) -> list[str]:
        return [node.dsn for node in self.runs.fleet.primaries]

    def set_up(self, shards: Shards) -> None:
        for on, statement in self.case.setup:
            for shard in on:
                if not shards.attempt(shard, statement):
                    self.figures.unmade.append(f"{shards.answer}: {statement}")
        self.runs.init()

    def judged(self) -> list[int]:
        """The last state first; restoring is most of what a case costs, and the last has the most behind it."""
        every = [*reversed(range(len(self.states)))]
        return every[:1] if self.case.options.get("judge") == "last" else every

    def take(self, shards: Shards, meanwhile: Sequence[Transaction]) -> None:
        """A full snapshot, or an increment; `meanwhile` is done where it is known on which side of the cut that is."""
        during = During(shards, self.dsns, [*meanwhile])
        number = len(self.states)
        with told(f"create of increment {number}"), self.figures.timed("increments" if number else "full"):
            while True:
                try:
                    self.create(during)
                    break
                except SnapshotError as error:
                    if not self.mended(shards, error):
                        raise
                self.figures.refusals += 1
            self.figures.increments += number > 0
        self.figures.meanwhile += len(meanwhile)
        with self.figures.timed("reading"):
            shards.close_halves()
            self.states.append(during.states or [state_of(dsn) for dsn in self.dsns])
            self.later.append([[*during.later.get(dsn, []), sequences_of(dsn)] for dsn in self.dsns])
            during.rest()

    def create(self, during: During) -> None:
        request = CreateRequest(NAME, wait_seconds=WAIT_SECONDS)
        work = create_increment if self.states else create_full
        work(self.runs.fleet, request, self.runs.spark, during)

    def mended(self, shards: Shards, error: SnapshotError) -> bool:
        """Whether it was right to refuse, by what the servers say: what stood in the way is then away."""
        if error.slug in WAITED and shards.is_holding:
            shards.end_all()
            return True
        if error.exit_code != RefusedError.exit_code:
            return False
        try:
            return any([mend(dsn) for dsn in shards.dsns])
        except psycopg.errors.LockNotAvailable:
            # Somebody holds a table that has to be altered.
            shards.end_all()
            return any([mend(dsn) for dsn in shards.dsns])

    def judge(self, number: int) -> None:
        for node in self.target.primaries:
            drop_databases(with_database(node, "postgres").dsn, None)
        with told(f"restore of increment {number}"), self.figures.timed("restores"):
            self.runs.restore(NAME, self.target, number)
        self.figures.restored += 1
        with self.figures.timed("reading"):
            for place, node in enumerate(self.target.primaries):
                expected = self.states[number][place]
                compare(expected, state_of(node.dsn), self.later[number][place], f"increment {number}, {node.id}")
                self.figures.rows += sum(text.count(b"\n") for text in expected.rows.values())
        if self.case.options.get("check") == "yes":
            with self.figures.timed("checks"):
                self.check(number)

    def check(self, number: int) -> None:
        with told(f"check of increment {number}"):
            report = self.runs.check_one(NAME, number)
        wanted = "valid" if len(self.runs.fleet.nodes) > len(self.runs.fleet.primaries) else "inconclusive"
        if (report.result, report.conflicts) != (wanted, []):
            raise FoundError(f"check of increment {number}: {report}")
        self.figures.checked += 1


@contextmanager
def told(what: str) -> Iterator[None]:
    """Raise what Cutline raises as FoundError, saying at what."""
    try:
        yield
    except FoundError:
        raise
    except Exception as error:
        hint = error.hint if isinstance(error, SnapshotError) else ""
        raise FoundError(f"{what}: {type(error).__name__}: {error}\n{hint}") from error
