"""Roles made by exactly the statements of docs/roles.md run every command, on PostgreSQL 15 and 18 with standbys.

`init` names whatever of it is missing, all of it at once and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cutline.cli.output.failure import failure_of, report
from cutline.fleet.config import Fleet, Node
from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.nodes.large_objects import LargeObjectsUnreadableError
from cutline.nodes.problems import NodeUnfitError, Purpose, grants_of
from cutline.nodes.programs import run_tool
from cutline.nodes.read_only import resume_fleet
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full, preview_full
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.create.initialise import initialise
from cutline.snapshots.ddl.dump import read_stored_ddl
from cutline.snapshots.records.proven_chains import read_chain
from cutline.storage.errors import SnapshotError
from cutline.storage.location import StoreLocation
from tests.commands.snapshot_runs import Ready, Runs, run_command
from tests.integration.documented_roles import (
    ADMIN,
    BACKUP,
    OWNER,
    as_role,
    await_standbys,
    forget,
    grant,
    restored,
    runs_on,
    shop_on,
    statements,
    two_versions,
)
from tests.integration.refusing import NoSpark, execute, refused

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LEFT = """
SELECT (SELECT count(*) FROM pg_publication WHERE pubname ^@ 'cutline_'),
       (SELECT count(*) FROM pg_replication_slots WHERE slot_type = 'logical')
"""
NEEDED = statements("create", "publish")
OPTIONAL = [one for one in statements("terminal") if one not in NEEDED]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("roles") / "fleet"
    with two_versions(directory) as servers, shop_on(servers, tmp_path_factory.mktemp("shop")) as fleet:
        yield fleet


@pytest.fixture
def backup(shop: Fleet, tmp_path: Path) -> Iterator[Fleet]:
    """The fleet with the role's dsns and a new store; there is no such role yet."""
    try:
        yield as_role(shop, BACKUP, tmp_path)
    finally:
        forget(shop, BACKUP)


def grant_all(shop: Fleet, granted: list[str]) -> None:
    grant([node.dsn for node in shop.primaries], granted)
    await_standbys(shop)


def statements_of(error: NodeUnfitError) -> list[str]:
    """The statements of the script, without those that are comments, and without psql's commands."""
    return [line for line in dict.fromkeys(error.hint.splitlines()) if not line.startswith(("-- ", "\\connect "))]


def lacking(fleet: Fleet) -> list[dict[str, str]]:
    """The grants that init refuses for, or those that it reports if it does not refuse."""
    try:
        return grants_of(initialise(fleet, Silent()).lacking)
    except NodeUnfitError as error:
        unfit = error
    grants: Any = unfit.details["grants"]
    # What other tasks need are comments.
    required = {one["statement"] for one in grants if one["for"] == Purpose.EVERYTHING}
    assert set(statements_of(unfit)) == required
    return [*grants]


def of_reading(granted: Iterable[str]) -> list[str]:
    return [one for one in granted if "SELECT" in one or "USAGE" in one or "pg_read_all_data" in one]


