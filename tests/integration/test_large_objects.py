"""Large objects by option: they are restored as they were at the full snapshot, and every output says so.

The tests compare what PostgreSQL has for each object: its bytes, owner, grants and comment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.cli.commands.check import lines_of as check_lines
from cutline.cli.commands.create import lines_of as create_lines
from cutline.cli.output.restore_report import lines_of as restore_lines
from cutline.fleet.progress import Silent
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.rows.large_objects import load_large
from cutline.restore.run.restore import restore_fleet
from cutline.snapshots.base_copy.large_objects import PART_BYTES
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.operations.open_operations import read_open_intents
from cutline.snapshots.records.commit import FullSnapshot
from cutline.wal.segments.damage import ObjectDamagedError
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs
from tests.integration.own_database import own_database, restore_target
from tests.integration.refusing import NoSpark, execute, refused
from tests.stores.damage import change_large_objects, flip_byte, remove, with_value
from tests.tables.large_object_states import HOSTILE_DEFINITIONS, read_large_objects

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.embedded.fleet import EmbeddedFleet

NAME = "large"
MANY = 150
SCHEMA = (
    "CREATE ROLE large_owner",
    "CREATE ROLE large_reader",
    "CREATE ROLE large_other",
    "CREATE TABLE kept (id int PRIMARY KEY, what oid)",
    "SELECT lo_create(1001)",
    f"SELECT lo_from_bytea(1002, convert_to(repeat('a', {PART_BYTES}), 'UTF8'))",
    f"SELECT lo_from_bytea(1003, convert_to(repeat('b', {PART_BYTES} + 1), 'UTF8'))",
    "SELECT lo_from_bytea(1004, decode(repeat('5c2e0a00ff09', 500000), 'hex'))",
    # A hole of 1 MB, then 3 bytes.
    "SELECT lo_create(1005)", "SELECT lo_put(1005, 1000000, 'end')",
    f"SELECT lo_from_bytea(n, convert_to('number ' || n, 'UTF8')) FROM generate_series(2001, 2000 + {MANY}) AS n",
    "SELECT lo_from_bytea(4294967295, 'the last oid')",
    "ALTER LARGE OBJECT 1002 OWNER TO large_owner",
    "GRANT SELECT ON LARGE OBJECT 1002 TO large_reader WITH GRANT OPTION",
    "SET SESSION AUTHORIZATION large_reader; GRANT SELECT ON LARGE OBJECT 1002 TO large_other; "
    "RESET SESSION AUTHORIZATION",
    "GRANT ALL ON LARGE OBJECT 1003 TO PUBLIC",
    "REVOKE ALL ON LARGE OBJECT 1004 FROM CURRENT_USER",
    "COMMENT ON LARGE OBJECT 1004 IS 'it''s \\ odd'",
)  # fmt: skip
COUNT = 6 + MANY


@pytest.fixture
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path) -> Iterator[Runs]:
    with own_database(shared_fleet, tmp_path, "large") as fleet:
        execute(fleet.nodes[0].dsn, *SCHEMA)
        found = Runs(fleet, Ready(spark))
        found.init()
        yield found
        maintenance = restore_target(fleet).nodes[0].dsn
    execute(
        psycopg.conninfo.make_conninfo(maintenance, dbname="postgres"),
        "DROP ROLE large_owner, large_reader, large_other",
    )


def test_large_objects_are_restored_as_of_the_full_snapshot(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = (node.dsn for node in runs.fleet.nodes)
    expected = read_large_objects(source)
    assert len(expected) == COUNT
    commit = runs.full(NAME, large_objects=True)
    assert isinstance(commit, FullSnapshot)
    base = str(commit.base["s1"])
    warning = f"warning: large objects as of the full snapshot, without the changes since: {COUNT} on s1"
    assert warning in create_lines(commit)
    execute(
        source,
        "SELECT lo_unlink(1001)",
        "SELECT lo_put(1002, 0, 'changed')",
        "SELECT lo_create(1006)",
        "COMMENT ON LARGE OBJECT 1002 IS 'later'",
        "INSERT INTO kept VALUES (1, 1006)",
    )
    commit = runs.increment(NAME)
    assert warning in create_lines(commit)
    (warned,) = (one for one in commit.left_out or () if one.kind == "large_objects_of_full")
    assert (warned.count, warned.why) == (
        COUNT,
        f"restored as they were at the full snapshot ({base}): increments do not capture their changes",
    )

    report = runs.restore(NAME, restore_target(runs.fleet))
    assert warning in restore_lines(report)
    (restored,) = (node.dsn for node in restore_target(runs.fleet).nodes)
    assert read_large_objects(restored) == expected
    with psycopg.connect(restored) as connection:
        assert connection.execute("SELECT * FROM kept").fetchall() == [(1, 1006)]
    checked = runs.check_one(NAME)
    assert (checked.conflicts, checked.large_objects) == ([], COUNT)
    lines = check_lines(runs.check(NAME))
    assert f"  read back, no second copy to compare with: {COUNT} large objects" in lines
    assert f"  {warning}" in lines
    for command in (("list",), ("show", NAME)):
        _, document = run_here(runs.fleet, *command)
        entry = document["snapshots"][0] if command == ("list",) else document
        assert [(one["kind"], one["count"]) for one in entry["warned"]] == [("large_objects_of_full", COUNT)]

    report = runs.restore(NAME, restore_target(runs.fleet), groups=("public.kept",))
    assert f"{COUNT} large objects on s1" in report.left_out
    assert read_large_objects(restored) == []
    assert_a_repeated_task_loads_nothing_twice(runs, monkeypatch)
    assert_damage_is_found(runs)


def test_the_fleet_file_says_whether_full_snapshots_have_large_objects_and_an_option_overrides_it(runs: Runs) -> None:
    path = runs.fleet.path

    def planned(*options: str) -> str:
        code, document = run_here(runs.fleet, "create", NAME, "--dry-run", *options)
        assert code == 0
        (kind,) = {out["kind"] for out in document["left_out"]} & {"large_objects", "large_objects_of_full"}
        return str(kind)

    assert planned() == "large_objects"
    assert planned("--large-objects") == "large_objects_of_full"
    path.write_text(f"{path.read_text()}\n[groups]\nlarge_objects = true\n")
    assert planned() == "large_objects_of_full"
    assert planned("--no-large-objects") == "large_objects"
    # An increment follows none, whatever the file says.
    runs.full(NAME)
    code, _ = run_here(runs.fleet, "create", NAME, "--incremental", "--dry-run")
    assert code == 0


def assert_a_repeated_task_loads_nothing_twice(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark may repeat any task, even one that has completed its work."""
    import cutline.restore.rows.large_objects

    def load_twice(task: cutline.restore.rows.large_objects.LargeLoadTask) -> object:
        assert load_large(task).problem is None
        return load_large(task)

    monkeypatch.setattr(cutline.restore.rows.large_objects, "load_large", load_twice)
    runs.restore(NAME, restore_target(runs.fleet), 0)
    assert len(read_large_objects(restore_target(runs.fleet).nodes[0].dsn)) == COUNT


