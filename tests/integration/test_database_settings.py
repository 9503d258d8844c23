"""What belongs to a database itself comes back as it was: on PostgreSQL 15 to 18, of which one fleet has a shard each.

The right values are what PostgreSQL's catalogs say of the source, before and after.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from msgspec import structs
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.nodes.connections import connect, with_database
from cutline.nodes.problems import quote
from cutline.nodes.read_only import freeze, thaw
from cutline.restore.ddl.ddl import SchemaLoadError
from cutline.restore.ddl.statements import literal
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.preview import preview_restore
from cutline.restore.run.restore import resume_restore
from cutline.restore.scope.scope import RestoreScope
from cutline.restore.targets.databases import DatabaseRecord, Phase, record_text
from cutline.restore.targets.obstacles import TargetLacksError
from cutline.restore.targets.target import TargetUnfitError
from cutline.restore.unfinished.undoing import abandon_restore
from cutline.restore.unfinished.unfinished import NothingUnfinishedError, UnfinishedRestoreError
from cutline.snapshots.ddl.database_facts import read_properties
from cutline.snapshots.ddl.described_ddl import describe
from cutline.snapshots.ddl.dump import read_stored_ddl
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import DatabaseProperties, DatabaseSetting
from cutline.snapshots.records.proven_chains import read_chain
from cutline.snapshots.records.store_identity import read_identity
from cutline.storage.errors import StoppedError
from tests.commands.in_process import run_as_text, run_here
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots
from tests.integration.refusing import execute
from tests.servers.fleets import fleet_of
from tests.servers.installed import MAJORS, SERVERS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME, DATABASE = "set", 'od"d shop'
QUOTED = '"od""d shop"'
ROLES = ("restorer", "maker", "app", "clerk", "keeper", "nobody_else")
SCHEMA = (
    "CREATE SCHEMA shop AUTHORIZATION maker",
    "CREATE TABLE shop.item (id int PRIMARY KEY, name text)",
    "INSERT INTO shop.item VALUES (1, 'one')",
    "ALTER TABLE shop.item OWNER TO maker",
    "GRANT USAGE ON SCHEMA shop TO app",
    "GRANT SELECT ON shop.item TO app",
)
SETTINGS = (
    f"ALTER DATABASE {QUOTED} SET search_path = shop, \"$user\", 'a b', public",
    f"ALTER DATABASE {QUOTED} SET my.own = 'it''s \\ 5'",
    f"ALTER DATABASE {QUOTED} SET \"TimeZone\" = 'Europe/Vienna'",
    f"ALTER DATABASE {QUOTED} SET temp_tablespaces = ''",
    f"ALTER ROLE app IN DATABASE {QUOTED} SET statement_timeout = '5s'",
    f"ALTER ROLE clerk IN DATABASE {QUOTED} SET search_path = ''",
    f"REVOKE ALL ON DATABASE {QUOTED} FROM PUBLIC",
    f"GRANT CONNECT ON DATABASE {QUOTED} TO app WITH GRANT OPTION",
    f"SET ROLE app; GRANT CONNECT ON DATABASE {QUOTED} TO clerk; RESET ROLE",
    f"GRANT CONNECT ON DATABASE {QUOTED} TO restorer WITH GRANT OPTION",
    f"COMMENT ON DATABASE {QUOTED} IS 'money — \"all\" of it'",
    f"ALTER DATABASE {QUOTED} CONNECTION LIMIT 40",
    f"ALTER DATABASE {QUOTED} OWNER TO keeper",
)
LATER = (
    f"ALTER DATABASE {QUOTED} SET search_path = public",
    f"ALTER ROLE app IN DATABASE {QUOTED} RESET ALL",
    f"GRANT ALL ON DATABASE {QUOTED} TO clerk",
    f"COMMENT ON DATABASE {QUOTED} IS NULL",
    f"ALTER DATABASE {QUOTED} CONNECTION LIMIT -1",
    f"ALTER DATABASE {QUOTED} OWNER TO clerk",
)
PROPERTIES_QUERY = """
SELECT pg_get_userbyid(d.datdba), shobj_description(d.oid, 'pg_database'), t.spcname, d.datconnlimit, d.datistemplate,
       (SELECT array_agg(one::text ORDER BY one::text) FROM unnest(d.datacl) AS one),
       (SELECT array_agg((coalesce(r.rolname, ''), g.setconfig)::text ORDER BY 1)
          FROM pg_db_role_setting g LEFT JOIN pg_roles r ON r.oid = g.setrole WHERE g.setdatabase = d.oid)
  FROM pg_database d JOIN pg_tablespace t ON t.oid = d.dattablespace WHERE d.datname = current_database()