def test_a_role_with_grants_on_tables_is_asked_for_more_of_them(shop: Fleet, backup: Fleet) -> None:
    """Reading all data would undo what somebody has decided; it is named all the same, where nothing runs it."""
    grant_all(shop, [one for one in statements("create") if "pg_read_all_data" not in one] + statements("read-tables"))
    initialise(replace(backup, nodes=shop.nodes), Silent())
    primaries = [node.dsn for node in shop.primaries]
    many = "; ".join(f"CREATE TABLE later.t{n} (id serial PRIMARY KEY)" for n in range(6))
    grant(primaries, ['CREATE TABLE app."a.New" (id serial PRIMARY KEY)', f"CREATE SCHEMA later; {many}"])
    try:
        await_standbys(shop)
        with pytest.raises(NodeUnfitError, match=r'role backup can\'t read app\."a\.New"') as raised:
            initialise(backup, Silent())
        script = statements_of(raised.value)
        assert of_reading(script) == [
            f'GRANT USAGE ON SCHEMA "later" TO "{BACKUP}";',
            f'GRANT SELECT ON TABLE "app"."a.New" TO "{BACKUP}";',
            f'GRANT SELECT ON ALL TABLES IN SCHEMA "later" TO "{BACKUP}";',
            f'GRANT SELECT ON SEQUENCE "app"."a.New_id_seq" TO "{BACKUP}";',
            f'GRANT SELECT ON ALL SEQUENCES IN SCHEMA "later" TO "{BACKUP}";',
        ]
        (instead,) = [line for line in raised.value.hint.splitlines() if "pg_read_all_data" in line]
        assert instead.endswith(f': GRANT "pg_read_all_data" TO "{BACKUP}";')
        grant_all(shop, of_reading(script))
        assert not of_reading(one["statement"] for one in lacking(backup))
        # With what the page has for tables that will be created.
        every = f'ALTER DEFAULT PRIVILEGES FOR ROLE "{OWNER}" GRANT SELECT ON {{}} TO "{BACKUP}"'
        grant_all(shop, [every.format("TABLES"), every.format("SEQUENCES")])
        grant_all(shop, [f"SET ROLE {OWNER}; CREATE TABLE app.newest (id serial PRIMARY KEY); RESET ROLE"])
        assert not of_reading(one["statement"] for one in lacking(backup))
    finally:
        grant(primaries, ['DROP SCHEMA later CASCADE; DROP TABLE app."a.New"; DROP TABLE IF EXISTS app.newest'])


@pytest.mark.parametrize("left_out", NEEDED[1:] + OPTIONAL)
def test_init_names_exactly_the_grant_that_is_left_out(shop: Fleet, backup: Fleet, left_out: str) -> None:
    # The owner of the database has more than the page's statements grant: so its membership comes last.
    granted, purposes = (NEEDED, {Purpose.EVERYTHING}) if left_out in NEEDED else (NEEDED + OPTIONAL, set(Purpose))
    grant_all(shop, [one for one in granted if one != left_out])
    found = [one for one in lacking(backup) if one["for"] in purposes]
    concerned = {(node.id, "shop") for node in shop.primaries if runs_on(left_out, node.dsn)}
    assert {one["statement"] for one in found} == {left_out}
    # What the session in the database can't see, because there is none, is found in another database.
    places = {(one["node"], "shop" if "CONNECT" in left_out else one["database"]) for one in found}
    assert places == concerned
    grant_all(shop, [left_out])
    assert [one for one in lacking(backup) if one["for"] in purposes] == []


def test_every_command_runs_as_the_documented_role(shop: Fleet, backup: Fleet, spark: SparkSession) -> None:
    grant_all(shop, NEEDED + OPTIONAL)
    runs = Runs(backup, Ready(spark))
    runs.init()
    runs.full("first")
    for node in shop.primaries:
        execute(
            node.dsn, "UPDATE app.paid SET amount = 0 WHERE id < 5", "INSERT INTO app.secret VALUES (3, 'c')",
            f"SET ROLE {OWNER}; CREATE TABLE app.later (id int PRIMARY KEY); INSERT INTO app.later VALUES (1)",
        )  # fmt: skip
    runs.increment("first")
    create_increment(backup, CreateRequest("first", terminal=True), runs.spark, Silent())
    assert [one.was.snapshot for one in resume_fleet(backup, Silent()).results] == ["first"] * len(shop.primaries)
    runs.full("second")
    checked = runs.check_one("first")
    assert checked.conflicts == []
    assert runs.restore("first", restored(shop, "postgres")).rows == (50 + 3 + 1) * len(shop.primaries)
    # The publications go with the last snapshot.
    for words in (("list",), ("show", "first"), ("prune", "--keep-last", "1", "--yes"), ("gc", "--yes"),
                  ("delete", "second", "--force", "--yes")):  # fmt: skip
        code, document = run_command(backup, *words)
        assert code == 0, (words, document)
        assert not document.get("left_out_nodes"), document
    for node in shop.primaries:
        with psycopg.connect(node.dsn) as connection:
            assert connection.execute(LEFT).fetchone() == (0, 0)


