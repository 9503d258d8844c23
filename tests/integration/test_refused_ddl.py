"""Statements that a target refuses: known before the rows where that is possible, and never the end of the rest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import cutline.nodes.programs as clients
import cutline.restore.run.loading
import cutline.snapshots.ddl.dump as dump_faults
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import load_fleet
from cutline.nodes.connections import NodeUnreachableError, with_database
from cutline.nodes.programs import run_tool
from cutline.nodes.watch import Watch
from cutline.restore.plan.plan import RestorePlan, plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.rows.load import LoadTarget
from cutline.restore.run.build import count_rows, finish_database
from cutline.restore.run.rehearsal import REMOVE_CAUSE
from cutline.restore.run.restore import restore_fleet
from cutline.restore.scope.scope import RestoreScope
from cutline.restore.targets.databases import RestoreCrashPoint
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots, sorted_copies
from tests.commands.watching import Reached, Watching
from tests.integration.own_shard import database_on
from tests.integration.refusing import execute
from tests.servers.fleets import fleet_of
from tests.servers.installed import require_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SOURCE, TARGET = "refusing", "refusing_again"
RESTORER, VIEWER = "refusing_restorer", "refusing_viewer"
COUNTED_SECONDS_MAX = 60
# Functions that hold on the source and on no other database: of a value, or in any case.
ROWS = (
    "CREATE TABLE t (id int PRIMARY KEY, v text)",
    "INSERT INTO t SELECT n, 'v' || n FROM generate_series(1, 100) AS n",
    "CREATE TABLE u (id int PRIMARY KEY, t int REFERENCES t)",
    "INSERT INTO u SELECT n, n FROM generate_series(1, 50) AS n",
)
AT_HOME = f"IF current_database() <> '{SOURCE}' THEN RAISE 'not at home'; END IF; RETURN v;"
OF_ROWS = (
    f"CREATE FUNCTION at_home(v text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS $$BEGIN {AT_HOME} END$$",
    "CREATE INDEX t_home ON t (at_home(v))",
    "COMMENT ON INDEX t_home IS 'at home'",
    "CREATE TABLE parted (id int, v text) PARTITION BY RANGE (id)",
    "CREATE TABLE parted_low PARTITION OF parted FOR VALUES FROM (0) TO (9)",
    "INSERT INTO parted VALUES (1, 'v')",
    "ALTER TABLE parted_low REPLICA IDENTITY FULL",
    "CREATE INDEX parted_home ON parted (at_home(v))",
)
# The server evaluates a constant when it reads the statement.
OF_STATEMENTS = (
    f"CREATE FUNCTION constant(v text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS $$BEGIN {AT_HOME} END$$",
    "CREATE TABLE w (id int PRIMARY KEY, v text)",
    "INSERT INTO w VALUES (1, 'v')",
    "CREATE INDEX w_constant ON w ((v || constant('x')))",
    "CREATE TABLE g (id int PRIMARY KEY, v text GENERATED ALWAYS AS (constant('x')) STORED)",
    "INSERT INTO g VALUES (1)",
)
# 17.10 and 18.4 can't attach the index of such a constraint that pg_dump of any version describes; 17.11 and 18.6 can.
OF_SERVERS = (
    "CREATE EXTENSION btree_gist",
    "CREATE TABLE booked (room int, during int4range, EXCLUDE USING gist (room WITH =, during WITH &&))"
    " PARTITION BY RANGE (room)",
    "CREATE TABLE booked_low PARTITION OF booked FOR VALUES FROM (0) TO (10)",
    "ALTER TABLE booked_low REPLICA IDENTITY FULL",
    "INSERT INTO booked VALUES (1, '[1,3)'), (1, '[3,5)')",
)
INDEXES = "SELECT indexname FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1"


@pytest.fixture
def own(shared_fleet: EmbeddedFleet, tmp_path: Path, spark: SparkSession) -> Iterator[Runs]:
    with runs_on(shared_fleet, tmp_path, spark) as runs:
        yield runs


@contextmanager
def runs_on(servers: EmbeddedFleet, tmp_path: Path, spark: SparkSession, options: str = "") -> Iterator[Runs]:
    with database_on(servers, SOURCE, tmp_path, options=options) as fleet:
        fleet = load_fleet(fleet.path)
        execute(fleet.primaries[0].dsn, *ROWS)
        with dropping_slots(fleet):
            runs = Runs(fleet, Ready(spark))
            runs.init()
            yield runs


@pytest.fixture
def there(own: Runs, tmp_path: Path) -> Path:
    return fleet_file_of_target(own, tmp_path)


def fleet_file_of_target(own: Runs, tmp_path: Path) -> Path:
    node = with_database(own.fleet.primaries[0], TARGET)
    path = tmp_path / "there.toml"
    path.write_text(f'name = "there"\nstore = "file://{tmp_path}/other"\n[[node]]\nid = "s1"\ndsn = "{node.dsn}"\n')
    return path


def restore(own: Runs, there: Path, *words: str) -> tuple[int, dict[str, Any]]:
    return run_here(own.fleet, "restore", "snp", "--to", str(there), *words, spark=own.spark.session())


def resume(own: Runs, there: Path, *words: str) -> tuple[int, dict[str, Any]]:
    return run_here(own.fleet, "restore-resume", "snp", "--to", str(there), *words, spark=own.spark.session())


def databases(own: Runs) -> list[str]:
    with psycopg.connect(make_conninfo(own.fleet.primaries[0].dsn, dbname="postgres")) as connection:
        query = "SELECT datname FROM pg_database WHERE datname ^@ %s ORDER BY 1"
        return [name for (name,) in connection.execute(query, (TARGET,))]


def indexes(dsn: str) -> list[str]:
    with psycopg.connect(dsn) as connection:
        return [name for (name,) in connection.execute(INDEXES)]


def test_what_only_rows_show_costs_nothing_but_itself(
    own: Runs, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named and left in a file; the operator mends it and resumes, or publishes without it, or undoes it all."""
    monkeypatch.chdir(tmp_path)
    execute(own.fleet.primaries[0].dsn, *OF_ROWS)
    own.full("snp")
    code, refused = restore(own, there)
    assert (code, refused["error"]) == (10, "ddl-refused"), refused
    assert "INDEX public.t_home: not at home" in refused["message"]
    found = {one["object"]: one for one in refused["details"]["refused"]}
    assert found['COMMENT public.INDEX "t_home"']["needs"] == "INDEX public.t_home"
    assert {one["needs"] for name, one in found.items() if not name.startswith(("COMMENT", "INDEX ATTACH"))} == {""}
    statements = Path(refused["details"]["file"]).read_text()
    assert 'CREATE INDEX "t_home" ON "public"."t" USING "btree" ("public"."at_home"("v"));' in statements
    assert "-- INDEX public.t_home: not at home" in statements
    # Nothing has its real name, and everything else is done.
    (left,) = databases(own)
    assert left.startswith(f"{TARGET}_restoring_")
    dsn = with_database(own.fleet.primaries[0], left).dsn
    assert sorted_copies(dsn).keys() >= sorted_copies(own.fleet.primaries[0].dsn).keys()
    assert [one for one in indexes(own.fleet.primaries[0].dsn) if one not in indexes(dsn)] == [
        "parted_low_at_home_idx", "t_home",
    ]  # fmt: skip
    hints = refused["hint"]
    for words in ("restore-resume snp", "restore-resume snp --allow-refused-ddl", "restore-abandon snp"):
        assert f" {words} --to {there}" in hints, hints

    # As long as nothing is mended, the same is refused again, and nothing else is tried.
    code, refused = resume(own, there)
    assert (code, {one["object"] for one in refused["details"]["refused"]}) == (10, set(found))
    execute(dsn, "CREATE OR REPLACE FUNCTION at_home(v text) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT v'")
    code, done = resume(own, there)
    assert (code, done["refused"]) == (0, []), done
    assert databases(own) == [TARGET]
    target = with_database(own.fleet.primaries[0], TARGET).dsn
    assert indexes(target) == indexes(own.fleet.primaries[0].dsn)
    assert sorted_copies(target) == sorted_copies(own.fleet.primaries[0].dsn)


