"""A create reaches exactly its listed crash points, and every effect is followed by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from msgspec import structs

from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.fleet.config import Retention, load_fleet
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.nodes.read_only import resume_fleet
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.operations import leases, object_lists
from cutline.snapshots.operations.operation import Operation, new_operation, record_operation
from cutline.snapshots.records.background_records import CopyStep
from cutline.snapshots.records.kinds import KINDS
from cutline.snapshots.records.merge_records import Begin, Merge, MergePart
from cutline.snapshots.records.operation_records import CancelRequest, Failure, SignOfLife
from cutline.snapshots.records.pins import Pin, PinRelease
from cutline.snapshots.records.repair_records import Repair, RepairVoid
from cutline.snapshots.records.unfinished_records import CopiedRanges, Resumption, UnfinishedBase
from cutline.snapshots.removal.chain_end import end_chain
from cutline.snapshots.removal.deletion import delete_snapshot
from cutline.snapshots.removal.pruning import prune_store
from cutline.storage.errors import IndeterminateError
from cutline.wal.drain.slots import create_exported_slot
from cutline.wal.segments.archive import SegmentMetadata
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet
from tests.commands.watching import Reached, Watching
from tests.faults.effects import LOGGING, Effects
from tests.faults.points import (
    FREEZE_POINTS,
    FULL_POINTS,
    INCREMENT_POINTS,
    PER_NODE,
    ddl_crash_points,
    invalidated_attempt_crash_points,
    listed_crash_points,
    spark_crash_points,
    terminal_crash_points,
)
from tests.run.by_spark import archiving_by_spark
from tests.servers.dealt import start_fleet
from tests.stores.documents import check_documents

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.fleet.config import Fleet

NOTHING: frozenset[str] = frozenset()
# The effects allowed between a point and the one before it. The DDL is stored while the rows are copied.
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
    # Roles and tablespaces of the servers.
    CrashPoint.COMMITTED: frozenset({"commit", "schema object"}),
}
# Dropping a slot terminates the session that reads it.
INVALIDATED_EFFECTS = {
    **FULL_EFFECTS,
    CrashPoint.COPY_SLOTS_DROPPED: frozenset({"snapshot released", "slot dropped", "session ended"}),
}


@dataclass(slots=True)
class Changing(Watching):
    """Adds a column right before the slots are created, once: by then the tables have been read."""

    dsn: str = ""

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        if name == "slots" and self.dsn:
            with psycopg.connect(self.dsn, application_name="tests") as connection:
                connection.execute("ALTER TABLE account ADD since date")
            self.dsn = ""


class EffectsByPoint:
    """The effects between each point and the one before it."""

    def __init__(self, effects: Effects) -> None:
        self.effects = effects
        self.found: list[tuple[Reached, set[str]]] = []
        self.watching = Watching(self.note)

    def note(self, reached: Reached) -> None:
        if reached.point in (CrashPoint.SNAPSHOTS_RELEASED, CrashPoint.COPY_SLOTS_DROPPED):
            self.effects.await_release()
        self.found.append((reached, self.effects.look()))

    def undeclared(self, declared: Mapping[CrashPoint, frozenset[str]]) -> list[tuple[str, set[str]]]:
        """Return the effects that are not declared for the point after them, by that point."""
        every = [(one.point, kinds - declared.get(CrashPoint(one.point), NOTHING)) for one, kinds in self.found]
        return [(point, kinds) for point, kinds in every if kinds]

    def kinds(self) -> set[str]:
        return {kind for _, kinds in self.found for kind in kinds}


COPY_EFFECTS: Mapping[CrashPoint, frozenset[str]] = {
    **CUT_EFFECTS,
    CrashPoint.TABLES_PUBLISHED: frozenset({"table published"}),
    CrashPoint.SLOT_MADE: frozenset({"slot", "standby snapshot", "snapshot exported"}),
    CrashPoint.BASE_COPIED: frozenset({"base object"}),
    CrashPoint.COPY_SLOTS_DROPPED: INVALIDATED_EFFECTS[CrashPoint.COPY_SLOTS_DROPPED],
    CrashPoint.DDL_STORED: frozenset({"schema object"}),
}
TERMINAL_EFFECTS: Mapping[CrashPoint, frozenset[str]] = {
    **CUT_EFFECTS,
    CrashPoint.FROZEN: frozenset({"freeze"}),
    CrashPoint.SESSIONS_ENDED: frozenset({"session ended"}),
}


def expand(points: tuple[CrashPoint, ...], nodes: int, primaries: int = 2) -> list[str]:
    counts = dict.fromkeys(PER_NODE, nodes) | dict.fromkeys(FREEZE_POINTS, primaries)
    return [str(point) for point in points for _ in range(counts.get(point, 1))]


def update_rows(dsns: list[str]) -> None:
    """Update rows, so that there is WAL to archive. `application_name` tells the test's statements from a command's."""
    for dsn in dsns:
        with psycopg.connect(dsn, application_name="tests") as connection:
            connection.execute("UPDATE account SET balance = balance WHERE id % 100 = 0")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    """Servers that log every statement."""
    directory = tmp_path_factory.mktemp("points") / "fleet"
    try:
        yield start_fleet(directory, shards=2, backups=1, settings=LOGGING)
    finally:
        stop_fleet(directory, delete=True)


def test_a_create_reaches_its_crash_points_with_only_declared_effects_between_them(
    servers: EmbeddedFleet, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = configure_fleet(servers, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    Runs(fleet, Ready(spark)).init()
    update_rows(servers.dsns())
    full = EffectsByPoint(Effects(fleet, servers))
    create_full(fleet, CreateRequest("chain"), Ready(spark), full.watching)
    assert [one.point for one in full.watching.reached_points] == expand(FULL_POINTS, len(fleet.nodes))
    assert {one.node for one in full.watching.reached_points if one.point in PER_NODE} == node_ids(fleet)
    assert full.undeclared(FULL_EFFECTS) == []
    # A standby needs no pg_log_standby_snapshot() if its primary happens to log the running transactions by itself.
    assert full.kinds() | {"standby snapshot"} == {kind for kinds in FULL_EFFECTS.values() for kind in kinds}
    update_rows(servers.dsns())
    increment = EffectsByPoint(Effects(fleet, servers))
    create_increment(fleet, CreateRequest("chain"), Ready(spark), increment.watching)
    assert [one.point for one in increment.watching.reached_points] == expand(INCREMENT_POINTS, len(fleet.nodes))
    assert increment.undeclared(CUT_EFFECTS) == []
    assert increment.kinds() == {kind for kinds in CUT_EFFECTS.values() for kind in kinds}
    update_rows(servers.dsns())
    by_spark = EffectsByPoint(Effects(fleet, servers))
    with archiving_by_spark():
        create_increment(fleet, CreateRequest("chain"), Ready(spark), by_spark.watching)
    points = spark_crash_points(INCREMENT_POINTS)
    assert [one.point for one in by_spark.watching.reached_points] == expand(points, len(fleet.nodes))
    assert by_spark.undeclared(CUT_EFFECTS) == []
    assert by_spark.kinds() == increment.kinds()
    with psycopg.connect(servers.dsns()[0], application_name="tests") as connection:
        connection.execute("CREATE TABLE came (id int PRIMARY KEY)")
        connection.execute("INSERT INTO came VALUES (1)")
    update_rows(servers.dsns())
    copying = EffectsByPoint(Effects(fleet, servers))
    create_increment(fleet, CreateRequest("chain"), Ready(spark), copying.watching)
    # Only the nodes of the new table's shard are copied.
    points = ddl_crash_points(INCREMENT_POINTS)
    assert [one.point for one in copying.watching.reached_points] == expand(points, len(fleet.nodes) // 2)
    assert copying.undeclared(COPY_EFFECTS) == []
    assert copying.kinds() | {"standby snapshot"} == {kind for kinds in COPY_EFFECTS.values() for kind in kinds}
    update_rows(servers.dsns())
    terminal = EffectsByPoint(Effects(fleet, servers))
    create_increment(fleet, CreateRequest("chain", terminal=True), Ready(spark), terminal.watching)
    points = terminal_crash_points(INCREMENT_POINTS)
    assert [one.point for one in terminal.watching.reached_points] == expand(points, len(fleet.nodes))
    assert terminal.undeclared(TERMINAL_EFFECTS) == []
    assert terminal.kinds() == {kind for kinds in TERMINAL_EFFECTS.values() for kind in kinds}
    resume_fleet(fleet, terminal.watching)
    invalidated = EffectsByPoint(Effects(fleet, servers))
    invalidated.watching = Changing(invalidated.note, dsn=servers.dsns()[0])
    create_full(fleet, CreateRequest("met"), Ready(spark), invalidated.watching)
    points = invalidated_attempt_crash_points(FULL_POINTS)
    assert [one.point for one in invalidated.watching.reached_points] == expand(points, len(fleet.nodes))
    assert invalidated.undeclared(INVALIDATED_EFFECTS) == []
    assert_open_operations_are_settled(fleet, spark, Effects(fleet, servers))
    end_chain(fleet, "met", Silent(), lambda _plan: None)
    assert_every_document_type_is_stored(Runs(fleet, Ready(spark)), Effects(fleet, servers), monkeypatch)


def assert_open_operations_are_settled(fleet: Fleet, spark: SparkSession, effects: Effects) -> None:
    """Check a create that follows one that died, in a fleet whose older chain retains too much WAL."""
    intent = new_operation("create", "died", 0, (fleet.nodes[0].id,))
    died = Operation(structs.replace(intent, slot="cutline_died"))
    create_exported_slot(fleet.nodes[0], fleet.nodes[0], "cutline_died", 30).connection.close()
    with suppress(IndeterminateError), record_operation(fleet.store.open(), died):
        raise IndeterminateError("it died")
    effects.look()
    by_point = EffectsByPoint(effects)
    strict = replace(fleet, nodes=tuple(replace(node, retained_wal_bytes_max=1) for node in fleet.nodes))
    create_full(strict, CreateRequest("next"), Ready(spark), by_point.watching)
    found = {reached.point: kinds for reached, kinds in by_point.found}
    assert found[CrashPoint.SETTLED] == {"void", "session ended", "slot dropped", "outcome"}
    assert found[CrashPoint.SLOTS_DROPPED] == {"session ended", "slot dropped"}
    late = {point: frozenset(found[point]) for point in (CrashPoint.SETTLED, CrashPoint.SLOTS_DROPPED)}
    assert by_point.undeclared({**FULL_EFFECTS, **late}) == []


def assert_lists_are_stored_before_their_point(runs: Runs, effects: Effects, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a create whose commit names object lists."""
    monkeypatch.setattr(object_lists, "OWN_OBJECTS_MAX", 0)
    effects.look()
    listed = EffectsByPoint(effects)
    create_full(runs.fleet, CreateRequest("listed"), runs.spark, listed.watching)
    points = listed_crash_points(FULL_POINTS)
    assert [one.point for one in listed.watching.reached_points] == expand(points, len(runs.fleet.nodes))
    assert (
        listed.undeclared({**FULL_EFFECTS, CrashPoint.LISTS_STORED: frozenset({"object list", "schema object"})}) == []
    )
    assert "object list" in listed.kinds()