def test_tasks_that_need_less_have_less(shop: Fleet, backup: Fleet, spark: SparkSession) -> None:
    by_superuser = Runs(replace(backup, nodes=shop.nodes), Ready(spark))
    by_superuser.init()
    by_superuser.full("first")
    by_superuser.full("second")
    # There is no such role: reading and checking need none.
    for words in (("list",), ("show", "first")):
        assert run_command(backup, *words)[0] == 0
    assert Runs(backup, Ready(spark)).check_one("first").conflicts == []
    grant_all(shop, statements("operate"))
    for words in (("prune", "--keep-last", "1", "--yes"), ("gc", "--yes")):
        code, document = run_command(backup, *words)
        assert code == 0, (words, document)
    code, document = run_command(backup, "delete", "second", "--force", "--yes")
    # The superuser owns them.
    assert (code, len(document["publications_left"])) == (3, len(shop.primaries))
    assert document["slots_left"] == []
    for node in shop.primaries:
        with psycopg.connect(node.dsn) as connection:
            publications, slots = connection.execute(LEFT).fetchone() or (0, -1)
            assert (publications > 0, slots) == (True, 0)


def test_without_publishing_a_role_creates_where_a_superuser_ran_init(
    shop: Fleet, backup: Fleet, spark: SparkSession
) -> None:
    grant_all(shop, statements("create"))
    with pytest.raises(NodeUnfitError, match="can't create publications"):
        initialise(backup, Silent())
    initialise(replace(backup, nodes=shop.nodes), Silent())
    named = lacking(backup)
    assert {one["for"] for one in named} == {Purpose.NEW_TABLES, Purpose.TERMINAL}
    assert f'GRANT "{OWNER}" TO "{BACKUP}";' in {one["statement"] for one in named if one["for"] == Purpose.NEW_TABLES}
    runs = Runs(backup, Ready(spark))
    runs.full("first")
    runs.increment("first")
    # A new table is more than the role may publish.
    with_later = [node.dsn for node in shop.primaries]
    grant(with_later, [f"SET ROLE {OWNER}; CREATE TABLE app.new (id int PRIMARY KEY); RESET ROLE"])
    with pytest.raises(SnapshotError) as raised:
        runs.increment("first")
    assert (raised.value.exit_code, raised.value.slug) == (3, "node-unfit")
    grant(with_later, ["DROP TABLE app.new"])
    grant(with_later, [one["statement"] for one in named if one["for"] == Purpose.NEW_TABLES])
    assert {one["for"] for one in lacking(backup)} == {Purpose.TERMINAL}


def test_grants_on_tables_are_enough_where_reading_all_data_is_too_much(
    shop: Fleet, backup: Fleet, spark: SparkSession
) -> None:
    grant_all(shop, [one for one in statements("create") if "pg_read_all_data" not in one] + statements("read-tables"))
    initialise(replace(backup, nodes=shop.nodes), Silent())
    primaries = [node.dsn for node in shop.primaries]
    mapping = f"USER MAPPING FOR {OWNER} SERVER elsewhere"
    grant(primaries, ["CREATE FOREIGN DATA WRAPPER nothing", "CREATE SERVER elsewhere FOREIGN DATA WRAPPER nothing"])
    try:
        # Passwords of other servers: nobody may read that catalog.
        grant(primaries, ["CREATE USER MAPPING FOR PUBLIC SERVER elsewhere OPTIONS (password 'unreadable')"])
        assert [one for one in lacking(backup) if one["for"] == Purpose.EVERYTHING] == []
        runs = Runs(backup, Ready(spark))
        runs.full("lean")
        grant(primaries, [f"CREATE {mapping}"])
        runs.increment("lean")
        assert runs.check_one("lean").conflicts == []
        store = backup.store.open()
        chain = read_chain(store, "lean")
        for node in shop.primaries:
            ddl = read_stored_ddl(store, chain, node.id).body
            assert (f'FOR "{OWNER}" SERVER "elsewhere"'.encode() in ddl, b"unreadable" in ddl) == (True, False)
        assert run_command(backup, "show", "lean")[0] == 0
    finally:
        grant(primaries, ["DROP FOREIGN DATA WRAPPER nothing CASCADE"])


