"""A role made by exactly the statements of docs/roles.md restores a database exactly, on PostgreSQL 15 and 18.

What it may not restore is refused before any row is loaded. An owner's code that runs at a restore runs as that role.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cutline.cli.output.restore_report import lines_of
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.report import RestoreReport
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.preview import preview_restore
from cutline.restore.scope.scope import RestoreScope
from cutline.restore.targets.target import TargetUnfitError
from tests.commands.snapshot_runs import Ready, Runs, sorted_copies
from tests.integration.documented_roles import (
    ADMIN,
    OWNER,
    RESTORER,
    drop_databases,
    drop_role,
    grant,
    restored,
    shop_on,
    statements,
    two_versions,
)
from tests.integration.owners_code import EVIL, POWERS, TABLES
from tests.integration.refusing import execute
from tests.integration.restored_shop import LARGE, LARGE_OF_OTHERS, OTHERS, SYSTEM_GRANT, ask, databases_of
from tests.tables.encoded_tables import dump_ddl

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CREATION, *MEMBERSHIPS = statements("restore")
BACK = "shop_back"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The fleet as a superuser, with a snapshot of both versions."""
    directory = tmp_path_factory.mktemp("restorer") / "fleet"
    with two_versions(directory) as servers, shop_on(servers, tmp_path_factory.mktemp("shop")) as fleet:
        for node in fleet.primaries:
            execute(node.dsn, f"SET ROLE {OWNER}; {LARGE} TO {ADMIN} WITH GRANT OPTION; RESET ROLE")
            execute(node.dsn, f"SET ROLE {ADMIN}; GRANT SELECT ON LARGE OBJECT 4711 TO pg_monitor; RESET ROLE")
            execute(node.dsn, SYSTEM_GRANT)
        yield fleet


@pytest.fixture(scope="module")
def runs(shop: Fleet, spark: SparkSession) -> Runs:
    runs = Runs(shop, Ready(spark))
    runs.init()
    runs.full("first", large_objects=True)
    return runs


@pytest.fixture
def target(shop: Fleet) -> Iterator[Fleet]:
    """The same servers as targets of the role, which exists without memberships."""
    try:
        grant([node.dsn for node in shop.primaries], [CREATION])
        yield restored(shop, RESTORER)
    finally:
        for node in shop.primaries:
            server = with_database(node, "postgres").dsn
            drop_databases(server, "shop_")
            drop_role(node.dsn, RESTORER, "mallory")


def grant_all(shop: Fleet, *granted: str) -> None:
    grant([node.dsn for node in shop.primaries], granted)


def restore(runs: Runs, target: Fleet, name: str = "first", increment: int = 0, **options: Any) -> RestoreReport:
    return runs.restore(name, target, increment, **options)


def test_the_documented_role_restores_exactly(shop: Fleet, runs: Runs, target: Fleet) -> None:
    grant_all(shop, *MEMBERSHIPS)
    report = restore(runs, target)
    assert [one for one in report.left_out if "publication cutline_" in one]
    of_system = [one for one in report.left_out if one.startswith('privileges of FUNCTION "pg_switch_wal"() on ')]
    assert len(of_system) == len(shop.primaries)
    for node, back in zip(shop.primaries, restored(shop, "postgres").primaries, strict=True):
        execute(back.dsn, SYSTEM_GRANT)
        assert sorted_copies(back.dsn) == sorted_copies(node.dsn)
        assert dump_ddl(back.dsn).decode().splitlines() == dump_ddl(node.dsn).decode().splitlines()
        assert ask(back.dsn, OTHERS) == ask(node.dsn, OTHERS)
        created = "SELECT has_database_privilege(%s, current_database(), 'CREATE')"
        assert ask(back.dsn, created.replace("%s", f"'{OWNER}'")) == [(False,)]


def test_memberships_that_lack_are_all_named_before_anything_is_done(shop: Fleet, runs: Runs, target: Fleet) -> None:
    before = databases_of(shop)
    for try_it in (
        lambda: restore(runs, target),
        lambda: preview_restore(plan_restore(shop, target, RestoreRequest("first")), Silent()),
    ):
        with pytest.raises(TargetUnfitError, match="is not a member of shop_admin") as raised:
            try_it()
        # The statements for every node, one script.
        lines = raised.value.hint.splitlines()
        begins = [line for line in lines if line.startswith("-- ")]
        assert [begin.split(", database ")[0] for begin in begins] == [
            f"-- as a superuser on {node.id}" for node in target.primaries
        ]
        assert all(begin.endswith("; for this restore:") for begin in begins)
        assert lines == [line for begin in begins for line in (begin, *MEMBERSHIPS)]
        assert databases_of(shop) == before
    # A membership that gives nothing.
    options = "" if len(shop.primaries) > 1 else " WITH INHERIT FALSE"
    grant_all(shop, MEMBERSHIPS[0], MEMBERSHIPS[1].replace(";", f"{options};"))
    if options:
        with pytest.raises(TargetUnfitError, match="is not a member of shop_owner"):
            restore(runs, target)


