"""Roles of a server come back as they were, on PostgreSQL 15 to 18; the right values are those of its catalogs.

A second fleet is the target: servers that have none of the roles.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from msgspec import structs
from psycopg.conninfo import make_conninfo

from cutline.cli.output.restore_report import lines_of
from cutline.fleet.config import Fleet, FleetFileError, load_fleet
from cutline.nodes.connections import connect, with_database
from cutline.restore.plan.roles import create_roles
from cutline.restore.targets.target import Superusers, TargetUnfitError, target_of
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.ddl.server_globals_object import read_globals, read_stored_globals
from cutline.snapshots.records.commit import GLOBALS, DatabaseSetting
from cutline.snapshots.records.proven_chains import read_chain
from cutline.snapshots.records.server_globals import ParameterPrivilege, RoleMembership, ServerGlobals, ServerRole
from cutline.wal.segments.damage import ObjectDamagedError
from tests.commands.in_process import run_as_text, run_here
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots
from tests.commands.watching import Watching
from tests.integration.refusing import execute
from tests.servers.fleets import fleet_of
from tests.servers.installed import MAJORS, SERVERS, Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME, SECONDS_MAX = "globals", 60
OPTIONS_VERSION = 160000
# Characters that no terminal gets as they are.
ODD = 'od\u200bd"" \\role'
ROLES = (
    "CREATE ROLE app_rw NOINHERIT",
    "CREATE ROLE \"o'hara\" LOGIN CREATEDB CONNECTION LIMIT 7 VALID UNTIL '2031-05-06 07:08:09+00' PASSWORD 'hidden'",
    "CREATE ROLE app LOGIN",
    "CREATE ROLE lead LOGIN",
    "COMMENT ON ROLE app IS 'the application''s'",
    "ALTER ROLE app SET search_path = shop, public",
    "ALTER ROLE app SET \"my.own\" = 'a\\b'",
    "GRANT app_rw TO lead WITH ADMIN OPTION",
    "SET ROLE lead; GRANT app_rw TO app; RESET ROLE",
    "GRANT pg_monitor TO app",
    "CREATE ROLE gone LOGIN VALID UNTIL '-infinity' PASSWORD 'hidden'",
    f'CREATE ROLE "{ODD}"',
    f"COMMENT ON ROLE \"{ODD}\" IS 'it''s\nof two lines,\ta tab, a \\ and a \u200b'",
    f'ALTER ROLE "{ODD}" SET "my.own" = \'a\nb\'',
    # Masters of the server.
    "CREATE ROLE boss SUPERUSER LOGIN",
    "CREATE ROLE maker CREATEROLE REPLICATION BYPASSRLS LOGIN",
    "GRANT boss, maker, pg_execute_server_program TO app",
    'GRANT SET ON PARAMETER log_statement, work_mem, "My"."own" TO app WITH GRANT OPTION',
    "GRANT ALTER SYSTEM ON PARAMETER work_mem TO app",
    "GRANT SET ON PARAMETER log_min_duration_statement TO PUBLIC",
    "SET ROLE app; GRANT SET ON PARAMETER log_statement TO lead; RESET ROLE",
    "CREATE TABLE item (id int PRIMARY KEY)",
    "ALTER TABLE item OWNER TO app_rw",
)
OPTIONS = ("CREATE ROLE quiet LOGIN", "GRANT app_rw TO quiet WITH INHERIT FALSE, SET FALSE")
ROLES_QUERY = """
SELECT r.rolname, r.rolinherit, r.rolcreatedb, r.rolcanlogin, r.rolconnlimit, r.rolvaliduntil::text, r.rolpassword,
       shobj_description(r.oid, 'pg_authid'), g.setconfig
  FROM pg_authid r LEFT JOIN pg_db_role_setting g ON g.setrole = r.oid AND g.setdatabase = 0
 WHERE r.rolname !~ '^pg_' AND r.rolname NOT IN ('postgres', 'boss') ORDER BY 1
"""
MEMBERSHIPS_QUERY = """
SELECT a.roleid::regrole::text, a.member::regrole::text,
       to_jsonb(a) - ARRAY['oid', 'roleid', 'member', 'grantor'], a.grantor::regrole::text
  FROM pg_auth_members a WHERE a.member >= 16384 ORDER BY 1, 2, 4