"""


READ_ONLY_QUERY = """
SELECT coalesce(r.rolname, '') FROM pg_db_role_setting g LEFT JOIN pg_roles r ON r.oid = g.setrole
 WHERE g.setdatabase <> 0 AND 'default_transaction_read_only=on' = ANY (g.setconfig) ORDER BY 1
"""


def properties_of(fleet: Fleet) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in fleet.primaries:
        with psycopg.connect(node.dsn, options="-c default_transaction_read_only=off") as connection:
            found[node.id] = connection.execute(PROPERTIES_QUERY).fetchone()
    return found


def named(fleet: Fleet, database: str, user: str = "postgres") -> Fleet:
    nodes = (replace(node, dsn=make_conninfo(node.dsn, dbname=database, user=user)) for node in fleet.nodes)
    return replace(fleet, nodes=tuple(nodes))


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    servers = [SERVERS[major] for major in MAJORS if major in SERVERS]
    with fleet_of(tmp_path_factory.mktemp("set") / "fleet", servers or [None], schema=False) as fleet:
        yield fleet


@dataclass(frozen=True, slots=True)
class Place:
    """The fleet, whose chain has a full snapshot and an increment, and what belonged to its databases then, by node."""

    runs: Runs
    full: dict[str, Any]
    later: dict[str, Any]


@pytest.fixture(scope="module")
def place(embedded: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("set-store")
    fleet = named(configure_fleet(embedded, folder / "fleet.toml", f"file://{folder}/store"), DATABASE)
    for node in embedded.primaries:
        execute(node.dsn("postgres"), *(f"CREATE ROLE {role} LOGIN" for role in ROLES))
        execute(node.dsn("postgres"), f"CREATE DATABASE {QUOTED}")
    for node in fleet.primaries:
        execute(node.dsn, *SCHEMA, *SETTINGS)
    runs = Runs(fleet, Ready(spark))
    with dropping_slots(fleet):
        runs.init()
        runs.full(NAME)
        full = properties_of(fleet)
        for node in fleet.primaries:
            execute(node.dsn, *LATER)
        runs.increment(NAME)
        yield Place(runs, full, properties_of(fleet))


def test_a_replaced_database_has_all_that_belonged_to_it(place: Place) -> None:
    """With it the application's role finds its table. Increments store the changes, though they change no table."""
    runs, full = place.runs, place.full
    for name, (before, increment) in {"back_full": (full, 0), "back_later": (place.later, 1)}.items():
        target = named(runs.fleet, name)
        report = runs.restore(NAME, target, increment)
        assert (report.left_out, report.warnings, report.refused) == ([], [], [])
        assert properties_of(target) == before
    for node in named(runs.fleet, "back_full", "app").primaries:
        with psycopg.connect(node.dsn) as connection:
            assert connection.execute("SELECT name FROM item").fetchall() == [("one",)]
            assert connection.execute("SHOW my.own").fetchone() == ("it's \\ 5",)
    with pytest.raises(psycopg.OperationalError, match="permission denied for database"):
        psycopg.connect(named(runs.fleet, "back_full", "nobody_else").primaries[0].dsn)

    # In the place of a database with other settings.
    again = runs.restore(NAME, named(runs.fleet, "back_later"), 0)
    assert properties_of(named(runs.fleet, "back_later")) == full
    assert [(one.owner, one.previous) for one in again.owner_changes] == [("keeper", "clerk")] * len(full)


def test_the_ddl_of_each_commit_has_the_same(place: Place) -> None:
    """So an increment stores DDL because of them alone, and a check finds no difference in either commit."""
    for increment in (0, 1):
        report = place.runs.check_one(NAME, increment)
        assert (report.conflicts, report.doubts) == ([], [])
    store = place.runs.fleet.store.open()
    chain = read_chain(store, NAME)
    changes = chain.increments[0].definition_changes
    assert changes is not None
    assert changes.fingerprints.keys() == {node.id for node in place.runs.fleet.primaries}
    for shard in chain.full.primaries:
        described = [
            describe(read_stored_ddl(place.runs.fleet.store.open(), chain.up_to(one), shard)) for one in (0, 1)
        ]
        databases = [one.database for one in described if one.database is not None]
        assert [(one.owner, one.connection_limit) for one in databases] == [("keeper", 40), ("clerk", -1)]
        assert databases[0].privileges == {
            ("keeper", "CONNECT"): False, ("keeper", "CREATE"): False, ("keeper", "TEMPORARY"): False,
            ("app", "CONNECT"): True, ("clerk", "CONNECT"): False, ("restorer", "CONNECT"): True,
        }  # fmt: skip


