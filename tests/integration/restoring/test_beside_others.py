"""A restore and the fleet's other operations: who waits, which chains end, and what is set aside."""

from __future__ import annotations

import psycopg
import pytest

from cutline.cli.output.confirmation import PlanChangedError
from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.nodes.lock import FleetBusyError, lock_fleet
from cutline.nodes.sessions import open_sessions
from cutline.restore.plan.plan import plan_restore
from cutline.restore.run.restore import restore_fleet
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.storage.errors import SnapshotError
from tests.commands.in_process import run_as_text, run_here
from tests.commands.snapshot_runs import Ready
from tests.commands.watching import Reached, Watching
from tests.integration.restoring.ending import REQUEST, abandon, restore_left
from tests.integration.restoring.target_place import (
    DATABASE,
    NAME,
    SHARDS,
    Place,
    assert_old,
    assert_restored,
    await_sessions_over,
    old_databases,
)


def test_a_restore_and_a_create_of_one_fleet_exclude_each_other(place: Place) -> None:
    own = place.target
    with old_databases(place):
        with (
            open_sessions(own, own.primaries) as sessions,
            lock_fleet(sessions, own.name, "cutline create daily ops@db7:4711"),
            pytest.raises(FleetBusyError, match="create daily by ops@db7"),
        ):
            restore_fleet(plan_restore(place.fleet, own, REQUEST), Ready(place.spark), Silent())
        refused: list[SnapshotError] = []

        def then(reached: Reached) -> None:
            if reached.point == str(RestoreCrashPoint.LOCKED):
                with open_sessions(own, own.primaries) as sessions, pytest.raises(FleetBusyError) as raised:
                    lock_fleet(sessions, own.name).__enter__()
                refused.append(raised.value)

        restore_fleet(plan_restore(place.fleet, own, REQUEST), Ready(place.spark), Watching(then))
        assert [one.details["command"] for one in refused] == ["restore"]
        assert_restored(place)


def test_what_a_restore_ends_is_named_before_anything_is_changed(place: Place) -> None:
    """The source is the target: its chain ends."""
    plan, named = plan_restore(place.fleet, place.fleet, REQUEST), list[str]()

    def refuse(lines: list[str]) -> None:
        named.extend(lines)
        raise PlanChangedError("it is another")

    with pytest.raises(PlanChangedError):
        restore_fleet(plan, Ready(place.spark), Silent(), refuse)
    assert "chain daily will end: it will get no more increments" in named
    assert any(line.startswith("s1: database bank will be set aside as bank_before_") for line in named)
    assert [node.dsn for node in place.fleet.primaries if read_old_names(node.dsn)] == []


def read_old_names(dsn: str) -> list[str]:
    with psycopg.connect(dsn) as connection:
        found = connection.execute("SELECT datname FROM pg_database WHERE datname ^@ 'bank_'").fetchall()
    return [name for (name,) in found]


def test_databases_that_were_put_aside_are_counted_until_they_are_dropped(place: Place) -> None:
    with old_databases(place):
        restore_fleet(plan_restore(place.fleet, place.target, REQUEST), Ready(place.spark), Silent())
        names = {name for name in place.databases() if name != DATABASE}
        assert len(names) == 1
        listed = run_here(place.target, "list")[1]
        assert [(one["node"], one["database"]) for one in listed["put_aside"]] == [
            (node.id, *names) for node in place.target.primaries
        ]
        assert all(one["bytes"] > 1_000_000 for one in listed["put_aside"])
        (line,) = [line for line in run_as_text(place.target, "list").splitlines() if "set aside by a restore" in line]
        assert all(f" on {node.id}" in line for node in place.target.primaries)
        discarding = ("restore-discard", "--to", str(place.target.path))
        code, shown = run_here(place.fleet, *discarding, "--dry-run")
        assert (code, shown["discarded"]) == (0, listed["put_aside"])
        assert {name for name in place.databases() if name != DATABASE} == names
        code, refused = run_here(place.fleet, *discarding)
        assert (code, refused["error"]) == (2, "confirmation-missing")
        assert {name for name in place.databases() if name != DATABASE} == names
        code, dropped = run_here(place.fleet, *discarding, "--yes")
        assert (code, dropped["discarded"]) == (0, listed["put_aside"])
        assert place.databases() == {DATABASE}
        assert place.states() == ["new"] * SHARDS


def test_a_database_that_a_restore_holds_is_named_by_other_commands(place: Place) -> None:
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.RENAMED)
        for node in place.target.primaries:
            with psycopg.connect(with_database(node, "postgres").dsn, autocommit=True) as connection:
                connection.execute(f"ALTER DATABASE {DATABASE} WITH ALLOW_CONNECTIONS false")
        code, document = run_here(place.target, "create", "new")
        assert code in (3, 6)
        assert document["hint"].endswith(
            f"to see the commands that finish or undo it, run: snapshot --fleet {place.target.path} list"
        )
        await_sessions_over(place)
        code, refused = run_here(place.fleet, "restore", NAME, "--to", str(place.target.path), "--replace", "--yes")
        closed = [f"database {DATABASE} on {node.id}" for node in place.target.primaries]
        assert (
            code,
            f"; nobody can connect to {', '.join(closed)} until it is resumed or undone" in refused["message"],
        ) == (
            3,
            True,
        )
        assert abandon(place).opened == closed
        assert_old(place)
