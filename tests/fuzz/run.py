"""Running a case on real shards: a full snapshot and increments, which are restored and compared with the source.

There is no model of the expected rows. While nobody writes, PostgreSQL's own COPY reads and sorts the source: after a
create or, if transactions run during it, at its cut. The restored state must be the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import psycopg

from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.nodes.relation_locks import RelationLockedError
from cutline.restore.drill.restorable import check_restorable
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.fold.fold import fold
from cutline.snapshots.fold.sources import sources_of
from cutline.snapshots.records.proven_chains import read_chain
from cutline.storage.errors import RefusedError, SnapshotError
from cutline.wal.drain.open_transactions import SlotWaitError
from tests.chains.folded_rows import FoldedRow, driver_folds, rows_at_cut, spark_folds
from tests.commands.snapshot_runs import Runs
from tests.fuzz.databases import drop_databases
from tests.fuzz.during import During
from tests.fuzz.figures import Figures
from tests.fuzz.remedies import apply_remedies
from tests.fuzz.script import Case, Transaction
from tests.fuzz.servers import Shards
from tests.fuzz.state import FoundError, Sequences, State, compare, sequences_of, state_of

WAIT_SECONDS = 3.0
NAME = "fuzzed"
# The refusals of a create that would wait for a transaction, or for a lock that one holds.
WAITED = {SlotWaitError("").slug, RelationLockedError("").slug}


@dataclass(slots=True)
class Run:
    """One running case. `states` are by increment and shard; `later` are the sequences as they were after each cut."""

    case: Case
    runs: Runs
    target: Fleet
    figures: Figures
    states: list[list[State]] = field(default_factory=list)
    later: list[list[list[Sequences]]] = field(default_factory=list)

    def run(self) -> None:
        with Shards(self.dsns, has_origin=self.case.options.get("origin") == "yes") as shards:
            try:
                with self.figures.timed("setup"):
                    self.set_up(shards)
                for number, transactions in enumerate(self.case.intervals):
                    with self.figures.timed("transactions"):
                        shards.run_interval([one for one in transactions if not one.at])
                        if not number:
                            shards.end_all()
                    self.take(shards, [one for one in transactions if one.at])
                shards.end_all()
            finally:
                self.figures.add(shards)
        is_checked_only = self.case.options.get("judge") == "check"
        for number in self.judged_increments():
            if is_checked_only:
                self.check(number)
            else:
                self.judge(number)
        if self.case.options.get("restorable") == "yes":
            self.check_restorable(len(self.states) - 1)

    @property
    def dsns(self) -> list[str]:
        return [node.dsn for node in self.runs.fleet.primaries]

    def set_up(self, shards: Shards) -> None:
        for on, statement in self.case.setup:
            for shard in on:
                if not shards.attempt(shard, statement):
                    self.figures.failed_setup.append(f"{shards.last_refusal}: {statement}")
        self.runs.init()

    def judged_increments(self) -> list[int]:
        """The increments to judge, last first: restores are most of a case's cost, and the last covers the most."""
        every = [*reversed(range(len(self.states)))]
        return every[:1] if self.case.options.get("judge") == "last" else every

    def take(self, shards: Shards, meanwhile: Sequence[Transaction]) -> None:
        """Take a full snapshot or an increment; `meanwhile` runs at points known to be before or after its cut."""
        during = During(shards, self.dsns, [*meanwhile])
        number = len(self.states)
        with named_step(f"create of increment {number}"), self.figures.timed("increments" if number else "full"):
            while True:
                try:
                    self.create(during)
                    break
                except SnapshotError as error:
                    if not self.remedy(shards, error):
                        raise
                self.figures.refusals += 1
            self.figures.increments += number > 0
        self.figures.meanwhile += len(meanwhile)
        with self.figures.timed("reading"):
            shards.end_closing()
            self.states.append(during.states or [state_of(dsn) for dsn in self.dsns])
            self.later.append([[*during.later.get(dsn, []), sequences_of(dsn)] for dsn in self.dsns])
            during.run_rest()

    def create(self, during: During) -> None:
        request = CreateRequest(NAME, wait_seconds=WAIT_SECONDS)
        work = create_increment if self.states else create_full
        work(self.runs.fleet, request, self.runs.spark, during)

    def remedy(self, shards: Shards, error: SnapshotError) -> bool:
        """Remove the cause of a refusal; return whether the servers' state justified it."""
        if error.slug in WAITED and shards.is_holding:
            shards.end_all()
            return True
        if error.exit_code != RefusedError.exit_code:
            return False
        try:
            return any([apply_remedies(dsn) for dsn in shards.dsns])
        except psycopg.errors.LockNotAvailable:
            # A transaction holds a lock on a table that must be altered.
            shards.end_all()
            return any([apply_remedies(dsn) for dsn in shards.dsns])

    def judge(self, number: int) -> None:
        for node in self.target.primaries:
            drop_databases(with_database(node, "postgres").dsn, None)
        with named_step(f"restore of increment {number}"), self.figures.timed("restores"):
            self.runs.restore(NAME, self.target, number)
        self.figures.restored += 1
        with self.figures.timed("reading"):
            for place, node in enumerate(self.target.primaries):
                expected = self.states[number][place]
                compare(expected, state_of(node.dsn), self.later[number][place], f"increment {number}, {node.id}")
                self.figures.rows += sum(text.count(b"\n") for text in expected.rows.values())
        with named_step(f"folds of increment {number}"), self.figures.timed("folds"):
            self.compare_folds(number)
        if self.case.options.get("check") == "yes":
            self.check(number)

    def compare_folds(self, number: int) -> None:
        """Fold the chain in the driver and by Spark; raise FoundError if the rows differ."""
        location = self.runs.fleet.store
        chain = read_chain(location.open(), NAME, number)
        sources = sources_of(chain, tuple(node.id for node in self.runs.fleet.primaries), location.open())
        found: list[Counter[FoldedRow]] = []
        for folding in (driver_folds, spark_folds):
            with folding():
                folded = fold(self.runs.spark.running, sources, location)
            try:
                found.append(rows_at_cut(folded, sources, location))
            finally:
                folded.release()
        if found[0] != found[1]:
            driver, spark = found[0] - found[1], found[1] - found[0]
            raise FoundError(f"folds of increment {number}: only the driver has {driver}, only Spark has {spark}")

    def check(self, number: int) -> None:
        with named_step(f"check of increment {number}"), self.figures.timed("checks"):
            report = self.runs.check_one(NAME, number)
        wanted = "valid" if len(self.runs.fleet.nodes) > len(self.runs.fleet.primaries) else "inconclusive"
        if (report.result, report.conflicts) != (wanted, []):
            found = "; ".join(f"{conflict.node}: {conflict.detail}" for conflict in report.conflicts)
            raise FoundError(f"check of increment {number}: {report.result}: {found}")
        self.figures.checked += 1

    def check_restorable(self, number: int) -> None:
        """Build all rows that a restore would load, and compare their numbers with the source's."""
        with named_step(f"check --restorable of increment {number}"), self.figures.timed("restorable"):
            report = check_restorable(self.runs.fleet, NAME, number, self.runs.spark, Silent())
        nodes = [node.id for node in self.runs.fleet.primaries]
        expected = {
            node: sum(text.count(b"\n") for text in state.rows.values())
            for node, state in zip(nodes, self.states[number], strict=True)
        }
        if report.problems or report.rows != expected:
            found = "; ".join(f"{problem.node}: {problem.group}: {problem.detail}" for problem in report.problems)
            raise FoundError(f"check --restorable of increment {number}: {report.rows}, not {expected}: {found}")


@contextmanager
def named_step(name: str) -> Iterator[None]:
    """Turn every error of the block into a FoundError that names the step."""
    try:
        yield
    except FoundError:
        raise
    except Exception as error:
        hint = error.hint if isinstance(error, SnapshotError) else ""
        raise FoundError(f"{name}: {type(error).__name__}: {error}\n{hint}") from error
