"""What stands in a restore's way, or stays behind, is named with statements that help; what ended need not be entered.

The source runs 17, and the targets are its own server and one of 18.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from msgspec import structs
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.nodes.connections import NEW_DATABASES, NodeUnreachableError, NotAdmittedError, connect, with_database
from cutline.nodes.other_databases import read_old
from cutline.nodes.server_errors import remedy_of
from cutline.restore.ddl.ddl import SchemaLoadError
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.rows.load import LoadError
from cutline.restore.run.restore import restore_fleet, resume_restore
from cutline.restore.run.run import RestoreRun
from cutline.restore.scope.scope import RestoreScope
from cutline.restore.targets.databases import Phase, is_shut
from cutline.restore.targets.target import Target, TargetUnfitError, provisional_targets
from cutline.restore.unfinished.undoing import discard_old, find_old
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import DatabaseProperties, DatabaseSetting
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots
from tests.integration.own_shard import database_on
from tests.integration.refusing import execute
from tests.servers.fleets import fleet_of
from tests.servers.installed import require_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME, SOURCE = "set", "gaps"
STATEMENTS = (
    "CREATE TABLE item (id int PRIMARY KEY, note text NOT NULL, CONSTRAINT item_note_not_null UNIQUE (note))",
    "INSERT INTO item VALUES (1, 'one'), (-2, 'two')",
    'ALTER TABLE item ADD CONSTRAINT "is Positive" CHECK (id > 0) NOT VALID',
    f"""CREATE FUNCTION keep_out() RETURNS event_trigger LANGUAGE plpgsql AS $$
    BEGIN IF current_database() !~ '^{SOURCE}($|_filled|_replaced)' THEN RAISE 'nobody'; END IF; END $$""",
    "CREATE EVENT TRIGGER guard ON login EXECUTE FUNCTION keep_out()",
)


@dataclass(frozen=True, slots=True)
class Place:
    """A chain with one snapshot, and the servers of both versions."""

    runs: Runs
    embedded: EmbeddedFleet

    def target(self, database: str, *, shard: int = 0, user: str = "postgres") -> Fleet:
        (node,) = self.runs.fleet.nodes
        dsn = make_conninfo(self.embedded.primaries[shard].dsn("postgres"), dbname=database, user=user)
        return replace(self.runs.fleet, nodes=(replace(node, dsn=dsn),))

    def restore(self, target: Fleet, confirm: Any = None, **options: Any) -> Any:
        request = RestoreRequest(NAME, **options)
        return restore_fleet(plan_restore(self.runs.fleet, target, request), self.runs.spark, Silent(), confirm)

    @property
    def server(self) -> str:
        return with_database(self.runs.fleet.primaries[0], "postgres").dsn


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    folder = tmp_path_factory.mktemp("gaps")
    with fleet_of(folder / "fleet", [require_server(17), require_server(18)], schema=False) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def place(embedded: EmbeddedFleet, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("of-gaps")
    with database_on(embedded, SOURCE, folder) as fleet, dropping_slots(fleet):
        execute(fleet.primaries[0].dsn, *STATEMENTS)
        execute(with_database(fleet.primaries[0], "postgres").dsn, "CREATE ROLE gapper LOGIN CREATEDB")
        runs = Runs(fleet, Ready(spark))
        runs.init()
        runs.full(NAME)
        yield Place(runs, embedded)


def databases(dsn: str) -> list[str]:
    with psycopg.connect(dsn) as connection:
        return [name for (name,) in connection.execute("SELECT datname FROM pg_database ORDER BY 1")]


def test_a_finished_database_that_lets_nobody_in_is_published_by_a_resumed_restore(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends between the last transaction in the database and the record that it would write after it."""
    enter = RestoreRun.enter

    def end(run: RestoreRun, target: Target, phase: Phase, **changes: Any) -> None:
        if phase == Phase.FINISHED:
            raise NodeUnreachableError("ended")
        enter(run, target, phase, **changes)

    target = place.target(f"{SOURCE}_back")
    with monkeypatch.context() as patch:
        patch.setattr(RestoreRun, "enter", end)
        with pytest.raises(NodeUnreachableError, match="ended"):
            place.restore(target)
    report = resume_restore(place.runs.fleet, target, RestoreRequest(NAME), place.runs.spark, Silent())
    assert [node.rows for node in report.nodes] == [2]
    assert f"{SOURCE}_back" in databases(place.server)
    assert not [name for name in databases(place.server) if "_restoring_" in name]
    with pytest.raises(psycopg.OperationalError, match="nobody"):
        psycopg.connect(target.primaries[0].dsn)
    execute(place.server, f"DROP DATABASE {SOURCE}_back")