def assert_damage_is_found(runs: Runs) -> None:
    store = runs.fleet.store.open()
    (key,) = [key for key in store.list("snapshots") if "part-large" in key and "-000000-000000-" in key]
    path = Path(runs.fleet.store.url.removeprefix("file://")) / key
    body = path.read_bytes()
    path.write_bytes(body[:100] + bytes([body[100] ^ 1]) + body[101:])
    report = runs.check_one(NAME)
    assert [(one.kind, one.object) for one in report.conflicts] == [("digest", key)]
    assert report.compared.rows > 0 or report.compared.changes > 0


def test_a_restore_names_damaged_large_objects_and_leaves_nothing(runs: Runs) -> None:
    """A missing one is found by the listing, an altered one when it is read; the rows alone can be restored."""
    runs.full(NAME, large_objects=True)
    target = restore_target(runs.fleet)
    store = runs.fleet.store.open()
    (key,) = [key for key in store.list("snapshots") if "part-large" in key and "-000000-000000-" in key]
    path = Path(runs.fleet.store.url.removeprefix("file://")) / key
    body = path.read_bytes()
    for damage in (flip_byte, remove):
        path.write_bytes(body)
        damage(path)
        assert (plan_restore(runs.fleet, target, RestoreRequest(NAME)).damage is not None) == (damage is remove)
        with pytest.raises(ObjectDamagedError, match="without it, snapshot large lacks large objects of s1") as raised:
            restore_fleet(plan_restore(runs.fleet, target, RestoreRequest(NAME)), runs.spark, Silent())
        assert raised.value.details["object"] == key
        assert raised.value.details["lost"] == [{"shard": "s1", "what": "large objects", "partitions": None}]
        assert raised.value.details["restorable"] == []
        with psycopg.connect(runs.fleet.nodes[0].dsn) as connection:
            found = connection.execute("SELECT datname FROM pg_database WHERE datname ^@ 'large'").fetchall()
        assert found == [("large",)]
        assert read_open_intents(store) == []
    assert plan_restore(runs.fleet, target, RestoreRequest(NAME, groups=("*.kept",))).damage is None


