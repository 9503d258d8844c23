"""The list of a create's points is what a create reaches, and nothing is done without a point after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from msgspec import structs

from embedded.fleet import EmbeddedFleet, start_fleet, stop_fleet
from fleet.config import Retention, load_fleet
from fleet.nodes.connections import with_database
from fleet.progress import Silent
from fleet.read_only.resume import resume_fleet
from snapshots.create.full import create_full
from snapshots.create.increment import create_increment
from snapshots.create.request import CreateRequest
from snapshots.operations import leases
from snapshots.operations.crash_points import (
    FREEZE_POINTS,
    FULL_POINTS,
    INCREMENT_POINTS,
    PER_NODE,
    CrashPoint,
    ddl_crash_points,
    terminal_crash_points,
    void_attempt_crash_points,
)
from snapshots.operations.operation import Operation, new_operation, record_operation
from snapshots.records.kinds import KINDS
from snapshots.removal.deletion import delete_snapshot
from snapshots.removal.pruning import prune_store
from storage.errors import IndeterminateError
from tests.faults.effects import LOGGING, Effects
from tests.snapshot_runs import Ready, Runs, described
from tests.stored_documents import documents_known
from tests.watching import Reached, Watching
from wal.segments.segments import SegmentMetadata
from wal.slots.slots import create_exported_slot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from fleet.config import Fleet

NOTHING: frozenset[str] = frozenset()
# What may be done before a point, and after the one before it. The DDL is stored beside the rows.
CUT_EFFECTS: Mapping[CrashPoint, frozenset[str]] = {
    CrashPoint.STARTS_WRITTEN: frozenset({"start marker"}),
    CrashPoint.FINISHES_WRITTEN: frozenset({"finish marker"}),
    CrashPoint.ARCHIVED: frozenset({"segment", "slot advanced"}),
    CrashPoint.COMMITTED: frozenset({"commit"}),
    CrashPoint.OUTCOME_STORED: frozenset({"outcome"}),
    CrashPoint.RELEASED: frozenset({"unlock"}),
    CrashPoint.LOCKED: frozenset({"lock"}),
    CrashPoint.INTENT_STORED: frozenset({"intent"}),
}
FULL_EFFECTS: Mapping[CrashPoint, frozenset[str]] = {
    **CUT_EFFECTS,
    CrashPoint.LOCKED: frozenset({"lock", "baseline"}),
    CrashPoint.SLOT_MADE: frozenset({"slot", "standby snapshot", "snapshot exported"}),
    CrashPoint.SPARK_READY: frozenset({"schema object"}),
    CrashPoint.BASE_COPIED: frozenset({"schema object", "base object"}),
    CrashPoint.DDL_STORED: frozenset({"schema object"}),
    CrashPoint.SNAPSHOTS_RELEASED: frozenset({"snapshot released"}),
}
# Dropping a slot ends whoever reads it.
VOID_EFFECTS = {
    **FULL_EFFECTS,
    CrashPoint.COPY_SLOTS_DROPPED: frozenset({"snapshot released", "slot dropped", "session ended"}),
}


@dataclass(slots=True)
class Changing(Watching):
    """Changes the schema right before slots are made, once: the tables have been read by then."""

    dsn: str = ""

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        if name == "slots" and self.dsn:
            with psycopg.connect(self.dsn, application_name="tests") as connection:
                connection.execute("ALTER TABLE account ADD since date")
            self.dsn = ""


class Stretches:
    """What was done between each point and the one before it."""

    def __init__(self, effects: Effects) -> None:
        self.effects = effects
        self.found: list[tuple[Reached, set[str]]] = []
        self.watching = Watching(self.note)

    def note(self, reached: Reached) -> None:
        if reached.point in (CrashPoint.SNAPSHOTS_RELEASED, CrashPoint.COPY_SLOTS_DROPPED):
            self.effects.await_release()
        self.found.append((reached, self.effects.look()))

    def undeclared(self, declared: Mapping[CrashPoint, frozenset[str]]) -> list[tuple[str, set[str]]]:
        """What was done in the wrong place, by the point after it."""
        every = [(one.point, kinds - declared.get(CrashPoint(one.point), NOTHING)) for one, kinds in self.found]
        return [(point, kinds) for point, kinds in every if kinds]

    def kinds(self) -> set[str]:
        return {kind for _, kinds in self.found for kind in kinds}


ANEW_EFFECTS: Mapping[CrashPoint, frozenset[str]] = {
    **CUT_EFFECTS,
    CrashPoint.TABLES_PUBLISHED: frozenset({"table published"}),
    CrashPoint.SLOT_MADE: frozenset({"slot", "standby snapshot", "snapshot exported"}),
    CrashPoint.BASE_COPIED: frozenset({"base object"}),
    CrashPoint.COPY_SLOTS_DROPPED: VOID_EFFECTS[CrashPoint.COPY_SLOTS_DROPPED],
    CrashPoint.DDL_STORED: frozenset({"schema object"}),
}
TERMINAL_EFFECTS: Mapping[CrashPoint, frozenset[str]] = {
    **CUT_EFFECTS,
    CrashPoint.FROZEN: frozenset({"freeze"}),
    CrashPoint.SESSIONS_ENDED: frozenset({"session ended"}),
}


def expected(points: tuple[CrashPoint, ...], nodes: int, primaries: int = 2) -> list[str]:
    counts = dict.fromkeys(PER_NODE, nodes) | dict.fromkeys(FREEZE_POINTS, primaries)
    return [str(point) for point in points for _ in range(counts.get(point, 1))]


@contextmanager
def written(dsns: list[str]) -> Iterator[None]:
    """Something to archive; and who watches a command has its own name in the logs."""
    for dsn in dsns:
        with psycopg.connect(dsn, application_name="tests") as connection:
            connection.execute("UPDATE account SET balance = balance WHERE id % 100 = 0")
    yield


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    """Servers that write down every statement."""
    directory = tmp_path_factory.mktemp("points") / "fleet"
    try:
        yield start_fleet(directory, shards=2, backups=1, settings=LOGGING)
    finally:
        stop_fleet(directory, delete=True)


def test_creates_reach_their_points_and_do_nothing_between_them_that_is_not_declared(
    servers: EmbeddedFleet, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = described(servers, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    Runs(fleet, Ready(spark)).init()
    with written(servers.dsns()):
        full = Stretches(Effects(fleet, servers))
        create_full(fleet, CreateRequest("chain"), Ready(spark), full.watching)
    assert [one.point for one in full.watching.reached_points] == expected(FULL_POINTS, len(fleet.nodes))
    assert {one.node for one in full.watching.reached_points if one.point in PER_NODE} == ids(fleet)
    assert full.undeclared(FULL_EFFECTS) == []
    # A slot on a standby is made without its primary's help, if that happens to log what runs.
    assert full.kinds() | {"standby snapshot"} == {kind for kinds in FULL_EFFECTS.values() for kind in kinds}
    with written(servers.dsns()):
        increment = Stretches(Effects(fleet, servers))
        create_increment(fleet, CreateRequest("chain"), Ready(spark), increment.watching)
    assert [one.point for one in increment.watching.reached_points] == expected(INCREMENT_POINTS, len(fleet.nodes))
    assert increment.undeclared(CUT_EFFECTS) == []
    assert increment.kinds() == {kind for kinds in CUT_EFFECTS.values() for kind in kinds}
    with psycopg.connect(servers.dsns()[0], application_name="tests") as connection:
        connection.execute("CREATE TABLE came (id int PRIMARY KEY)")
        connection.execute("INSERT INTO came VALUES (1)")
    with written(servers.dsns()):
        anew = Stretches(Effects(fleet, servers))
        create_increment(fleet, CreateRequest("chain"), Ready(spark), anew.watching)
    # On the nodes of its shard alone.
    points = ddl_crash_points(INCREMENT_POINTS)
    assert [one.point for one in anew.watching.reached_points] == expected(points, len(fleet.nodes) // 2)
    assert anew.undeclared(ANEW_EFFECTS) == []
    assert anew.kinds() | {"standby snapshot"} == {kind for kinds in ANEW_EFFECTS.values() for kind in kinds}
    with written(servers.dsns()):
        terminal = Stretches(Effects(fleet, servers))
        create_increment(fleet, CreateRequest("chain", terminal=True), Ready(spark), terminal.watching)
    points = terminal_crash_points(INCREMENT_POINTS)
    assert [one.point for one in terminal.watching.reached_points] == expected(points, len(fleet.nodes))
    assert terminal.undeclared(TERMINAL_EFFECTS) == []
    assert terminal.kinds() == {kind for kinds in TERMINAL_EFFECTS.values() for kind in kinds}
    resume_fleet(fleet, terminal.watching)
    void = Stretches(Effects(fleet, servers))
    void.watching = Changing(void.note, dsn=servers.dsns()[0])
    create_full(fleet, CreateRequest("met"), Ready(spark), void.watching)
    points = void_attempt_crash_points(FULL_POINTS)
    assert [one.point for one in void.watching.reached_points] == expected(points, len(fleet.nodes))
    assert void.undeclared(VOID_EFFECTS) == []
    what_was_left_open_is_settled(fleet, spark, Effects(fleet, servers))
    every_document_is_known(Runs(fleet, Ready(spark)), monkeypatch)


def what_was_left_open_is_settled(fleet: Fleet, spark: SparkSession, effects: Effects) -> None:
    """A create after one that died, and of a fleet whose older chain keeps too much."""
    intent = new_operation("create", "died", 0, (fleet.nodes[0].id,))
    died = Operation(structs.replace(intent, slot="cutline_died"))
    create_exported_slot(fleet.nodes[0], fleet.nodes[0], "cutline_died", 30).connection.close()
    with suppress(IndeterminateError), record_operation(fleet.store.open(), died):
        raise IndeterminateError("it died")
    effects.look()
    stretches = Stretches(effects)
    strict = replace(fleet, nodes=tuple(replace(node, retained_wal_bytes_max=1) for node in fleet.nodes))
    create_full(strict, CreateRequest("next"), Ready(spark), stretches.watching)
    found = {reached.point: kinds for reached, kinds in stretches.found}
    assert found[CrashPoint.SETTLED] == {"void", "session ended", "slot dropped", "outcome"}
    assert found[CrashPoint.GIVEN_UP] == {"mark of a lost chain", "session ended", "slot dropped"}
    late = {point: frozenset(found[point]) for point in (CrashPoint.SETTLED, CrashPoint.GIVEN_UP)}
    assert stretches.undeclared({**FULL_EFFECTS, **late}) == []


def every_document_is_known(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that has happened here, a restore, a prune and a deletion: documents of all types, and none of another."""
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.01)
    runs.restore("next", replace(runs.fleet, nodes=tuple(with_database(one, "back") for one in runs.fleet.primaries)))
    found = documents_known(runs.fleet.store.open())
    pruned = prune_store(
        runs.fleet, Retention(keep_full=3, keep_increments=1), Silent(), lambda _plan: None, force=True
    )
    assert [step.mark.snapshot for step in pruned.plan.steps] == ["chain"]
    delete_snapshot(runs.fleet, "met", Silent(), lambda _plan: None, force=True)
    found |= documents_known(runs.fleet.store.open())
    assert found.keys() == {SegmentMetadata.__name__, *(one.__name__ for kind in KINDS for one in kind.types)}


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        ("SELECT pg_drop_replication_slot('x')", "slot dropped"),
        ("SELECT count(*) FROM pg_class", None),
        ("SELECT pg_create_restore_point('x')", "statement SELECT pg_create_restore_point('x')"),
        ("SELECT nextval('x')", "statement SELECT nextval('x')"),
        ("INSERT INTO x VALUES (1)", "statement INSERT INTO x VALUES (1)"),
        ("COPY x FROM STDIN", "statement COPY x FROM STDIN"),
        ("COPY (SELECT 1) TO STDOUT", None),
    ],
)
def test_a_statement_that_changes_something_is_not_taken_for_a_reading_one(
    servers: EmbeddedFleet, statement: str, kind: str | None
) -> None:
    effects = Effects(load_fleet(servers.fleet_toml), servers)
    assert effects.kinds_of(statement) == ([kind] if kind else [])


def test_an_effect_without_a_point_is_found(servers: EmbeddedFleet) -> None:
    fleet = load_fleet(servers.fleet_toml)
    stretches = Stretches(Effects(fleet, servers))
    store = fleet.store.open()
    with psycopg.connect(servers.dsns()[0], autocommit=True, application_name="cutline") as connection:
        stretches.watching.reached(CrashPoint.LOCKED)
        connection.execute("CREATE TABLE left_behind (id int)")
        store.create("operations/x/notes.json", b"{}")
        stretches.watching.reached(CrashPoint.SETTLED)
    assert stretches.undeclared(FULL_EFFECTS) == [
        (CrashPoint.SETTLED, {"statement CREATE TABLE left_behind (id int)", "object operations/x/notes.json"})
    ]


def ids(fleet: Fleet) -> set[str]:
    return {node.id for node in fleet.nodes}