@pytest.mark.parametrize("words", [("--allow-refused-ddl",), ()], ids=["from the beginning", "when it is resumed"])
def test_an_operator_may_do_without_what_is_refused(
    own: Runs, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    execute(own.fleet.primaries[0].dsn, *OF_ROWS)
    own.full("snp")
    code, done = restore(own, there, *words)
    assert code == 10, done
    if not words:
        code, done = resume(own, there, "--allow-refused-ddl")
    assert (code, done["schema"]) == (10, "cutline/restore/1"), done
    assert "INDEX public.t_home" in [one["object"] for one in done["refused"]]
    assert 'CREATE INDEX "t_home"' in Path(done["refused_file"]).read_text()
    assert databases(own) == [TARGET]
    target = with_database(own.fleet.primaries[0], TARGET).dsn
    assert "t_home" not in indexes(target)
    assert sorted_copies(target) == sorted_copies(own.fleet.primaries[0].dsn)
    code, history = run_here(own.fleet, "history")
    assert next(one["code"] for one in history["operations"] if one["kind"] == "restore") == 10


def test_the_file_has_what_an_earlier_process_was_refused(
    own: Runs, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That process had finished the database, and was gone before it wrote the file."""
    monkeypatch.chdir(tmp_path)
    execute(own.fleet.primaries[0].dsn, *OF_ROWS)
    own.full("snp")

    def fail(reached: Reached) -> None:
        if reached.point == str(RestoreCrashPoint.FINISHED):
            raise NodeUnreachableError("node s1: it is gone", hint="bring it back")

    request = RestoreRequest("snp", allow_refused_ddl=True)
    with pytest.raises(NodeUnreachableError):
        restore_fleet(plan_restore(own.fleet, load_fleet(there), request), own.spark, Watching(fail))
    code, done = resume(own, there)
    assert code == 10, done
    (index,) = (one for one in done["refused"] if one["object"] == "INDEX public.t_home")
    assert index["reason"] == "the server refused it in an earlier process of this restore"
    assert 'CREATE INDEX "t_home"' in index["statement"]
    # What it needs is there now.
    target = with_database(own.fleet.primaries[0], TARGET).dsn
    execute(target, "CREATE OR REPLACE FUNCTION at_home(v text) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT v'")
    run_tool("psql", "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", f"--file={done['refused_file']}", target)
    assert indexes(target) == indexes(own.fleet.primaries[0].dsn)


@pytest.mark.parametrize(
    ("given", "named", "statement"),
    [(OF_ROWS, "INDEX public.t_home", 'CREATE INDEX "t_home"'), (OF_STATEMENTS, "TABLE public.g", "CREATE TABLE")],
    ids=["of rows", "of statements"],
)
def test_what_was_refused_is_remembered_by_a_process_that_finds_the_database_finished(
    own: Runs,
    there: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: tuple[str, ...],
    named: str,
    statement: str,
) -> None:
    """The earlier process dropped the ledger, and was gone before it recorded that the database is finished."""
    monkeypatch.chdir(tmp_path)
    execute(own.fleet.primaries[0].dsn, *given)
    own.full("snp")

    def finish_and_fail(*arguments: Any, **options: Any) -> None:
        done = finish_database(*arguments, **options)
        assert done.is_finished
        raise NodeUnreachableError("node s1: it is gone", hint="bring it back")

    request = RestoreRequest("snp", allow_refused_ddl=True)
    with monkeypatch.context() as context:
        context.setattr("cutline.restore.run.loading.finish_database", finish_and_fail)
        with pytest.raises(NodeUnreachableError):
            restore_fleet(plan_restore(own.fleet, load_fleet(there), request), own.spark, Watching(lambda _: None))
    code, done = resume(own, there)
    assert code == 10, done
    (refused,) = (one for one in done["refused"] if one["object"] == named)
    assert refused["reason"] == "the server refused it in an earlier process of this restore"
    assert statement in Path(done["refused_file"]).read_text()
    assert databases(own) == [TARGET]


@pytest.mark.parametrize("is_resumed", [False, True], ids=["at once", "resumed"])
def test_a_grant_without_effect_is_named_where_it_is_done_without(
    own: Runs,
    there: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_resumed: bool,  # noqa: FBT001
) -> None:
    """An extension's functions belong to a superuser: the server only warns a role that may not grant them."""
    monkeypatch.chdir(tmp_path)
    source = own.fleet.primaries[0].dsn
    execute(source, "CREATE EXTENSION btree_gist", "GRANT EXECUTE ON FUNCTION cash_dist(money, money) TO pg_monitor")
    own.full("snp")
    execute(source, f"CREATE ROLE {RESTORER} LOGIN CREATEDB")
    there.write_text(there.read_text().replace("user=postgres", f"user={RESTORER}"))
    try:
        code, refused = restore(own, there, "--no-owner")
        assert (code, refused["error"]) == (3, "target-unfit"), refused
        assert "no privileges were granted for" in refused["message"]
        assert "--allow-refused-ddl" in refused["hint"]
        if is_resumed:
            request = RestoreRequest("snp", allow_refused_ddl=True, scope=RestoreScope(no_owner=True))
            with pytest.raises(NodeUnreachableError):
                restore_fleet(plan_restore(own.fleet, load_fleet(there), request), own.spark, Watching(lose_at_rows))
            code, done = resume(own, there)
        else:
            code, done = restore(own, there, "--no-owner", "--allow-refused-ddl")
        assert code == 10, done
        (grant,) = done["refused"]
        assert grant["reason"].startswith("no privileges were granted for")
        assert grant["statement"].startswith("GRANT ")
        # A superuser has the grant from the file.
        with Path(done["refused_file"]).open("r+") as file:
            text = file.read().replace(RESTORER, "postgres")
            file.seek(0)
            file.write(text)
            file.truncate()
        target = with_database(own.fleet.primaries[0], TARGET).dsn
        run_tool("psql", "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", f"--file={done['refused_file']}", target)
        with psycopg.connect(target) as connection:
            query = "SELECT proacl::text FROM pg_proc WHERE proname = 'cash_dist'"
            assert "pg_monitor=X" in str(connection.execute(query.encode()).fetchone())
    finally:
        for name in databases(own):
            execute(make_conninfo(source, dbname="postgres"), f"DROP DATABASE {name} WITH (FORCE)")
        execute(source, f"DROP ROLE {RESTORER}")


def test_a_view_that_policies_keep_empty_is_reported_with_a_statement_that_fills_it(own: Runs, there: Path) -> None:
    """Its owner sees only some rows; a session of the restore would rather fail than see fewer."""
    source, server = own.fleet.primaries[0].dsn, make_conninfo(own.fleet.primaries[0].dsn, dbname="postgres")
    execute(
        source,
        f"CREATE ROLE {VIEWER}",
        f"GRANT CREATE ON SCHEMA public TO {VIEWER}",
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY few ON t USING (id <= 7)",
        f"GRANT SELECT ON t TO {VIEWER}",
        f"SET ROLE {VIEWER}; CREATE MATERIALIZED VIEW seen AS SELECT id FROM t; RESET ROLE",
    )
    try:
        own.full("snp")
        code, done = restore(own, there)
        assert code == 0, done
        (warning,) = done["warnings"]
        what, _, statement = warning.rpartition(": ")
        assert what.startswith('node s1: materialized view "public"."seen" is not populated: '), warning
        assert "row-level security" in what
        target = with_database(own.fleet.primaries[0], TARGET).dsn
        execute(target, statement)
        for dsn in (source, target):
            with psycopg.connect(dsn) as connection:
                assert connection.execute("SELECT array_agg(id ORDER BY id) FROM seen").fetchone() == ([*range(1, 8)],)
    finally:
        for name in databases(own):
            execute(server, f"DROP DATABASE {name} WITH (FORCE)")
        execute(source, f"DROP OWNED BY {VIEWER}; DROP ROLE {VIEWER}")


def lose_at_rows(reached: Reached) -> None:
    if reached.point == str(RestoreCrashPoint.ROWS_LOADED):
        raise NodeUnreachableError("node s1: it is gone", hint="bring it back")


def test_what_statements_show_is_known_before_any_row_is_loaded(own: Runs, there: Path) -> None:
    execute(own.fleet.primaries[0].dsn, *OF_STATEMENTS)
    own.full("snp")
    for words in (("--dry-run",), ()):
        code, refused = restore(own, there, *words)
        assert (code, refused["error"]) == (3, "schema-load"), refused
        assert "INDEX public.w_constant: not at home" in refused["message"]
        assert refused["message"].endswith("no rows were loaded")
        assert f" restore snp --schema-only --increment 0 --allow-refused-ddl --to {there};" in refused["hint"]
        assert refused["hint"].endswith(f" restore snp --data-only --increment 0 --to {there}")
        assert databases(own) == []


def test_many_tables_with_few_rows_are_loaded_without_a_rehearsal(
    own: Runs, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is refused before the rows ends the restore there; the rest is refused like what only rows show."""
    monkeypatch.chdir(tmp_path)
    source = own.fleet.primaries[0].dsn
    *others, table, _ = OF_STATEMENTS
    execute(source, *others, table)
    own.full("snp")
    with monkeypatch.context() as context:
        context.setattr("cutline.restore.run.rehearsal.MANY_TABLES", 4)
        code, refused = restore(own, there)
        assert (code, refused["error"]) == (3, "schema-load"), refused
        assert [one["object"] for one in refused["details"]["refused"]] == ["TABLE public.g"]
        assert databases(own) == []

        execute(source, "DROP TABLE g")
        own.full("next")
        code, refused = run_here(own.fleet, "restore", "next", "--to", str(there), spark=own.spark.session())
        # The fourth table is gone.
        assert (code, refused["error"]) == (3, "schema-load"), refused
        context.setattr("cutline.restore.run.rehearsal.MANY_TABLES", 3)
        code, refused = run_here(own.fleet, "restore", "next", "--to", str(there), spark=own.spark.session())
        assert (code, [one["object"] for one in refused["details"]["refused"]]) == (10, ["INDEX public.w_constant"])
        assert REMOVE_CAUSE in refused["hint"]
        (left,) = databases(own)
        dsn = with_database(own.fleet.primaries[0], left).dsn
        execute(dsn, "CREATE OR REPLACE FUNCTION constant(v text) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT v'")
        words = ("restore-resume", "next", "--to", str(there))
        code, done = run_here(own.fleet, *words, spark=own.spark.session())
        assert (code, done["refused"]) == (0, []), done
    assert sorted_copies(with_database(own.fleet.primaries[0], TARGET).dsn) == sorted_copies(source)


def test_a_table_that_is_refused_is_left_out_with_its_rows(
    own: Runs, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    execute(
        own.fleet.primaries[0].dsn,
        *OF_STATEMENTS,
        "CREATE TABLE of_g (g int REFERENCES g)",
        "INSERT INTO of_g VALUES (1)",
        "ALTER TABLE of_g REPLICA IDENTITY FULL",
    )
    own.full("snp")
    code, done = restore(own, there, "--allow-refused-ddl")
    assert code == 10, done
    found = {one["object"]: one["needs"] for one in done["refused"]}
    assert found["TABLE public.g"] == "", found
    assert found["CONSTRAINT public.g g_pkey"] == found["FK CONSTRAINT public.of_g of_g_g_fkey"] == "TABLE public.g"
    rows = sorted_copies(own.fleet.primaries[0].dsn)
    del rows["public.g"]
    assert sorted_copies(with_database(own.fleet.primaries[0], TARGET).dsn) == rows


@pytest.mark.parametrize("major", [17, 18])
def test_a_fault_of_the_servers_release_is_known_before_any_row_is_loaded(
    major: int, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        fleet_of(tmp_path / "fleet", [require_server(major, icu=True)], schema=False) as servers,
        runs_on(servers, tmp_path, spark) as own,
    ):
        there = fleet_file_of_target(own, tmp_path)
        execute(own.fleet.primaries[0].dsn, *OF_SERVERS)
        own.full("snp")
        for words in (("--dry-run",), ()):
            code, refused = restore(own, there, *words)
            assert (code, refused["error"]) == (3, "schema-load"), refused
            assert "cannot attach index" in refused["message"]
            assert databases(own) == []
        code, done = restore(own, there, "--allow-refused-ddl")
        assert (code, [one["object"] for one in done["refused"]]) == (
            10, ["INDEX ATTACH public.booked_low_room_during_excl"],
        )  # fmt: skip
        target = with_database(own.fleet.primaries[0], TARGET).dsn
        assert sorted_copies(target) == sorted_copies(own.fleet.primaries[0].dsn)


@pytest.mark.parametrize(
    ("where", "is_resumed"),
    [(TARGET, False), (TARGET, True), (f"{TARGET}2", False)],
    ids=["both targets", "both targets, one of which an earlier process loaded", "one target"],
)
def test_rows_of_a_refused_table_are_not_expected_where_routes_send_them(
    own: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, *, is_resumed: bool
) -> None:
    """Their images are loaded by the same tasks as other tables' images."""
    monkeypatch.chdir(tmp_path)
    source = own.fleet.primaries[0]
    execute(
        source.dsn,
        "CREATE FUNCTION constant(v text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS"
        f" $$BEGIN IF current_database() ^@ '{where}' THEN RAISE 'not at home'; END IF; RETURN v; END$$",
        "CREATE TABLE g (id int PRIMARY KEY, n int, v text GENERATED ALWAYS AS (constant('x')) STORED)",
        "CREATE TABLE everywhere (id int PRIMARY KEY, v text GENERATED ALWAYS AS (constant('x')) STORED)",
        "INSERT INTO g SELECT generate_series(1, 10)",
        "INSERT INTO everywhere SELECT generate_series(1, 3)",
    )
    own.full("snp")
    execute(source.dsn, "UPDATE g SET n = id", "UPDATE t SET v = 'new' WHERE id <= 10")
    execute(source.dsn, "INSERT INTO everywhere VALUES (4)")
    own.increment("snp")
    there = tmp_path / "there.toml"
    targets = {f"t{number}": with_database(source, f"{TARGET}{number}").dsn for number in (1, 2)}
    nodes = (f'[[node]]\nid = "{target}"\ndsn = "{dsn}"\n' for target, dsn in targets.items())
    there.write_text(f'name = "there"\nstore = "file://{tmp_path}/other"\n{"".join(nodes)}')
    routes = ("*.everywhere=all", "*.u=hash(t)", "*=hash(id)")
    if is_resumed:
        plan = plan_restore(own.fleet, load_fleet(there), RestoreRequest("snp", routes=routes, allow_refused_ddl=True))
        with monkeypatch.context() as patch:
            interrupt_counting(patch, own, plan)
        code, done = resume(own, there)
    else:
        words = (word for route in routes for word in ("--route", route))
        code, done = restore(own, there, "--allow-refused-ddl", *words)
    assert code == 10, done
    refused = {(one["node"], one["object"]) for one in done["refused"] if one["object"].startswith("TABLE ")}
    lacking = [target for target in targets if f"{TARGET}{target[1:]}".startswith(where)]
    assert refused == {(target, f"TABLE public.{table}") for target in lacking for table in ("g", "everywhere")}
    found: dict[str, int] = {}
    for target, dsn in targets.items():
        with psycopg.connect(dsn) as connection:
            for table in ("t", "u") if target in lacking else ("t", "u", "g", "everywhere"):
                (count,) = connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchone() or (0,)
                found[table] = found.get(table, 0) + count
    of_g = found.pop("g", None)
    if len(lacking) == 2:
        assert (found, of_g) == ({"t": 100, "u": 50}, None)
    else:
        # The others have the hash of the target that lacks the table.
        assert found == {"t": 100, "u": 50, "everywhere": 4}
        assert of_g in range(1, 10)


def interrupt_counting(patch: pytest.MonkeyPatch, own: Runs, plan: RestorePlan) -> None:
    """Run the restore until the rows of t1 are counted, and those of t2 are not."""
    counted = threading.Event()

    def count(target: LoadTarget, watch: Watch) -> int:
        if target.node.id == "t2":
            assert counted.wait(COUNTED_SECONDS_MAX)
            raise NodeUnreachableError("node t2: it is gone", hint="bring it back")
        return count_rows(target, watch)

    def note(reached: Reached) -> None:
        if reached.point == str(RestoreCrashPoint.INDEXING):
            counted.set()

    patch.setattr(cutline.restore.run.loading, "count_rows", count)
    with pytest.raises(NodeUnreachableError, match="t2"):
        restore_fleet(plan, own.spark, Watching(note))


def test_a_refused_table_is_left_out_whatever_the_encoding_of_its_name(
    shared_fleet: EmbeddedFleet, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = "TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'"
    with runs_on(shared_fleet, tmp_path, spark, options) as own:
        there = fleet_file_of_target(own, tmp_path)
        source = own.fleet.primaries[0].dsn
        execute(
            make_conninfo(source, client_encoding="UTF8"),
            *OF_STATEMENTS,
            'CREATE SCHEMA "Maße"',
            'CREATE TABLE "Maße"."Größe" (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, n int,'
            " v text GENERATED ALWAYS AS (constant('x')) STORED)",
            'INSERT INTO "Maße"."Größe" (n) VALUES (1)',
            'CREATE TABLE "Maße"."Länge" (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY)',
            'INSERT INTO "Maße"."Länge" VALUES (DEFAULT)',
        )
        own.full("snp")
        code, done = restore(own, there, "--allow-refused-ddl")
        assert code == 10, done
        assert r"TABLE Ma\xdfe.Gr\xf6\xdfe" in [one["object"] for one in done["refused"]]
        target = with_database(own.fleet.primaries[0], TARGET).dsn
        with psycopg.connect(target, client_encoding="UTF8") as connection:
            query = "SELECT tablename FROM pg_tables WHERE schemaname = 'Maße'"
            assert connection.execute(query).fetchall() == [("Länge",)]
            insert = 'INSERT INTO "Maße"."Länge" VALUES (DEFAULT) RETURNING id'
            assert connection.execute(insert).fetchall() == [(2,)]


def test_what_only_a_newer_version_reads_is_told_with_a_remedy_that_works(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel's pg_dump 18 describes NOT NULL of an inherited column as 17 can't read it, here not corrected."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dump_faults, "INHERITED_QUERY", "SELECT 0::bigint, ''::bytea, ''::bytea, ''::bytea LIMIT 0")
    monkeypatch.setattr(clients, "installed_folders", list)
    server = require_server(17)
    with (
        fleet_of(tmp_path / "fleet", [server], schema=False) as servers,
        runs_on(servers, tmp_path, spark) as own,
    ):
        there = fleet_file_of_target(own, tmp_path)
        source = own.fleet.primaries[0].dsn
        execute(source, "CREATE TABLE p (a int)", "CREATE TABLE c (PRIMARY KEY (b), b int) INHERITS (p)")
        execute(source, "ALTER TABLE c ALTER a SET NOT NULL", "ALTER TABLE p REPLICA IDENTITY FULL")
        own.full("snp")
        code, refused = restore(own, there)
        assert (code, refused["error"]) == (3, "schema-load"), refused
        assert 'syntax error at or near "NOT"' in refused["message"]
        assert "[tools] postgresql" in refused["hint"]
        with own.fleet.path.open("a") as file:
            file.write(f'\n[tools]\npostgresql = "{server.programs}"\n')
        with dropping_slots(own.fleet):
            runs = Runs(load_fleet(own.fleet.path), own.spark)
            runs.full("anew")
            code, done = run_here(runs.fleet, "restore", "anew", "--to", str(there), spark=own.spark.session())
        assert code == 0, done
        target = with_database(own.fleet.primaries[0], TARGET).dsn
        with psycopg.connect(target) as connection:
            query = "SELECT attnotnull FROM pg_attribute WHERE attrelid = 'public.c'::regclass AND attname = 'a'"
            assert connection.execute(query).fetchone() == (True,)


def test_checks_that_read_each_others_tables_are_restored_in_the_steps_of_the_hint(
    own: Runs, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = own.fleet.primaries[0].dsn
    for table, other in (("a", "b"), ("b", "a")):
        body = f"RETURN EXISTS (SELECT FROM public.{other}); "
        execute(
            source,
            f"CREATE TABLE {table} (id int PRIMARY KEY)",
            f"INSERT INTO {table} VALUES (1)",
            f"CREATE FUNCTION has_{other}() RETURNS bool LANGUAGE plpgsql AS $$BEGIN {body} END$$",
        )
    for table, other in (("a", "b"), ("b", "a")):
        execute(source, f"ALTER TABLE {table} ADD CONSTRAINT {table}_checked CHECK (has_{other}())")
    own.full("snp")
    own.increment("snp")
    code, refused = restore(own, there, "--increment", "0", "--node", "s1", "--no-owner")
    assert code == 3
    steps = [f"--node s1 {words} --increment 0" for words in ("--schema-only --no-owner", "--data-only")]
    first, second = (f" restore snp {words} --to {there}" for words in steps)
    assert "drop it before the load, and add it again afterwards" in refused["hint"], refused
    assert f"{first}; change the table by hand; then: " in refused["hint"], refused
    assert refused["hint"].endswith(second), refused
    assert restore(own, there, *steps[0].split())[0] == 0
    target = with_database(own.fleet.primaries[0], TARGET).dsn
    execute(target, "ALTER TABLE a DROP CONSTRAINT a_checked", "ALTER TABLE b DROP CONSTRAINT b_checked")
    code, done = restore(own, there, *steps[1].split())
    assert code == 0, done
    execute(target, "ALTER TABLE a ADD CONSTRAINT a_checked CHECK (has_b())")
    execute(target, "ALTER TABLE b ADD CONSTRAINT b_checked CHECK (has_a())")
    assert sorted_copies(target) == sorted_copies(source)