"""
POWERS_QUERY = """
SELECT rolname FROM pg_roles WHERE rolname NOT IN ('postgres')
   AND (rolsuper OR rolcreaterole OR rolreplication OR rolbypassrls)
"""
# Whoever has granted them: a superuser gives them again.
PARAMETERS_QUERY = """
SELECT DISTINCT p.parname, a.grantee::regrole::text, a.privilege_type, a.is_grantable
  FROM pg_parameter_acl p, aclexplode(p.paracl) a WHERE a.grantee <> 10 ORDER BY 1, 2, 3
"""
# Settings that only a superuser sets, one of a library that is not loaded, and one that loads a library.
POWERFUL = {
    "lo_compat_privileges": "on",
    "session_replication_role": "replica",
    "Dynamic_Library_Path": "/tmp/evil",
    "pg_stat_statements.track": "none",
    "Session_Preload_Libraries": "/tmp/evil",
}


@dataclass(frozen=True, slots=True)
class Place:
    """A fleet with the roles, and as targets servers of the same versions without them."""

    runs: Runs
    target: Fleet


def ask(dsn: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, options="-c search_path=pg_catalog -c timezone=UTC") as connection:
        return connection.execute(query.encode()).fetchall()


def with_key(folder: Path) -> str:
    (folder / "key").write_text("a" * 64)
    (folder / "key").chmod(0o600)
    return f"[encryption]\nkey_file = {json.dumps(str(folder / 'key'))}\n[globals]\npasswords = true\n"


@pytest.fixture(scope="module")
def place(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    servers: Sequence[Server | None] = [SERVERS[major] for major in MAJORS if major in SERVERS] or [None]
    folder = tmp_path_factory.mktemp("globals")
    with ExitStack() as stack:
        source, other = (
            stack.enter_context(fleet_of(tmp_path_factory.mktemp("at") / "fleet", servers)) for _ in range(2)
        )
        fleet = configure_fleet(source, folder / "fleet.toml", f"file://{folder}/store", more=with_key(folder))
        for node in fleet.primaries:
            execute(node.dsn, *ROLES)
            with psycopg.connect(node.dsn) as connection:
                version = connection.info.server_version
            execute(node.dsn, *(OPTIONS if version >= OPTIONS_VERSION else ()))
        target = configure_fleet(other, folder / "other.toml", f"file://{folder}/store", more=with_key(folder))
        runs = Runs(fleet, Ready(spark))
        stack.enter_context(dropping_slots(fleet))
        runs.init()
        runs.full(NAME)
        yield Place(runs, target)


def test_missing_roles_are_created_as_they_were(place: Place) -> None:
    """With their passwords; but nothing of a snapshot makes a role master of the target."""
    runs, target = place.runs, place.target
    planned = run_here(
        runs.fleet, "restore", NAME, "--to", str(target.path), "--replace", "--create-roles", "--dry-run"
    )
    assert planned[0] == 0
    report = runs.restore(NAME, target, create_roles=True)
    assert sorted(planned[1]["roles_missing"]) == sorted(report.roles_created)
    withheld = {(role, "app") for role in ("boss", "maker", "pg_execute_server_program", "pg_monitor")}
    for node, other in zip(runs.fleet.primaries, target.primaries, strict=True):
        assert ask(other.dsn, ROLES_QUERY) == ask(node.dsn, ROLES_QUERY)
        assert ask(other.dsn, POWERS_QUERY) == []
        before = [one for one in ask(node.dsn, MEMBERSHIPS_QUERY) if one[:2] not in withheld]
        assert ask(other.dsn, MEMBERSHIPS_QUERY) == before
        warnings = [one for one in report.warnings if one.startswith(f"node {other.id}: role ")]
        assert [one for one in warnings if 'ALTER ROLE "maker" CREATEROLE REPLICATION BYPASSRLS;' in one]
        assert [one for one in warnings if "is not a member" in one or "was not made a member of boss" in one]
        # SET on the one that every role may set is given, without a word.
        assert ask(other.dsn, PARAMETERS_QUERY) == [("work_mem", "app", "SET", True)]
        parameters = [one for one in warnings if " on parameter " in one]
        assert [one.partition("; to grant it: ")[2] for one in parameters] == [
            'GRANT SET ON PARAMETER "log_statement" TO "app" WITH GRANT OPTION;',
            'GRANT SET ON PARAMETER "my"."own" TO "app" WITH GRANT OPTION;',
            'GRANT ALTER SYSTEM ON PARAMETER "work_mem" TO "app";',
            'GRANT SET ON PARAMETER "log_statement" TO "lead";',
        ]
        assert len(warnings) == 1 + len(withheld) + len(parameters)
    verifier = dict(one[0:7:6] for one in ask(runs.fleet.primaries[0].dsn, ROLES_QUERY))["o'hara"]
    assert verifier not in "\n".join([*lines_of(report), *report.warnings])


def test_a_snapshot_gives_no_role_power_over_what_the_target_has(place: Place) -> None:
    """A store that is not encrypted can be changed by somebody; the roles there are known to the target, or new."""
    (dsn,) = (one.dsn for one in place.target.primaries[:1])
    names = ("ops", "owner", "dba", "evil", "group", "user")
    execute(dsn, "CREATE ROLE ops CREATEROLE", "CREATE ROLE owner", "CREATE ROLE dba SUPERUSER", 'CREATE ROLE "user"')
    powers = (
        "ops", "owner", "dba", "pg_read_all_data", "pg_signal_backend",
        "pg_monitor", "pg_read_all_settings", "pg_read_all_stats",
    )  # fmt: skip
    harmless = ("group", "pg_stat_scan_tables")
    found = ServerGlobals(
        roles=tuple(ServerRole(name=name, login=True, comment="cutline_drill_0123456789") for name in names),
        memberships=(
            *(RoleMembership(role=role, member="evil", grantor="") for role in (*powers, *harmless)),
            RoleMembership(role="group", member="user", grantor=""),
        ),
        settings=(
            DatabaseSetting("work_mem", "1MB", "evil"),
            DatabaseSetting("my.own", "1", "evil"),
            *(DatabaseSetting(name, value, "evil") for name, value in POWERFUL.items()),
        ),
        tablespaces=(),
        with_verifiers=False,
        parameters=tuple(
            ParameterPrivilege(parameter=name, privilege=privilege, grantee=grantee)
            for name, privilege, grantee in (
                ("lo_compat_privileges", "SET", "evil"), ("work_mem", "SET", "evil"),
                ("work_mem", "ALTER SYSTEM", "evil"), ("pg_stat_statements.track", "SET", "evil"),
                ("work_mem", "SET", "ops"), ("work_mem", "SET", ""),
            )
        ),
    )  # fmt: skip
    target = target_of("s1", place.target.primaries[0], (), "0" * 32)
    target, before = structs.replace(target, loading=target.database), ask(dsn, PARAMETERS_QUERY)
    try:
        created, notes = create_roles(target, ["evil", "group"], None, found)
        assert created == ["s1: evil", "s1: group"]
        query = (
            "SELECT roleid::regrole::text, member::regrole::text FROM pg_auth_members"
            " WHERE member IN ('evil'::regrole, '\"user\"'::regrole) ORDER BY 1, 2"
        )
        assert ask(dsn, query) == [('"group"', '"user"'), ('"group"', "evil"), ("pg_stat_scan_tables", "evil")]
        assert ask(dsn, "SELECT setconfig FROM pg_db_role_setting WHERE setrole = 'evil'::regrole") == [
            (["work_mem=1MB", "my.own=1"],)
        ]
        for role in powers:
            statement = f'GRANT "{role}" TO "evil";'
            assert f"node s1: role evil was not made a member of {role}; to grant the membership: {statement}" in notes
        for name, value in POWERFUL.items():
            assert [one for one in notes if f'to set it: ALTER ROLE "evil" SET "{name}" TO \'{value}\';' in one]
        # Drills know their own roles by such comments.
        assert len([one for one in notes if "was created without its comment" in one]) == len(created)
        assert ask(dsn, "SELECT FROM pg_shdescription WHERE description ^@ 'cutline_drill_'") == []
        # Roles that exist, and PUBLIC, get nothing.
        given = [one for one in ask(dsn, PARAMETERS_QUERY) if one not in before]
        assert given == [("work_mem", "evil", "SET", False)]
        withheld = [one.rpartition(": ")[2] for one in notes if " on parameter " in one]
        assert withheld == [
            'GRANT SET ON PARAMETER "lo_compat_privileges" TO "evil";',
            'GRANT ALTER SYSTEM ON PARAMETER "work_mem" TO "evil";',
            'GRANT SET ON PARAMETER "pg_stat_statements"."track" TO "evil";',
        ]
        assert len(notes) == len(powers) + len(POWERFUL) + len(created) + len(withheld)
    finally:
        execute(dsn, "DROP OWNED BY evil", *(f'DROP ROLE IF EXISTS "{name}"' for name in names))


def test_what_others_do_to_the_servers_roles_meanwhile_is_no_refusal(place: Place) -> None:
    """CREATE ROLE waits for a session that creates the role, and is told by an index that it exists."""
    (dsn,) = (one.dsn for one in place.target.primaries[:1])
    target = target_of("s1", place.target.primaries[0], (), "0" * 32)
    target = structs.replace(target, loading=target.database)
    found = ServerGlobals(
        roles=(ServerRole(name="theirs", login=True), ServerRole(name="ours", login=True)),
        memberships=(),
        settings=(),
        tablespaces=(),
        with_verifiers=False,
        parameters=(ParameterPrivilege(parameter="temp_buffers", privilege="SET", grantee="ours"),),
    )
    execute(dsn, "CREATE ROLE other")
    try:
        with psycopg.connect(dsn) as creating, psycopg.connect(dsn) as granting, ThreadPoolExecutor(1) as pool:
            creating.execute("CREATE ROLE theirs NOLOGIN")
            granting.execute("GRANT SET ON PARAMETER temp_buffers TO other")
            done = pool.submit(create_roles, target, ["theirs", "ours"], None, found)
            for session in (creating, granting):
                await_waiting_for(session, dsn)
                session.commit()
            created, notes = done.result(SECONDS_MAX)
        assert (created, notes) == (
            ["s1: ours"],
            ["node s1: role theirs was created by another session at the same time, and was left unchanged"],
        )
        assert ask(dsn, "SELECT rolname, rolcanlogin FROM pg_roles WHERE rolname IN ('ours', 'theirs') ORDER BY 1") == [
            ("ours", True), ("theirs", False),
        ]  # fmt: skip
        given = [one[1] for one in ask(dsn, PARAMETERS_QUERY) if one[0] == "temp_buffers"]
        assert given == ["other", "ours"]
    finally:
        execute(dsn, "REVOKE SET ON PARAMETER temp_buffers FROM other")
        execute(dsn, *(f"DROP OWNED BY {name}; DROP ROLE {name}" for name in ("other", "theirs", "ours")))


def await_waiting_for(session: psycopg.Connection[Any], dsn: str) -> None:
    """Wait until another session waits for this one."""
    query = f"SELECT FROM pg_stat_activity WHERE {session.info.backend_pid} = ANY (pg_blocking_pids(pid))"
    deadline = time.monotonic() + SECONDS_MAX
    while not ask(dsn, query):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_drill_takes_no_role_that_another_one_has_made_meanwhile(place: Place) -> None:
    """It is dropped with that drill; one that the drill has made for another shard of the server it takes."""
    (dsn,) = (one.dsn for one in place.target.primaries[:1])
    target = target_of("s1", place.target.primaries[0], (), "0" * 32)
    target = structs.replace(target, loading=target.database)
    drills = ("cutline_drill_0123456789", "cutline_drill_9876543210")
    for mark in drills:
        execute(dsn, f"CREATE ROLE {mark}", f"COMMENT ON ROLE {mark} IS '{mark}'")
    first, second = (Superusers({"s1": target.node}, mark, frozenset(), {}, mark=mark) for mark in drills)
    try:
        assert create_roles(target, ["drilled"], first)[0] == ["s1: drilled"]
        assert create_roles(target, ["drilled"], first)[0] == []
        with pytest.raises(TargetUnfitError, match="another session has just created role drilled"):
            create_roles(target, ["drilled"], second)
    finally:
        execute(dsn, "DROP ROLE drilled", *(f"DROP ROLE {mark}" for mark in drills))


def test_roles_that_exist_are_listed_where_they_differ_and_stay_as_they_are(place: Place) -> None:
    runs, target = place.runs, place.target
    for other in target.primaries:
        if not ask(other.dsn, "SELECT FROM pg_roles WHERE rolname = 'app'"):
            execute(other.dsn, "CREATE ROLE app LOGIN", "CREATE ROLE app_rw")
        execute(other.dsn, "ALTER ROLE app NOLOGIN CREATEDB", "ALTER ROLE app SET search_path = other")
    before = [ask(other.dsn, ROLES_QUERY) for other in target.primaries]
    words = ("restore", NAME, "--to", str(target.path), "--replace", "--create-roles", "--dry-run")
    planned = run_here(runs.fleet, *words)[1]["role_differences"]
    report = runs.restore(NAME, target, create_roles=True)
    assert report.role_differences == planned
    for other in target.primaries:
        lines = [one for one in planned if one.startswith(f"node {other.id}: role app: ")]
        assert {
            f"node {other.id}: role app: LOGIN in the snapshot, NOLOGIN on the target",
            f"node {other.id}: role app: NOCREATEDB in the snapshot, CREATEDB on the target",
            f"node {other.id}: role app: search_path is 'shop, public' in the snapshot, 'other' on the target",
            f"node {other.id}: role app: a member of pg_monitor in the snapshot, but not on the target",
            f"node {other.id}: role app: SET on parameter log_statement in the snapshot, but not on the target",
        } <= set(lines)
        public = "PUBLIC: SET on parameter log_min_duration_statement in the snapshot, but not on the target"
        assert f"node {other.id}: {public}" in planned
    assert any(line.startswith("differs: node ") for line in lines_of(report))
    assert [ask(other.dsn, ROLES_QUERY) for other in target.primaries] == before


def test_show_prints_statements_and_passwords_only_when_they_are_asked_for(place: Place) -> None:
    runs = place.runs
    (verifier,) = (one[6] for one in ask(runs.fleet.primaries[0].dsn, ROLES_QUERY) if one[0] == "o'hara")
    shown = run_as_text(runs.fleet, "show", NAME, "--statements")
    assert "PASSWORD" not in shown
    assert verifier not in shown
    assert 'CREATE ROLE "boss" WITH SUPERUSER INHERIT' in shown
    assert "-- s1: roles and tablespaces of the server (passwords are stored; to print them: --verifiers)" in shown
    code, document = run_here(runs.fleet, "show", NAME, "--statements", "--verifiers")
    assert (code, len(document["statements"])) == (0, len(runs.fleet.primaries))
    assert any(f"PASSWORD '{verifier}';" in one for one in document["statements"][0]["globals"])
    text = run_as_text(runs.fleet, "show", NAME, "--statements", "--verifiers")
    # What it prints makes the same roles, as JSON and as text.
    by_node = [one["globals"] for one in document["statements"]]
    lines = [one.splitlines()[1:] for one in re.split(r"^(?=-- )", text, flags=re.MULTILINE) if ": roles and" in one]
    for printed in (by_node, lines):
        for node, other, statements in zip(runs.fleet.primaries, place.target.primaries, printed, strict=True):
            drop_roles(other.dsn)
            wanted = (one for one in statements if '"postgres"' not in one.split(" GRANTED BY ")[0])
            execute(other.dsn, *wanted)
            assert ask(other.dsn, ROLES_QUERY) == ask(node.dsn, ROLES_QUERY)
            assert ask(other.dsn, MEMBERSHIPS_QUERY) == ask(node.dsn, MEMBERSHIPS_QUERY)
            assert ask(other.dsn, PARAMETERS_QUERY) == ask(node.dsn, PARAMETERS_QUERY)
            execute(other.dsn, "REVOKE SET ON PARAMETER log_min_duration_statement FROM PUBLIC")
            drop_roles(other.dsn)


def drop_roles(dsn: str) -> None:
    """Drop what restores have made: databases that were set aside, and all roles."""
    server = make_conninfo(dsn, dbname="postgres")
    for (name,) in ask(server, "SELECT datname FROM pg_database WHERE datname ^@ 'bank_'"):
        execute(server, f"DROP DATABASE {name} WITH (FORCE)")
    for (name,) in ask(dsn, "SELECT quote_ident(rolname) FROM pg_roles WHERE oid >= 16384"):
        execute(dsn, f"DROP OWNED BY {name} CASCADE")
    for (name,) in ask(dsn, "SELECT quote_ident(rolname) FROM pg_roles WHERE oid >= 16384"):
        for (other,) in ask(dsn, "SELECT quote_ident(rolname) FROM pg_roles WHERE oid >= 16384"):
            execute(dsn, f"REVOKE {name} FROM {other} CASCADE") if name != other else None
    for (name,) in ask(dsn, "SELECT quote_ident(rolname) FROM pg_roles WHERE oid >= 16384"):
        execute(dsn, f"DROP ROLE {name}")


def test_an_increment_stores_them_only_if_they_have_changed(place: Place) -> None:
    """Whoever may not read passwords stores the rest, and says so."""
    runs, shard = place.runs, place.runs.fleet.primaries[0]
    store = runs.fleet.store.open()
    runs.increment(NAME)
    assert not [one for one in read_chain(store, NAME).last.own_objects if one.kind == GLOBALS]
    execute(shard.dsn, "ALTER ROLE app CONNECTION LIMIT 3")
    runs.increment(NAME)
    chain = read_chain(store, NAME)
    assert [(one.kind, one.node) for one in chain.last.own_objects] == [(GLOBALS, shard.id)]
    found = read_stored_globals(store, chain, shard.id)
    assert found is not None
    assert [one.connection_limit for one in found.roles if one.name == "app"] == [3]
    assert runs.check_one(NAME).result == "inconclusive"
    execute(shard.dsn, "ALTER ROLE app CONNECTION LIMIT -1")
    with connect(replace(shard, dsn=make_conninfo(shard.dsn, user="app"))) as connection:
        unseen = read_globals(connection, passwords=True)
    assert (unseen.with_verifiers, {one.verifier for one in unseen.roles}) == (False, {None})
    assert {one.name for one in unseen.roles} == {one.name for one in found.roles}


def test_passwords_need_an_encrypted_store(place: Place, tmp_path: Path) -> None:
    text = place.runs.fleet.path.read_text()
    begin, _, rest = text.partition("[encryption]\n")
    path = tmp_path / "fleet.toml"
    path.write_text(begin + rest.partition("\n")[2])
    with pytest.raises(FleetFileError, match=r"`globals.passwords` needs \[encryption\]"):
        load_fleet(path)


def notes_of_increment(runs: Runs) -> list[str]:
    watching = Watching()
    create_increment(runs.fleet, CreateRequest(NAME), runs.spark, watching)
    return watching.notes


def test_what_is_damaged_of_them_is_a_conflict_and_keeps_only_roles_from_being_restored(place: Place) -> None:
    runs, shard = place.runs, place.runs.fleet.primaries[0]
    store = runs.fleet.store.open()
    stored = read_chain(store, NAME).globals_object(shard.id)
    assert stored is not None
    store.delete(stored.key)
    assert [(one.kind, one.object) for one in runs.check_one(NAME).conflicts] == [("missing", stored.key)]
    target = replace(runs.fleet, nodes=tuple(with_database(node, "beside") for node in runs.fleet.nodes))
    with pytest.raises(ObjectDamagedError, match="it is not in the store"):
        runs.restore(NAME, target, create_roles=True)
    report = runs.restore(NAME, target)
    assert report.role_differences == []
    # The next increment has them again; what is lost of the restore points before is still named.
    (note,) = [one for one in notes_of_increment(runs) if stored.key in one]
    assert note.endswith(f"it is not in the store; the roles and tablespaces of {shard.id} will be stored again")
    chain = read_chain(store, NAME)
    assert [(one.kind, one.node) for one in chain.last.own_objects] == [(GLOBALS, shard.id)]
    assert read_stored_globals(store, chain, shard.id) is not None
    assert [(one.kind, one.object) for one in runs.check_one(NAME).conflicts] == [("missing", stored.key)]
    assert not [one for one in notes_of_increment(runs) if "stored again" in one]