def test_nothing_of_it_comes_back_where_it_is_not_wanted(place: Place) -> None:
    runs = place.runs
    target = named(runs.fleet, "back_plain")
    runs.restore(NAME, target, 0, scope=RestoreScope(no_database_settings=True))
    assert set(properties_of(target).values()) == {("postgres", None, "pg_default", -1, False, None, None)}
    no_owner = named(runs.fleet, "back_no_owner")
    runs.restore(NAME, no_owner, 0, scope=RestoreScope(no_owner=True, role_map=(("clerk", "nobody_else"),)))
    for owner, comment, *_, privileges, settings in properties_of(no_owner).values():
        assert (owner, comment) == ("postgres", 'money — "all" of it')
        assert privileges == [
            "app=c*/postgres",
            "nobody_else=c/postgres",
            "postgres=CTc/postgres",
            "restorer=c*/postgres",
        ]
        assert any(one.startswith("(nobody_else,") for one in settings)


def test_roles_that_the_target_lacks_are_an_obstacle_with_both_ways_out(place: Place) -> None:
    runs = place.runs
    for node in runs.fleet.primaries:
        server = with_database(node, "postgres").dsn
        execute(server, "CREATE ROLE gone", f"ALTER ROLE gone IN DATABASE {QUOTED} SET work_mem = '5MB'")
        execute(server, "CREATE ROLE gone_owner", f"ALTER DATABASE {QUOTED} OWNER TO gone_owner")
        execute(server, "ALTER ROLE restorer CREATEDB", "GRANT app, maker TO restorer")
    runs.increment(NAME)
    for node in runs.fleet.primaries:
        server = with_database(node, "postgres").dsn
        execute(server, f"ALTER DATABASE {QUOTED} OWNER TO clerk", "DROP ROLE gone", "DROP ROLE gone_owner")
    target = named(runs.fleet, "back_lacking")
    # A role that is no superuser could not give it the database either way, but says so at once.
    for other in (target, named(runs.fleet, "back_lacking", "restorer")):
        with pytest.raises(TargetUnfitError) as raised:
            runs.restore(NAME, other)
        for node in runs.fleet.primaries:
            assert re.search(rf"node {node.id} lacks roles [^;]*: gone, gone_owner(;|$)", raised.value.message)
        assert "--no-database-settings" in raised.value.hint
        assert "--create-roles" in raised.value.hint
    runs.restore(NAME, target, create_roles=True)
    assert all("(gone," in str(settings) for *_, settings in properties_of(target).values())
    assert {owner for owner, *_ in properties_of(target).values()} == {"gone_owner"}


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        (DatabaseSetting("session_preload_libraries", "auto_explain, lost_library"), "could not access file"),
        (DatabaseSetting("no_longer_known", "on"), "unrecognized configuration parameter"),
        (DatabaseSetting("work_mem", "much", "app"), "invalid value for parameter"),
    ],
    ids=["library that is not there", "setting that is not known", "value that is not known"],
)
def test_a_setting_that_the_target_refuses_is_known_before_a_row_is_loaded(
    place: Place, monkeypatch: pytest.MonkeyPatch, setting: DatabaseSetting, why: str
) -> None:
    """A library that is not there would let nobody into the restored database; the server itself accepts its name."""

    stored = Chain.database_properties

    def with_one_more(chain: Chain, shard: str) -> DatabaseProperties:
        properties = stored(chain, shard)
        assert properties is not None
        return structs.replace(properties, settings=(*properties.settings, setting))

    monkeypatch.setattr(Chain, "database_properties", with_one_more)
    target = named(place.runs.fleet, "back_refused")
    for refused in (
        lambda: preview_restore(plan_restore(place.runs.fleet, target, RestoreRequest(NAME, replace=True)), Silent()),
        lambda: place.runs.restore(NAME, target),
    ):
        with pytest.raises(SchemaLoadError, match=f"DATABASE SETTING {setting.name}.*{why}") as raised:
            refused()
        assert "--no-database-settings" in raised.value.hint
    # All others are there, and people can enter.
    report = place.runs.restore(NAME, target, 0, allow_refused_ddl=True)
    assert [one.object.split(" of ")[0] for one in report.refused] == [f"DATABASE SETTING {setting.name}"] * len(
        place.full
    )
    assert all(f"DATABASE {quote('back_refused')} SET" in one.statement for one in report.refused)
    assert properties_of(target) == place.full