@pytest.mark.parametrize(
    ("statement", "undo", "named"),
    [
        (
            "CREATE FUNCTION app.ddl() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN END';"
            " CREATE EVENT TRIGGER seen ON ddl_command_end EXECUTE FUNCTION app.ddl();"
            " ALTER FUNCTION app.ddl() OWNER TO shop_owner",
            "DROP EVENT TRIGGER seen; DROP FUNCTION app.ddl()",
            "EVENT TRIGGER seen",
        ),
        ("CREATE FOREIGN DATA WRAPPER nothing", "DROP FOREIGN DATA WRAPPER nothing", "FOREIGN DATA WRAPPER nothing"),
        ("CREATE EXTENSION dblink", "DROP EXTENSION dblink", 'CREATE EXTENSION IF NOT EXISTS "dblink"'),
        ("CREATE PUBLICATION every FOR ALL TABLES; ALTER PUBLICATION every OWNER TO postgres",
         "DROP PUBLICATION every", "PUBLICATION every"),
    ],
    ids=["event trigger", "foreign-data wrapper", "extension", "publication for all"],
)  # fmt: skip
def test_what_takes_a_superuser_is_refused_before_a_row_is_loaded(
    shop: Fleet, runs: Runs, target: Fleet, monkeypatch: pytest.MonkeyPatch, statement: str, undo: str, named: str
) -> None:
    grant_all(shop, *MEMBERSHIPS, statement)
    before = databases_of(shop)
    try:
        number = runs.increment("first").increment
        monkeypatch.setattr(
            "cutline.restore.run.loading.load_databases", lambda *_, **__: pytest.fail("rows were loaded")
        )
        with pytest.raises(TargetUnfitError) as raised:
            restore(runs, target, increment=number)
        assert named in raised.value.message
        assert "superuser" in raised.value.hint
        assert databases_of(shop) == before
    finally:
        grant_all(shop, undo)


