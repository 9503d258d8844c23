"""`restore --role-map`: one role takes the place of another in all that it owns, grants or is granted."""

from __future__ import annotations

import pytest

from cutline.fleet.progress import Silent
from cutline.nodes.connections import NodeUnreachableError
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet, resume_restore
from cutline.restore.scope.scope import RestoreScope
from cutline.restore.targets.databases import RestoreCrashPoint
from tests.commands.snapshot_runs import Ready
from tests.commands.watching import Reached, Watching
from tests.integration.parts.two_places import (
    GRANTOR,
    NAME,
    OWNER,
    PLAIN,
    READER,
    ROLES,
    TwoPlaces,
    ask,
    await_sessions_over,
    quoted,
    renamed,
    roles_of,
    value,
)

OTHERS = {OWNER: 'new "owner"; SELECT 1/0; --', READER: "lésér = x", GRANTOR: "a\nb \\' $$ %I"}


def mapped(names: dict[str, str]) -> list[str]:
    return [word for a, b in names.items() for word in ("--role-map", f"{quoted(a)}={quoted(b)}")]


def test_other_roles_take_the_place_of_all(places: TwoPlaces) -> None:
    done = places.restore(*mapped(OTHERS), "--create-roles")
    assert sorted(done["roles_created"]) == sorted(f"s1: {one}" for one in OTHERS.values())
    assert roles_of(places.other) == renamed(places.truth, OTHERS)
    expressions = "SELECT pg_get_expr(polqual, polrelid) FROM pg_policy ORDER BY polname"
    assert ask(places.other.primaries[0].dsn, expressions) == ask(places.fleet.primaries[0].dsn, expressions)


def test_roles_may_change_places(places: TwoPlaces) -> None:
    names = {OWNER: READER, READER: OWNER}
    places.restore(*mapped(names), to=places.beside)
    assert roles_of(places.beside) == renamed(places.truth, names)
    owner = "SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'app.line'::regclass"
    assert value(places.beside, owner) == READER


def test_two_roles_may_become_one(places: TwoPlaces) -> None:
    """What the grantor granted, its owner then grants, once; and it is granted nothing by itself."""
    places.restore(*mapped({GRANTOR: READER}), to=places.beside, name=PLAIN)
    found = {row[1:] for row in roles_of(places.beside) if row[0] == "table" and row[1] == "app.customer"}
    assert ("app.customer", OWNER, OWNER, READER, "SELECT", "True") in found
    assert not [row for row in found if GRANTOR in row or row[2] == READER]
    policies = "SELECT count(*) FROM pg_policy WHERE polname = 'several' AND cardinality(polroles) = 1"
    assert value(places.beside, policies) == 1


@pytest.mark.parametrize("words", [["--dry-run"], []])
def test_what_would_be_ambiguous_is_refused_by_name(places: TwoPlaces, words: list[str]) -> None:
    refused = places.refuse(*mapped({GRANTOR: OWNER}), *words, to=places.beside)
    assert (refused["code"], refused["error"]) == (3, "role-unmappable")
    assert "DEFAULT PRIVILEGES FOR TABLES" in refused["message"]
    assert OWNER in refused["message"]
    refused = places.refuse(*mapped({GRANTOR: READER}), *words, to=places.beside)
    assert (refused["code"], refused["error"]) == (3, "role-unmappable")
    assert "USER MAPPING" in refused["message"]


def test_an_unknown_role_is_refused_and_one_that_is_missing(places: TwoPlaces) -> None:
    refused = places.refuse(*mapped({"ownr": OWNER}), to=places.beside)
    assert (refused["code"], "no role ownr" in refused["message"]) == (2, True)
    assert OWNER in refused["hint"]
    refused = places.refuse(*mapped({OWNER: "nobody yet"}), to=places.beside)
    assert (refused["code"], "nobody yet" in refused["message"]) == (3, True)
    refused = places.refuse(*mapped({OWNER: "日本"}), "--create-roles", to=places.beside)
    assert (refused["code"], "LATIN1" in refused["message"]) == (3, True)


@pytest.mark.parametrize("pair", ["a", "=b", "a=", "a=b=c", '"a=b', '"a"x=b', "a=public", "none=b"])
def test_what_is_no_pair_of_roles_is_refused(places: TwoPlaces, pair: str) -> None:
    refused = places.refuse("--role-map", pair)
    assert (refused["code"], refused["error"]) == (2, "usage")


def test_a_role_is_mapped_once(places: TwoPlaces) -> None:
    assert places.refuse("--role-map", "a=b", "--role-map", "a=c")["code"] == 2


@pytest.mark.parametrize("point", [RestoreCrashPoint.ROWS_LOADED, RestoreCrashPoint.CREATED])
def test_a_restore_that_is_resumed_has_the_same_roles(places: TwoPlaces, point: RestoreCrashPoint) -> None:
    def then(reached: Reached) -> None:
        if reached.point == str(point):
            raise NodeUnreachableError("node s1: it is gone", hint="bring it back")

    scope = RestoreScope(role_map=tuple(OTHERS.items()))
    request = RestoreRequest(NAME, create_roles=True, scope=scope)
    with pytest.raises(NodeUnreachableError):
        restore_fleet(plan_restore(places.fleet, places.other, request), Ready(places.spark), Watching(then))
    await_sessions_over(places.other)
    resume_restore(places.fleet, places.other, RestoreRequest(NAME), Ready(places.spark), Silent())
    assert roles_of(places.other) == renamed(places.truth, OTHERS)
    assert not {row[2] for row in roles_of(places.other)} & set(ROLES)
