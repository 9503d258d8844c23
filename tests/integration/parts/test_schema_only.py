"""`restore --schema-only`: the DDL of the databases, and nothing else."""

from __future__ import annotations

import pytest

from cutline.fleet.progress import Silent
from cutline.nodes.connections import NodeUnreachableError
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet, resume_restore
from cutline.restore.scope.scope import RestoreScope
from cutline.restore.targets.databases import RestoreCrashPoint
from tests.commands.in_process import run_here
from tests.commands.watching import Reached, Watching
from tests.integration.parts.two_places import PLAIN, TwoPlaces, ask, await_sessions_over, databases, value
from tests.integration.refusing import NoSpark
from tests.tables.encoded_tables import dump_ddl

TABLES = ("public.item", "sales.invoice", "app.customer", "app.purchase", "app.line", "app.event")


def assert_only_ddl(places: TwoPlaces) -> None:
    dsn = places.beside.primaries[0].dsn
    assert dump_ddl(dsn) == dump_ddl(places.fleet.primaries[0].dsn)
    for table in TABLES:
        assert ask(dsn, f"SELECT count(*) FROM {table}") == [(0,)]
    assert ask(dsn, "SELECT last_value, is_called FROM app.numbers") == [(1, False)]
    assert ask(dsn, "SELECT last_value, is_called FROM app.customer_id_seq") == [(1, False)]
    assert value(places.beside, "SELECT count(*) FROM pg_largeobject_metadata") == 0
    assert value(places.beside, "SELECT relispopulated FROM pg_class WHERE relname = 'total'") is False


def test_the_whole_ddl_is_restored_without_rows_and_without_spark(places: TwoPlaces) -> None:
    planned = run_here(places.fleet, *words(places), "--dry-run")
    assert planned[0] == 0
    assert databases(places.beside) == set()
    code, done = run_here(places.fleet, *words(places))
    assert (code, done["rows"]) == (0, 0)
    assert planned[1]["left_out"] == done["left_out"]
    assert "all rows, and the values of all sequences" in done["left_out"]
    assert 'rows of materialized view "app"."total" on s1' in done["left_out"]
    assert "1 large objects on s1" in done["left_out"]
    assert_only_ddl(places)
    code, done = run_here(places.fleet, *words(places), "--replace", "--yes")
    assert (code, len(done["aside"])) == (0, 1)
    assert_only_ddl(places)


@pytest.mark.parametrize("point", [RestoreCrashPoint.LOADING, RestoreCrashPoint.INDEXING])
def test_what_is_left_of_it_is_resumed_without_rows(places: TwoPlaces, point: RestoreCrashPoint) -> None:
    def then(reached: Reached) -> None:
        if reached.point == str(point):
            raise NodeUnreachableError("node s1: it is gone", hint="bring it back")

    request = RestoreRequest(PLAIN, scope=RestoreScope(schema_only=True))
    with pytest.raises(NodeUnreachableError):
        restore_fleet(plan_restore(places.fleet, places.beside, request), NoSpark(), Watching(then))
    await_sessions_over(places.beside)
    resume_restore(places.fleet, places.beside, RestoreRequest(PLAIN), NoSpark(), Silent())
    assert_only_ddl(places)


def test_it_excludes_what_names_rows(places: TwoPlaces) -> None:
    for more in (["--group", "public.*"], ["--schema", "app"]):
        code, refused = run_here(places.fleet, *words(places), *more)
        assert (code, refused["error"]) == (2, "usage")
        assert more[0] in refused["message"]


def words(places: TwoPlaces) -> list[str]:
    return ["restore", PLAIN, "--to", str(places.beside.path), "--schema-only"]