def test_a_key_with_the_name_that_18_gives_a_not_null_constraint_is_not_lost_silently(place: Place) -> None:
    with pytest.raises(SchemaLoadError, match="item_note_not_null"):
        place.restore(place.target(f"{SOURCE}_newer", shard=1))


def test_logical_replication_of_a_replaced_database_is_named_with_its_end(place: Place) -> None:
    target = place.target(f"{SOURCE}_replaced")
    (node,) = target.primaries
    execute(place.server, f"CREATE DATABASE {SOURCE}_replaced")
    execute(
        node.dsn,
        "SELECT pg_create_logical_replication_slot('theirs', 'pgoutput')",
        "CREATE SUBSCRIPTION \"in Flow\" CONNECTION 'host=nowhere' PUBLICATION p"
        " WITH (connect = false, slot_name = NONE)",
    )
    lines: list[str] = []
    place.restore(target, confirm=lines.extend, replace=True)
    with psycopg.connect(place.server) as connection:
        ((aside,),) = connection.execute(
            f"SELECT datname FROM pg_database WHERE datname ~ '^{SOURCE}_replaced_before_'"
        ).fetchall()
    assert lines[1:] == [
        f"s1: logical slots of others stay in {aside} and retain WAL, and their clients can't use them in the new"
        " database: theirs; once nobody needs them: SELECT pg_drop_replication_slot('theirs');",
        f"s1: subscriptions of the old database stay in {aside} and go on there: in Flow; to end that, in {aside}:"
        ' ALTER SUBSCRIPTION "in Flow" DISABLE;',
    ]
    inside = with_database(node, aside).dsn
    execute(inside, lines[2].rpartition(": ")[2])
    with pytest.raises(
        TargetUnfitError, match="has subscriptions, with which PostgreSQL does not drop it: in Flow"
    ) as raised:
        discard_old(place.runs.fleet, target, lambda _: None, Silent())
    execute(inside, raised.value.hint.partition(": ")[2].partition(";")[0])
    (old,) = find_old(place.runs.fleet, target, Silent())
    assert (old.database, old.slots, old.subscriptions) == (aside, ("theirs",), ())
    discard_old(place.runs.fleet, target, lambda _: None, Silent())
    with connect(with_database(node, "postgres")) as connection:
        assert connection.execute("SELECT FROM pg_replication_slots WHERE slot_name = 'theirs'").fetchall() == []
        assert read_old(node, connection) == []


def test_a_restore_that_pg_hba_conf_keeps_out_of_its_new_database_leaves_nothing(place: Place) -> None:
    embedded = place.embedded.primaries[1]
    server, file = embedded.dsn("postgres"), embedded.data_directory / "pg_hba.conf"
    before = file.read_text()
    file.write_text(f"local postgres,{SOURCE}_hba all trust\n")
    try:
        execute(server, "SELECT pg_reload_conf()", "SELECT pg_sleep(0.5)")
        with pytest.raises(NotAdmittedError, match=f"{SOURCE}_hba_restoring_") as raised:
            place.restore(place.target(f"{SOURCE}_hba", shard=1))
        assert "let a line of pg_hba.conf" in raised.value.hint
        assert "restore-resume" not in raised.value.hint
        assert not [name for name in databases(server) if SOURCE in name]
        # As the hint says.
        file.write_text(f'local postgres,{SOURCE}_hba all trust\nlocal "/{NEW_DATABASES}" all trust\n')
        assert f'"/{NEW_DATABASES}"' in raised.value.hint
        execute(server, "SELECT pg_reload_conf()", "SELECT pg_sleep(0.5)")
        with pytest.raises(SchemaLoadError, match="item_note_not_null"):
            place.restore(place.target(f"{SOURCE}_hba", shard=1))
    finally:
        file.write_text(before)
        execute(server, "SELECT pg_reload_conf()")


