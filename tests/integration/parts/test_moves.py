"""`restore --group a.b=c.d`: a table is restored under another name, with its indexes and sequences."""

from __future__ import annotations

from typing import Any

import pytest

import cutline.restore.run.loading
from cutline.fleet.progress import Silent
from cutline.nodes.connections import NodeUnreachableError
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet, resume_restore
from cutline.restore.scope.scope import RestoreScope, TableMove
from cutline.restore.targets.databases import RestoreCrashPoint
from tests.commands.snapshot_runs import Ready
from tests.commands.watching import Reached, Watching
from tests.integration.parts.two_places import NAME, OWNER, TwoPlaces, ask, await_sessions_over, value
from tests.integration.refusing import execute

SCHEMA, TABLE = "ar.ché", 'k"=unde; --'
OTHER = '"ar.ché"."k""=unde; --"'
# All relations of a schema, with their owners.
RELATIONS = """
SELECT c.relname, c.relkind::text, pg_get_userbyid(c.relowner) FROM pg_class c
  JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = '{}' ORDER BY 1
"""


def relations(places: TwoPlaces, schema: str) -> dict[str, str]:
    return {name: kind for name, kind, _ in ask(places.beside.primaries[0].dsn, RELATIONS.format(schema))}


def assert_moved(places: TwoPlaces) -> None:
    dsn = places.beside.primaries[0].dsn
    assert value(places.beside, f"SELECT count(*) FROM {OTHER}") == 30
    assert relations(places, SCHEMA) == {
        TABLE: "r", "by_name": "i", "customer_pkey": "i", "customer_id_seq": "S",
    }  # fmt: skip
    assert {owner for *_, owner in ask(dsn, RELATIONS.format(SCHEMA))} == {OWNER}
    schema_owner = f"SELECT pg_get_userbyid(nspowner) FROM pg_namespace WHERE nspname = '{SCHEMA}'"
    assert value(places.beside, schema_owner) == OWNER
    assert value(places.beside, "SELECT to_regclass('app.customer') IS NULL")
    assert value(places.beside, "SELECT count(*) FROM app.names") == 30
    assert value(places.beside, "SELECT count(*) FROM app.line") == 0
    with_insert = f"INSERT INTO {OTHER} (name) VALUES ('new') RETURNING (id, spare)"
    assert value(places.beside, with_insert) == ("31", "3")


def test_a_table_is_restored_into_a_schema_that_was_missing(places: TwoPlaces) -> None:
    words = ["--group", f"app.customer={OTHER}"]
    planned = places.restore(*words, "--dry-run", to=places.beside)
    done = places.restore(*words, to=places.beside)
    assert planned["moved"] == done["moved"] == [f"s1: app.customer={OTHER}"]
    assert done["rows"] == 30
    assert_moved(places)


def test_a_name_that_is_free_only_afterwards_is_not_in_the_way(places: TwoPlaces) -> None:
    """Both schemas have an `invoice`; and two tables move, one of them within its schema."""
    words = ["--group", "sales.invoice=public.bill", "--group", "app.line=app.row", "--group", "public.i*"]
    done = places.restore(*words, to=places.beside)
    assert (done["rows"], value(places.beside, "SELECT count(*) FROM public.bill")) == (37, 20)
    assert value(places.beside, "SELECT one FROM public.invoice") == 1
    assert value(places.beside, "SELECT count(*) FROM app.row") == 7
    assert value(places.beside, "SELECT count(*) FROM pg_policy WHERE polrelid = 'app.row'::regclass") == 3
    assert value(places.beside, "SELECT count(*) FROM public.item") == 10


def test_a_partition_stays_one(places: TwoPlaces) -> None:
    places.restore("--group", "app.event_1=public.early", to=places.beside)
    assert value(places.beside, "SELECT count(*) FROM public.early") == 9
    assert value(places.beside, "SELECT count(*) FROM app.event") == 9
    execute(places.beside.primaries[0].dsn, "DELETE FROM public.early; INSERT INTO app.event VALUES (3, 'x')")
    assert value(places.beside, "SELECT count(*) FROM public.early") == 1


