"""Restores with routes that set databases aside, that are undone, and that a role runs which is no superuser."""

from __future__ import annotations

from dataclasses import replace

import psycopg
import pytest
from msgspec import structs
from psycopg.conninfo import make_conninfo

from cutline.fleet.progress import Silent
from cutline.nodes.connections import NodeUnreachableError, with_database
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet
from cutline.restore.scope.scope import RestoreScope
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.restore.targets.target import TargetUnfitError
from cutline.restore.unfinished.undoing import abandon_restore
from tests.commands.watching import Reached, Watching
from tests.integration.refusing import execute
from tests.integration.routing.routed_place import SINGLE, RoutedPlace

# Of 300 accounts and 100 badges of the first shard.
REQUEST = RestoreRequest(
    SINGLE, groups=("*.account", "*.badge"), routes=("*.account=range(id, 0, 101)", "*=node('t2')"), replace=True
)
ROWS = [(100, 0), (200, 100)]
RESTORER = "routed_restorer"


def counts(place: RoutedPlace, number: int) -> tuple[object, ...]:
    (found,) = place.query(number, "SELECT (SELECT count(*) FROM account), (SELECT count(*) FROM badge)")
    return found


def test_what_was_put_aside_comes_back_if_a_restore_with_routes_is_undone(place: RoutedPlace) -> None:
    target = place.target(2)
    for node in target.primaries:
        execute(with_database(node, "postgres").dsn, "CREATE DATABASE elsewhere")
        execute(node.dsn, "CREATE TABLE old AS SELECT 1 AS one")

    def then(reached: Reached) -> None:
        if (reached.point, reached.count) == (RestoreCrashPoint.RENAMED, 2):
            raise NodeUnreachableError("node t2: it is gone", hint="bring it back")

    fleet = place.single.fleet
    with pytest.raises(NodeUnreachableError):
        restore_fleet(
            plan_restore(fleet, target, structs.replace(REQUEST, groups=())), place.runs.spark, Watching(then)
        )
    assert [counts(place, number) for number in (1, 2)] == ROWS
    report = abandon_restore(fleet, target, SINGLE, print, Silent())
    assert sorted(report.put_back) == ["t1: elsewhere", "t2: elsewhere"]
    assert place.databases() == {"elsewhere"}
    assert [place.query(number, "SELECT one FROM old") for number in (1, 2)] == [[(1,)]] * 2


def test_a_role_that_is_no_superuser_divides_rows(place: RoutedPlace) -> None:
    """What superusers own it restores only as its own; the rows go where they go for a superuser."""
    servers = place.servers.dsns()[:2]
    target = place.target(2)
    theirs = replace(
        target,
        nodes=tuple(replace(node, dsn=make_conninfo(node.dsn, user=RESTORER)) for node in target.nodes),
    )
    request = structs.replace(REQUEST, replace=False)
    try:
        for dsn in servers:
            execute(dsn, f"CREATE ROLE {RESTORER} LOGIN CREATEDB")
        with pytest.raises(
            TargetUnfitError, match="only a superuser can restore objects that superusers own"
        ) as raised:
            restore_fleet(plan_restore(place.single.fleet, theirs, request), place.runs.spark, Silent())
        assert place.databases() == set()
        mapped = f"postgres={RESTORER}"
        assert f"--role-map {mapped}" in raised.value.hint
        own = structs.replace(request, scope=RestoreScope(role_map=(("postgres", RESTORER),)))
        report = restore_fleet(plan_restore(place.single.fleet, theirs, own), place.runs.spark, Silent())
        assert [counts(place, number) for number in (1, 2)] == ROWS
        assert report.rows == sum(map(sum, ROWS))
        for number in (1, 2):
            owners = "SELECT DISTINCT tableowner FROM pg_tables WHERE schemaname = 'public'"
            assert place.query(number, owners) == [(RESTORER,)]
    finally:
        place.drop_targets()
        for dsn in servers:
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute(f"DROP ROLE {RESTORER}".encode())