def test_a_comment_that_is_a_record_on_the_source_is_none_on_the_target(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of a database of the source can write one; a later restore must find nothing unfinished."""
    runs, target = place.runs, named(place.runs.fleet, "back_claimed")
    claim = record_text(
        DatabaseRecord(
            operation="20261122T081034Z-ac5ee8b427", snapshot=NAME, increment=0, digest="d", by="cutline",
            began_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z"), version="1", groups=(), replace=False,
            create_roles=False, allow_refused_ddl=False, in_store=False, shards=("s1",),
            shard="s1", phase=Phase.LOADING,
        )
    )  # fmt: skip
    for node in runs.fleet.primaries:
        execute(node.dsn, f"COMMENT ON DATABASE {QUOTED} IS {literal(claim)}")
    runs.increment(NAME)
    report = runs.restore(NAME, target)
    assert [line for line in report.left_out if "form of a restore's record" in line]
    assert {comment for _, comment, *_ in properties_of(target).values()} == {None}
    with pytest.raises(UnfinishedRestoreError, match="there is no unfinished restore into these databases"):
        abandon_restore(runs.fleet, target, NAME, print, Silent())
    shown = run_as_text(runs.fleet, "show", NAME, "--statements")
    assert "COMMENT ON DATABASE" not in shown
    assert "-- left out: comment of the database" in shown
    for node in runs.fleet.primaries:
        execute(node.dsn, f"COMMENT ON DATABASE {QUOTED} IS NULL")
    runs.increment(NAME)


def test_a_terminal_snapshot_has_the_settings_from_before_it(place: Place) -> None:
    """Its databases are read-only when their settings are read; what is restored is not."""
    for node in place.runs.fleet.primaries:
        execute(node.dsn, f"ALTER ROLE clerk IN DATABASE {QUOTED} SET default_transaction_read_only = off")
        with connect(node) as connection:
            before = read_properties(node, connection)
            identity = read_identity(place.runs.fleet.store.open(), place.runs.fleet)
            freeze(node, connection, identity.fleet_id, "20261126T062711Z-b2c228e3f6", "last")
            try:
                assert connection.execute(READ_ONLY_QUERY).fetchall() == [("",), ("clerk",)]
                assert read_properties(node, connection) == before
            finally:
                thaw(node, connection, Silent())
        execute(node.dsn, f"ALTER ROLE clerk IN DATABASE {QUOTED} RESET default_transaction_read_only")


def test_a_role_that_is_no_superuser_gives_what_it_may(place: Place) -> None:
    """It can't give a database to a role that it is no member of: it keeps it, and says so."""
    runs = place.runs
    for node in runs.fleet.primaries:
        server = with_database(node, "postgres").dsn
        execute(server, "ALTER ROLE restorer CREATEDB", "GRANT app, maker, pg_signal_backend TO restorer")
    target = named(runs.fleet, "back_ours", "restorer")
    with pytest.raises(TargetUnfitError, match="role restorer may not restore this DDL: DATABASE SETTING"):
        runs.restore(NAME, target, 0)
    report = runs.restore(NAME, target, 0, allow_refused_ddl=True)
    assert {one.object for one in report.refused} >= {"DATABASE SETTING statement_timeout of role app"}
    assert [one.split(" (")[0] for one in report.left_out if "owner" in one] == [
        "owner keeper of the database: role restorer can't transfer ownership to that role"
    ] * len(place.full)
    for owner, comment, _, limit, _, privileges, _ in properties_of(named(runs.fleet, "back_ours")).values():
        assert (owner, comment, limit) == ("restorer", 'money — "all" of it', 40)
        assert privileges == ["app=c*/restorer", "clerk=c/app", "restorer=CTc*/restorer"]
    for node in runs.fleet.primaries:
        execute(with_database(node, "postgres").dsn, "GRANT keeper TO restorer")
    report = runs.restore(NAME, named(runs.fleet, "back_theirs", "restorer"), 0, allow_refused_ddl=True)
    assert not [one for one in report.left_out if "owner" in one]
    for owner, comment, *_, privileges, _ in properties_of(named(runs.fleet, "back_theirs")).values():
        assert (owner, comment) == ("keeper", 'money — "all" of it')
        assert privileges == ["app=c*/keeper", "clerk=c/app", "keeper=CTc/keeper", "restorer=c*/keeper"]


def test_the_hint_of_refused_settings_has_the_statements_that_allow_them(place: Place) -> None:
    runs = place.runs
    for node in runs.fleet.primaries:
        server = with_database(node, "postgres").dsn
        execute(server, 'CREATE ROLE "Web Setter" LOGIN CREATEDB', 'GRANT app, maker TO "Web Setter"')
    target = named(runs.fleet, "back_hinted", "Web Setter")
    with pytest.raises(TargetUnfitError, match=r"DATABASE SETTING my\.own") as raised:
        runs.restore(NAME, target, 0)
    lines = raised.value.hint.splitlines()
    granted = 'GRANT SET ON PARAMETER "my"."own" TO "Web Setter";'
    assert (granted in lines, 'ALTER ROLE "Web Setter" CREATEROLE;' in lines) == (True, True), lines
    node_ids = ""
    for line in lines:
        if line.startswith("-- as a superuser on "):
            node_ids = line.removeprefix("-- as a superuser on ").partition(";")[0]
        elif line.endswith(";"):
            for node_id in node_ids.split(", "):
                execute(with_database(runs.fleet.node(node_id), "postgres").dsn, line)
    report = runs.restore(NAME, target, 0)
    assert report.refused == []
    found = [settings for *_, settings in properties_of(named(runs.fleet, "back_hinted")).values()]
    assert found == [settings for *_, settings in place.full.values()]


def test_the_owner_follows_where_the_process_ended_before_it_gave_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, runs = named(place.runs.fleet, "back_killed"), place.runs

    def lose(*_: object) -> list[str]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("cutline.restore.run.restore.clear_records", lambda *_: [])
        patch.setattr("cutline.restore.run.restore._clear_own_records", lose)
        with pytest.raises(StoppedError):
            runs.restore(NAME, target, 0)
    assert {owner for owner, *_ in properties_of(target).values()} == {"postgres"}
    with pytest.raises(NothingUnfinishedError):
        resume_restore(runs.fleet, target, RestoreRequest(NAME), runs.spark, Silent())
    assert properties_of(target) == place.full


def test_a_tablespace_and_a_template_come_back_or_are_an_obstacle(place: Place) -> None:
    runs = place.runs
    for node in runs.fleet.primaries:
        server = with_database(node, "postgres").dsn
        execute(server, "SET allow_in_place_tablespaces = on", "CREATE TABLESPACE slow LOCATION ''")
        execute(server, f"ALTER DATABASE {QUOTED} IS_TEMPLATE true")
    # It can't be moved while sessions are in it, as those of the fleet's lock are not at present.
    for node in runs.fleet.primaries:
        execute(with_database(node, "postgres").dsn, f"ALTER DATABASE {QUOTED} SET TABLESPACE slow")
    before = properties_of(runs.fleet)
    runs.increment(NAME)
    target = named(runs.fleet, "back_slow")
    runs.restore(NAME, target, create_roles=True)
    assert properties_of(target) == before
    assert {(tablespace, is_template) for _, _, tablespace, _, is_template, *_ in before.values()} == {("slow", True)}
    for node in (*runs.fleet.primaries, *target.primaries):
        server = with_database(node, "postgres").dsn
        database = conninfo_to_dict(node.dsn)["dbname"]
        execute(server, f"ALTER DATABASE {quote(str(database))} IS_TEMPLATE false")
        execute(server, f"ALTER DATABASE {quote(str(database))} SET TABLESPACE pg_default")
    for node in runs.fleet.primaries:
        execute(with_database(node, "postgres").dsn, "DROP TABLESPACE slow")
    with pytest.raises(TargetLacksError, match="lacks tablespaces that the snapshot has: slow"):
        runs.restore(NAME, target, create_roles=True)


def test_show_prints_it_as_statements_that_psql_runs(place: Place) -> None:
    """In a database that has none of it, they give it all."""
    runs = place.runs
    words = ("show", NAME, "--increment", "0", "--statements")
    code, document = run_here(runs.fleet, *words)
    assert (code, [one["database"] for one in document["statements"]]) == (0, [DATABASE] * len(place.full))
    shown = run_as_text(runs.fleet, *words)
    for node, one in zip(runs.fleet.primaries, document["statements"], strict=True):
        server = with_database(node, "postgres").dsn
        execute(server, "CREATE DATABASE statements")
        again = named(runs.fleet, "statements")
        for statement in one["statements"]:
            assert statement in shown
        execute(server, *(each.replace(QUOTED, "statements") for each in one["statements"]))
    assert properties_of(again) == place.full