@pytest.mark.parametrize("more", [["--dry-run"], []])
@pytest.mark.parametrize(
    ("words", "taken"),
    [
        (["app.line=public.item"], "public.item"),
        (["app.line=public.invoice"], "public.invoice"),
        (["app.line=app.by_name"], "app.by_name"),
        (["app.line=app.customer_pkey"], "app.customer_pkey"),
        (["app.customer=sales.customer"], "sales.customer_id_seq"),
        (["app.customer=free.by_name"], "free.by_name"),
        (["app.line=free.x", "public.item=free.x"], "free.x"),
    ],
)  # fmt: skip
def test_a_name_that_is_taken_is_refused(places: TwoPlaces, words: list[str], taken: str, more: list[str]) -> None:
    refused = places.refuse(*(part for word in words for part in ("--group", word)), *more, to=places.beside)
    assert (refused["code"], refused["error"]) == (3, "table-in-the-way")
    assert f"the name {taken} is already taken" in refused["message"]


@pytest.mark.parametrize(
    "words",
    [
        ["app.event=app.other"], ["app.nothing=app.other"], ["app.*=app.other"], ["app.line=app.x*"], ["app.line=x"],
        ["app.line=app.x=app.y"], ["app.line="], ["app.line=app.line"], ["app.line=app.x", "app.line=app.y"],
    ],
)  # fmt: skip
def test_what_names_no_table_and_one_other_name_is_a_mistake(places: TwoPlaces, words: list[str]) -> None:
    refused = places.refuse(*(part for word in words for part in ("--group", word)), to=places.beside)
    assert (refused["code"], refused["error"]) == (2, "usage")


def test_a_name_that_would_be_shortened_is_refused(places: TwoPlaces) -> None:
    refused = places.refuse("--group", f"app.line=app.{'x' * 64}", to=places.beside)
    assert (refused["code"], "shorten" in refused["message"]) == (3, True)


@pytest.mark.parametrize("point", [RestoreCrashPoint.INDEXING, RestoreCrashPoint.FINISHED])
def test_a_restore_that_is_resumed_ends_with_the_other_name(places: TwoPlaces, point: RestoreCrashPoint) -> None:
    def then(reached: Reached) -> None:
        if reached.point == str(point):
            raise NodeUnreachableError("node s1: it is gone", hint="bring it back")

    scope = RestoreScope(moves=(TableMove("app", "customer", SCHEMA, TABLE),))
    plan = plan_restore(places.fleet, places.beside, RestoreRequest(NAME, scope=scope))
    with pytest.raises(NodeUnreachableError):
        restore_fleet(plan, Ready(places.spark), Watching(then))
    await_sessions_over(places.beside)
    resume_restore(places.fleet, places.beside, RestoreRequest(NAME), Ready(places.spark), Silent())
    assert_moved(places)


def test_a_restore_that_ends_right_after_the_renaming_is_resumed(
    places: TwoPlaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record says "indexing", but nothing is left to be done."""
    finish = cutline.restore.run.loading.finish_database

    def finish_and_lose(*given: Any, **more: Any) -> None:
        finish(*given, **more)
        raise NodeUnreachableError("node s1: it is gone", hint="bring it back")

    monkeypatch.setattr(cutline.restore.run.loading, "finish_database", finish_and_lose)
    scope = RestoreScope(moves=(TableMove("app", "customer", SCHEMA, TABLE),))
    plan = plan_restore(places.fleet, places.beside, RestoreRequest(NAME, scope=scope))
    with pytest.raises(NodeUnreachableError):
        restore_fleet(plan, Ready(places.spark), Silent())
    monkeypatch.undo()
    await_sessions_over(places.beside)
    resume_restore(places.fleet, places.beside, RestoreRequest(NAME), Ready(places.spark), Silent())
    assert_moved(places)


def test_it_excludes_a_restore_without_rows(places: TwoPlaces) -> None:
    assert places.refuse("--group", "app.line=app.x", "--schema-only", to=places.beside)["code"] == 2