def assert_every_document_type_is_stored(runs: Runs, effects: Effects, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that all operations of this test, a restore, a prune and a delete stored documents of exactly all types."""
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.01)
    runs.restore("next", replace(runs.fleet, nodes=tuple(with_database(one, "back") for one in runs.fleet.primaries)))
    found = check_documents(runs.fleet.store.open())
    pruned = prune_store(runs.fleet, Retention(last=1, only_full=3), Silent(), lambda _plan: None, force=True)
    assert [step.mark.snapshot for step in pruned.plan.steps] == ["chain"]
    assert_lists_are_stored_before_their_point(runs, effects, monkeypatch)
    delete_snapshot(runs.fleet, "met", Silent(), lambda _plan: None, force=True)
    found |= check_documents(runs.fleet.store.open())
    # A store without encryption has no key document.
    stored = {one.__name__ for kind in KINDS if kind.is_sealed for one in kind.types}
    # Those that commands store beside their operations: tests/integration/test_cancel.py.
    stored -= {SignOfLife.__name__, CancelRequest.__name__}
    # No node is away here: tests/unit/test_operations.py.
    stored -= {Failure.__name__}
    # Nothing is pinned here: tests/integration/test_keep.py.
    stored -= {Pin.__name__, PinRelease.__name__}
    # Nothing is damaged here: tests/integration/damage/test_repaired.py.
    stored -= {Repair.__name__, RepairVoid.__name__}
    # Nothing is merged here: tests/integration/test_merge.py.
    stored -= {Merge.__name__, MergePart.__name__, Begin.__name__}
    # No full snapshot is so large that it can be resumed: tests/integration/test_resumed_full.py.
    stored -= {UnfinishedBase.__name__, CopiedRanges.__name__, Resumption.__name__}
    # No standby is so large that it is copied in the background: tests/integration/test_background_copies.py.
    stored -= {CopyStep.__name__}
    assert found.keys() == {SegmentMetadata.__name__, *stored}


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
def test_only_a_statement_that_may_change_something_is_an_effect(
    servers: EmbeddedFleet, statement: str, kind: str | None
) -> None:
    effects = Effects(load_fleet(servers.fleet_toml), servers)
    assert effects.kinds_of(statement) == ([kind] if kind else [])


def test_an_undeclared_effect_is_reported(servers: EmbeddedFleet) -> None:
    fleet = load_fleet(servers.fleet_toml)
    by_point = EffectsByPoint(Effects(fleet, servers))
    store = fleet.store.open()
    with psycopg.connect(servers.dsns()[0], autocommit=True, application_name="cutline") as connection:
        by_point.watching.reached(CrashPoint.LOCKED)
        connection.execute("CREATE TABLE left_behind (id int)")
        store.create("operations/x/notes.json", b"{}")
        by_point.watching.reached(CrashPoint.SETTLED)
    assert by_point.undeclared(FULL_EFFECTS) == [
        (CrashPoint.SETTLED, {"statement CREATE TABLE left_behind (id int)", "object operations/x/notes.json"})
    ]


def node_ids(fleet: Fleet) -> set[str]:
    return {node.id for node in fleet.nodes}