def test_owners_and_grantors_of_large_objects_are_compared_before_a_row_is_loaded(
    shop: Fleet, runs: Runs, target: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant_all(shop, *MEMBERSHIPS, "CREATE ROLE large_owner", "CREATE ROLE large_grantor", LARGE_OF_OTHERS)
    before = databases_of(shop)
    try:
        runs.init()
        runs.full("large", large_objects=True)
        monkeypatch.setattr("cutline.restore.rows.jobs.load_rows", lambda *_, **__: pytest.fail("rows were loaded"))
        with pytest.raises(TargetUnfitError, match="is not a member of large_owner") as raised:
            restore(runs, target, "large")
        granted = [line for line in raised.value.hint.splitlines() if not line.startswith("-- ")]
        assert granted == [f'GRANT "large_{one}" TO "{RESTORER}";' for one in ("grantor", "owner")]
        assert databases_of(shop) == before
        monkeypatch.undo()
        grant_all(shop, *granted)
        restore(runs, target, "large")
        for node, back in zip(shop.primaries, restored(shop, "postgres").primaries, strict=True):
            assert ask(back.dsn, OTHERS) == ask(node.dsn, OTHERS)
    finally:
        for node in shop.primaries:
            drop_databases(with_database(node, "postgres").dsn, "shop_")
            drop_role(node.dsn, "large_grantor", "large_owner")


def test_a_preview_says_what_it_leaves_to_the_restore(shop: Fleet, runs: Runs, target: Fleet) -> None:
    grant_all(shop, *MEMBERSHIPS)
    preview = preview_restore(plan_restore(shop, target, RestoreRequest("first", 0)), Silent())
    names = [node.id for node in shop.primaries]
    assert (preview.untried, preview.refused) == ([], [])
    assert {one.rpartition(" on ")[2].partition(":")[0] for one in preview.left_out} == set(names)
    superuser = restored(shop, "postgres", "shop_super")
    preview = preview_restore(plan_restore(shop, superuser, RestoreRequest("first", 0)), Silent())
    assert (preview.untried, preview.left_out) == ([], [])


def test_an_owners_code_can_not_become_a_superuser_through_the_documented_role(
    shop: Fleet, runs: Runs, target: Fleet
) -> None:
    grant_all(shop, *MEMBERSHIPS, "; ".join(EVIL))
    try:
        for node in shop.primaries:
            execute(make_conninfo(node.dsn, user="mallory"), *TABLES)
        runs.init()
        runs.full("evil")
        grant_all(shop, f'GRANT mallory TO "{RESTORER}"')
        restore(runs, target, "evil")
        for node in restored(shop, "postgres").primaries:
            assert ask(node.dsn, POWERS) == [(False, False, False, False)]
            assert ask(node.dsn, "SELECT id, d, g FROM m.t") == [(1, 1, True)]
        # As a superuser the same code gives its owner everything: SECURITY.md says so.
        runs.restore("evil", restored(shop, "postgres", "shop_super"))
        for node in restored(shop, "postgres").primaries:
            assert ask(node.dsn, POWERS)[0][0] is True
    finally:
        for node in shop.primaries:
            drop_databases(with_database(node, "postgres").dsn, "shop_")
            drop_role(node.dsn, "mallory")


def test_an_existing_database_that_can_not_be_put_aside_is_refused_first(
    shop: Fleet, runs: Runs, target: Fleet
) -> None:
    grant_all(shop, *MEMBERSHIPS)
    node = shop.primaries[0]
    server = with_database(node, "postgres").dsn
    execute(server, f"CREATE DATABASE {BACK}")
    with pytest.raises(TargetUnfitError, match=f"database {BACK} can't be set aside.* does not own it") as raised:
        restore(runs, target)
    execute(server, raised.value.hint, "CREATE ROLE mallory LOGIN")
    with psycopg.connect(node.dsn, dbname=BACK, user="mallory"):
        with pytest.raises(TargetUnfitError, match="may not terminate the sessions of mallory") as raised:
            restore(runs, target)
        assert raised.value.hint == f'GRANT "pg_signal_backend" TO "{RESTORER}";'
        execute(server, raised.value.hint)
        restore(runs, target)
    refusing = pytest.raises(TargetUnfitError, match="may not terminate the sessions of postgres")
    with psycopg.connect(node.dsn, dbname=BACK), refusing:
        restore(runs, target)


def test_what_it_takes_from_the_owner_and_slots_that_it_can_not_drop_are_named_with_statements(
    shop: Fleet, runs: Runs, target: Fleet
) -> None:
    grant_all(shop, *MEMBERSHIPS)
    slot = "cutline_0123456789ab_left"
    for node in shop.primaries:
        execute(with_database(node, "postgres").dsn, f"CREATE DATABASE {BACK} OWNER {ADMIN}")
        execute(with_database(node, BACK).dsn, f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    give_back, ids = f'ALTER DATABASE "{BACK}" OWNER TO "{ADMIN}";', [node.id for node in shop.primaries]
    assert statements("give-back") == [give_back.replace(BACK, "shop")]
    try:
        report = restore(runs, target, scope=RestoreScope(no_database_settings=True))
        assert report.slots_left == [f"{node}: {slot}" for node in ids]
        assert [(one.node, one.owner, one.previous) for one in report.owner_changes] == [
            (node, RESTORER, ADMIN) for node in ids
        ]
        lines, drop = lines_of(report), f"SELECT pg_drop_replication_slot('{slot}');"
        assert (lines.count(give_back), lines.count(drop)) == (len(ids), len(ids))
        for node in shop.primaries:
            # As a superuser; and the role itself, as it is a member.
            execute(with_database(node, BACK).dsn, drop)
            execute(make_conninfo(node.dsn, user=RESTORER, dbname="postgres"), give_back)
        # Now there is no other owner, and no slot.
        execute(shop.primaries[0].dsn, *(f'ALTER DATABASE {BACK} OWNER TO "{RESTORER}"',))
        again = restore(runs, target, scope=RestoreScope(no_database_settings=True))
        assert ([one.node for one in again.owner_changes], again.slots_left) == (ids[1:], [])
        # The snapshot's owner, of which it is a member, is given the database.
        assert [(one.owner, one.previous) for one in restore(runs, target).owner_changes] == [
            (ADMIN, RESTORER) for _ in ids
        ]
    finally:
        for node in shop.primaries:
            execute(
                node.dsn,
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                f" WHERE slot_name = '{slot}' AND slot_type = 'logical'",
            )


def test_roles_that_it_creates_are_usable(shop: Fleet, runs: Runs, target: Fleet) -> None:
    grant_all(shop, *MEMBERSHIPS, f"ALTER ROLE {OWNER} RENAME TO away", f'ALTER ROLE "{RESTORER}" CREATEROLE')
    try:
        report = restore(runs, target, create_roles=True)
        assert report.roles_created == [f"{node.id}: {OWNER}" for node in shop.primaries]
        for node in restored(shop, "postgres").primaries:
            owner = "SELECT DISTINCT tableowner::text FROM pg_tables WHERE tablename = 'paid'"
            assert ask(node.dsn, owner) == [(OWNER,)]
    finally:
        for node in shop.primaries:
            drop_databases(with_database(node, "postgres").dsn, "shop_")
            execute(node.dsn, f"DROP ROLE IF EXISTS {OWNER}", f"ALTER ROLE away RENAME TO {OWNER}")