def test_a_lost_library_that_any_role_may_preload_is_refused_for_every_role(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Chain.database_properties

    def with_library(chain: Chain, shard: str) -> DatabaseProperties:
        properties = stored(chain, shard)
        assert properties is not None
        return structs.replace(properties, settings=(DatabaseSetting("local_preload_libraries", "lost_library"),))

    monkeypatch.setattr(Chain, "database_properties", with_library)
    scope = RestoreScope(no_owner=True)
    target = place.target(f"{SOURCE}_ours", user="gapper")
    report = place.restore(target, scope=scope, allow_refused_ddl=True)
    assert "DATABASE SETTING local_preload_libraries" in [one.object for one in report.refused]
    with psycopg.connect(target.primaries[0].dsn) as connection:
        assert connection.execute("SELECT count(*) FROM item").fetchone() == (2,)


def test_not_valid_constraints_of_existing_tables_are_named_with_statements(place: Place) -> None:
    target = place.target(f"{SOURCE}_filled")
    (node,) = target.primaries
    place.restore(target, scope=RestoreScope(schema_only=True))
    scope = RestoreScope(data_only=True)
    with pytest.raises(LoadError, match="is Positive"):
        place.restore(target, scope=scope)
    notes: list[str] = []

    class Noting(Silent):
        def note(self, message: str) -> None:
            notes.append(str(message))

    plan = plan_restore(place.runs.fleet, target, RestoreRequest(NAME, scope=scope))
    with pytest.raises(LoadError):
        restore_fleet(plan, place.runs.spark, Noting())
    (warning,) = [note for note in notes if "NOT VALID constraints" in note]
    drop, add = warning.partition("before the restore: ")[2].split("; afterwards: ")
    assert drop == 'ALTER TABLE public.item DROP CONSTRAINT "is Positive"'
    execute(node.dsn, drop)
    place.restore(target, scope=scope)
    execute(node.dsn, add)
    with psycopg.connect(node.dsn) as connection:
        query = "SELECT convalidated FROM pg_constraint WHERE conname = 'is Positive'"
        assert connection.execute(query).fetchall() == [(False,)]
        assert connection.execute("SELECT count(*) FROM item").fetchone() == (2,)


def test_a_role_that_may_not_enter_the_database_postgres_is_told_the_grant(place: Place) -> None:
    target = place.target("postgres", user="gapper")
    execute(place.server, "REVOKE CONNECT ON DATABASE postgres FROM PUBLIC")
    try:
        with pytest.raises(NodeUnreachableError) as raised:
            connect(target.primaries[0])
        assert 'GRANT CONNECT ON DATABASE "postgres" TO "gapper";' in raised.value.hint
        assert "CREATE DATABASE" not in raised.value.hint
        execute(place.server, raised.value.hint.partition(": ")[2])
        connect(target.primaries[0]).close()
        execute(place.server, "REVOKE CONNECT ON DATABASE postgres FROM gapper")
    finally:
        execute(place.server, "GRANT CONNECT ON DATABASE postgres TO PUBLIC")


def test_a_full_database_is_not_one_that_the_role_may_not_enter(place: Place) -> None:
    fleet = place.target(f"{SOURCE}_full", user="gapper")
    execute(place.server, f"CREATE DATABASE {SOURCE}_full CONNECTION LIMIT 1 OWNER gapper")
    (target,) = provisional_targets(fleet, ())
    with connect(target.maintenance) as connection:
        with psycopg.connect(target.node.dsn), pytest.raises(NodeUnreachableError, match="too many conn") as raised:
            is_shut(target, connection)
        assert f'ALTER DATABASE "{SOURCE}_full" CONNECTION LIMIT' in raised.value.hint
        execute(place.server, f"ALTER DATABASE {SOURCE}_full CONNECTION LIMIT 0")
        assert is_shut(target, connection)
        execute(place.server, f"ALTER DATABASE {SOURCE}_full CONNECTION LIMIT 5")
        assert not is_shut(target, connection)


def test_the_servers_own_hint_follows_the_remedy(place: Place) -> None:
    with connect(place.runs.fleet.primaries[0]) as connection, pytest.raises(psycopg.Error) as raised:
        connection.execute("DO $$ BEGIN RAISE 'no' USING ERRCODE = '53200', HINT = 'Raise\nmax_locks.'; END $$")
    assert remedy_of(raised.value).endswith("the message names; the server's own hint: Raise max_locks.")