def test_a_catalog_that_was_revoked_from_everybody_is_named(shop: Fleet, backup: Fleet, spark: SparkSession) -> None:
    grant_all(shop, statements("create"))
    initialise(replace(backup, nodes=shop.nodes), Silent())
    node, runs = shop.primaries[0], Runs(backup, Ready(spark))
    grant([node.dsn], [f'REVOKE pg_read_all_data FROM "{BACKUP}"', *statements("read-tables")])
    execute(node.dsn, "REVOKE SELECT ON pg_cast FROM PUBLIC")
    try:
        await_standbys(shop)
        with pytest.raises(NodeUnfitError, match=rf"node {node.id} rejected .*: permission denied for table pg_cast"):
            runs.full("none")
        (found,) = [one for one in lacking(backup) if one["for"] == Purpose.EVERYTHING]
        assert (found["node"], found["statement"]) == (node.id, f'GRANT SELECT ON pg_catalog.pg_cast TO "{BACKUP}";')
        grant([node.dsn], [found["statement"]])
        await_standbys(shop)
        assert [one for one in lacking(backup) if one["for"] == Purpose.EVERYTHING] == []
    finally:
        execute(node.dsn, "GRANT SELECT ON pg_cast TO PUBLIC")


def test_a_privilege_that_is_taken_away_meanwhile_is_no_bug(
    shop: Fleet, backup: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant_all(shop, NEEDED)
    (node, *_) = shop.primaries
    execute(node.dsn, "REVOKE EXECUTE ON FUNCTION pg_lock_status() FROM PUBLIC")
    try:
        monkeypatch.setattr("cutline.snapshots.create.initialise.find_node_problems", lambda *_: [])
        refused = f"node {node.id} rejected .*: permission denied for function pg_lock_status"
        with pytest.raises(NodeUnfitError, match=refused) as raised:
            initialise(backup, Silent())
        assert "docs/roles.md" in raised.value.hint
    finally:
        execute(node.dsn, "GRANT EXECUTE ON FUNCTION pg_lock_status() TO PUBLIC")


@pytest.mark.parametrize("function", ["pg_logical_emit_message", "pg_replication_slot_advance", "pg_lock_status"])
def test_functions_that_were_revoked_from_everybody_are_named(shop: Fleet, backup: Fleet, function: str) -> None:
    node = shop.primaries[0]
    grant_all(shop, NEEDED)
    with psycopg.connect(node.dsn) as connection:
        query = "SELECT oid::regprocedure::text FROM pg_proc WHERE proname = %s ORDER BY 1"
        signatures = [row[0] for row in connection.execute(query, (function,))]
    execute(node.dsn, *(f"REVOKE EXECUTE ON FUNCTION {one} FROM PUBLIC" for one in signatures))
    try:
        await_standbys(shop)
        found = [one["statement"] for one in lacking(backup) if one["for"] == Purpose.EVERYTHING]
        assert sorted(found) == [f'GRANT EXECUTE ON FUNCTION pg_catalog.{one} TO "{BACKUP}";' for one in signatures]
        grant([node.dsn], found)
        await_standbys(shop)
        assert [one for one in lacking(backup) if one["for"] == Purpose.EVERYTHING] == []
    finally:
        execute(node.dsn, *(f"GRANT EXECUTE ON FUNCTION {one} TO PUBLIC" for one in signatures))


def test_what_superusers_own_is_not_published_by_making_the_role_one(shop: Fleet, backup: Fleet) -> None:
    node = shop.primaries[0]
    grant_all(shop, NEEDED)
    execute(node.dsn, 'CREATE TABLE app."super\nDROP TABLE x" (id int PRIMARY KEY)')
    try:
        with pytest.raises(
            NodeUnfitError, match=r"can't publish tables owned by postgres[^;]*; a superuser can, with"
        ) as raised:
            initialise(backup, Silent())
        assert "let a superuser run: snapshot init" in raised.value.hint
        assert not [line for line in raised.value.hint.splitlines() if 'GRANT "postgres"' in line or line[:4] == "DROP"]
        # Not a statement.
        grants: Any = raised.value.details["grants"]
        actions: Any = raised.value.details["actions"]
        assert {one["for"] for one in grants} == {Purpose.TERMINAL}
        assert [(one["node"], one["for"]) for one in actions] == [(node.id, Purpose.EVERYTHING)]
    finally:
        execute(node.dsn, 'DROP TABLE app."super\nDROP TABLE x"')


@pytest.fixture
def unreadable(shop: Fleet) -> Iterator[None]:
    """On every primary, a superuser's large object, one of a role, and one that its owner may not read either."""
    for node in shop.primaries:
        execute(
            node.dsn,
            "SELECT lo_from_bytea(4711, 'x'), lo_create(4712), lo_create(4713)",
            f"ALTER LARGE OBJECT 4712 OWNER TO {ADMIN}; ALTER LARGE OBJECT 4713 OWNER TO {OWNER}",
            f"REVOKE ALL ON LARGE OBJECT 4713 FROM {OWNER}",
        )
    try:
        yield
    finally:
        for node in shop.primaries:
            execute(node.dsn, "SELECT lo_unlink(oid) FROM pg_largeobject_metadata")


def large_object_grants(node: Node) -> set[str]:
    with psycopg.connect(node.dsn) as connection:
        has_defaults = connection.info.server_version >= 180000
    later = statements("later-large-objects") if has_defaults else []
    member, unowned = f'GRANT "{ADMIN}" TO "{BACKUP}";', f'GRANT SELECT ON LARGE OBJECT 4713 TO "{BACKUP}";'
    return {*statements("large-objects"), *later, member, unowned}


@pytest.mark.usefixtures("unreadable")
def test_large_objects_that_the_role_may_not_read_are_named_by_init(shop: Fleet, backup: Fleet) -> None:
    grant_all(shop, NEEDED)
    found = [one for one in lacking(backup) if one["for"] == Purpose.LARGE_OBJECTS]
    for node in shop.primaries:
        granted = [one["statement"] for one in found if one["node"] == node.id]
        assert set(granted) == large_object_grants(node)
        # What also holds for large objects that are created later comes first.
        assert [one.startswith("GRANT SELECT ON LARGE OBJECT ") for one in granted] == sorted(
            one.startswith("GRANT SELECT ON LARGE OBJECT ") for one in granted
        )
        grant([node.dsn], granted)
    await_standbys(shop)
    assert [one for one in lacking(backup) if one["for"] == Purpose.LARGE_OBJECTS] == []


@pytest.mark.usefixtures("unreadable")
def test_init_refuses_unreadable_large_objects_if_the_fleet_file_includes_them(
    shop: Fleet, backup: Fleet, tmp_path: Path
) -> None:
    grant_all(shop, NEEDED)
    always = replace(backup, with_large_objects=True)
    with pytest.raises(NodeUnfitError, match="nodes s1, s2: role backup can't read large objects 4711") as raised:
        initialise(always, Silent())
    assert set(statements_of(raised.value)) == set().union(*map(large_object_grants, shop.primaries))
    run_script(shop, raised.value.hint, tmp_path)
    assert initialise(always, Silent()).lacking


@pytest.mark.usefixtures("unreadable")
def test_a_create_names_every_node_with_unreadable_large_objects(shop: Fleet, backup: Fleet, tmp_path: Path) -> None:
    grant_all(shop, NEEDED)
    initialise(backup, Silent())
    request = CreateRequest("large", large_objects=True)
    with refused(backup, "large-objects-unreadable") as errors:
        create_full(backup, request, NoSpark(), Silent())
    assert errors[0].message.count("large objects 4711") == len(shop.primaries) > 1
    assert "-- or leave large objects out: --no-large-objects" in errors[0].hint
    run_script(shop, errors[0].hint, tmp_path)
    assert preview_full(backup, request, Silent()).left_out
    # A superuser's large objects that are created later are readable, too, from version 18 on.
    for node in shop.primaries:
        execute(node.dsn, "SELECT lo_create(4714)")
    with pytest.raises(LargeObjectsUnreadableError) as raised:
        preview_full(backup, request, Silent())
    older = [node.id for node in shop.primaries if "ON LARGE OBJECTS" not in "".join(large_object_grants(node))]
    assert [f"node {node.id}: " in raised.value.message for node in shop.primaries] == [
        node.id in older for node in shop.primaries
    ]


def run_script(shop: Fleet, script: str, folder: Path) -> None:
    """Run a hint in psql, connected to another database."""
    path = folder / "script.sql"
    path.write_text(script)
    elsewhere = with_database(shop.primaries[0], "postgres").dsn
    run_tool("psql", "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", f"--file={path}", elsewhere)
    await_standbys(shop)


@pytest.mark.parametrize("name", ['back"up', "Back up; DROP ROLE x", "sichérung"])
def test_every_name_of_a_role_is_quoted(shop: Fleet, name: str, tmp_path: Path) -> None:
    quoted = '"' + name.replace('"', '""') + '"'
    fleet = replace(shop, store=StoreLocation(f"file://{tmp_path}/store"))
    nodes = tuple(replace(node, dsn=make_conninfo(node.dsn, user=name)) for node in shop.nodes)
    try:
        grant_all(shop, [f"CREATE ROLE {quoted} LOGIN NOINHERIT"])
        for _ in range(2):
            for one in lacking(replace(fleet, nodes=nodes)):
                grant([fleet.node(one["node"]).dsn], [one["statement"]])
            await_standbys(shop)
        assert lacking(replace(fleet, nodes=nodes)) == []
    finally:
        forget(shop, name)


def test_init_names_everything_at_once_and_its_statements_suffice(shop: Fleet, backup: Fleet) -> None:
    grant_all(shop, NEEDED[:2])
    found = lacking(backup)
    assert {one["statement"] for one in found} == {*NEEDED[2:], *OPTIONAL}
    assert {one["node"] for one in found} == {node.id for node in shop.primaries}
    for node in shop.primaries:
        grant_here = [one["statement"] for one in found if one["node"] == node.id]
        grant([node.dsn], grant_here)
    await_standbys(shop)
    assert lacking(backup) == []


def test_what_the_error_prints_below_its_hint_is_a_script_that_suffices(
    shop: Fleet, backup: Fleet, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    grant_all(shop, NEEDED[:2])
    for node in shop.primaries[1:]:
        grant([node.dsn], NEEDED[2:])
    await_standbys(shop)
    with pytest.raises(NodeUnfitError) as raised:
        initialise(backup, Silent())
    report(failure_of(raised.value), raised.value, json=False, verbose=False)
    _, _, script = capsys.readouterr().err.partition("hint:\n")
    assert set(statements_of(raised.value)) == set(NEEDED[2:])
    # It says itself where its statements go.
    run_script(shop, script, tmp_path)
    assert {one["for"] for one in lacking(backup)} == {Purpose.TERMINAL}