def test_a_definition_that_somebody_sealed_runs_no_statement(runs: Runs) -> None:
    runs.full(NAME, large_objects=True)
    store = Path(runs.fleet.store.url.removeprefix("file://"))
    key = change_large_objects(
        store, NAME, lambda table: with_value(table, 0, "definition", HOSTILE_DEFINITIONS["SQL"])
    )
    found = {conflict.kind: conflict for conflict in runs.check_one(NAME).conflicts}
    # The outcome of the create has the size of the object as it was.
    assert found.keys() == {"unreadable", "operation"}
    assert (found["unreadable"].node, found["unreadable"].object) == ("s1", key)
    with pytest.raises(ObjectDamagedError, match="large object 1001: a definition is invalid"):
        runs.restore(NAME, restore_target(runs.fleet))
    maintenance = restore_target(runs.fleet).nodes[0].dsn.replace("dbname=large_back", "dbname=postgres")
    with psycopg.connect(maintenance) as connection:
        left = connection.execute("SELECT datname FROM pg_database WHERE datname ^@ 'large_'").fetchall()
    for (database,) in left:
        with psycopg.connect(psycopg.conninfo.make_conninfo(maintenance, dbname=database)) as connection:
            assert connection.execute("SELECT to_regclass('public.pwned')").fetchone() == (None,)


def test_a_role_that_may_not_read_the_large_objects_is_refused_by_name(runs: Runs) -> None:
    (node,) = runs.fleet.nodes
    execute(
        node.dsn,
        "CREATE ROLE large_backup LOGIN REPLICATION IN ROLE pg_read_all_data, pg_monitor",
        "GRANT CREATE ON DATABASE large TO large_backup",
        "GRANT SELECT ON LARGE OBJECT 1001 TO large_backup",
    )
    as_role = replace(
        runs.fleet, nodes=(replace(node, dsn=psycopg.conninfo.make_conninfo(node.dsn, user="large_backup")),)
    )
    try:
        with refused(as_role, "large-objects-unreadable") as errors:
            create_full(as_role, CreateRequest("no", large_objects=True), NoSpark(), Silent())
        assert errors[0].message == (
            f"node s1: role large_backup can't read large objects 1002, 1004, 1005 and {MANY + 1} more"
        )
    finally:
        execute(node.dsn, "DROP OWNED BY large_backup", "DROP ROLE large_backup")
