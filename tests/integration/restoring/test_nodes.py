"""`restore --node`: one shard alone is contacted, locked, loaded and renamed, and ended where it is left unfinished."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from msgspec import structs
from msgspec.structs import replace

from cutline.fleet.config import Fleet, load_fleet
from cutline.nodes.connections import NodeUnreachableError, with_database
from cutline.nodes.left_out import LeftOut, LeftOutKind
from cutline.nodes.lock import FleetBusyError, lock_fleet
from cutline.nodes.sessions import open_sessions
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet
from cutline.restore.scope.scope import RestoreScope
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.snapshots.operations import signs
from tests.commands.at_terminal import answer
from tests.commands.in_process import run_as_text, run_here
from tests.commands.snapshot_runs import Ready, sorted_copies
from tests.commands.watching import Reached, Watching
from tests.integration.restoring.target_place import NAME, Place, old_databases, open_restores

OTHERS_GONE = "not restored: s1, s3; of transactions that span shards, only the part on s2 is restored"


@pytest.fixture
def lonely(place: Place, tmp_path: Path) -> Iterator[Fleet]:
    """The target, of which only s2 can be reached: who contacts another node fails."""
    with old_databases(place):
        yield load_fleet(without(place, tmp_path, "s1", "s3"))


def without(place: Place, folder: Path, *nodes: str) -> Path:
    text = place.target.path.read_text()
    for node in place.target.primaries:
        if node.id in nodes:
            dead = re.sub(r"host=[^&\"]*", f"host={folder}/{node.id}", node.dsn)
            assert dead != node.dsn
            assert node.dsn in text
            text = text.replace(node.dsn, dead)
    path = folder / "lonely.toml"
    path.write_text(text)
    return path


def test_one_shard_is_restored_and_no_other_is_contacted(place: Place, lonely: Fleet) -> None:
    words = ["restore", NAME, "--to", str(lonely.path), "--node", "s2", "--replace", "--yes"]
    code, planned = run_here(place.fleet, *words, "--dry-run")
    assert (code, [one["node"] for one in planned["nodes"]]) == (0, ["s2"]), planned
    assert OTHERS_GONE in planned["warnings"][0]
    code, done = run_here(place.fleet, *words, spark=place.spark)
    assert (code, [one["node"] for one in done["nodes"]]) == (0, ["s2"]), done
    assert any(OTHERS_GONE in text for text in done["warnings"])
    assert place.states() == ["old", "new", "old"]
    assert sorted_copies(place.dsns()[1]) == place.truth[1]
    assert (open_restores(place), len(place.databases())) == ([], 2)


def test_before_it_is_confirmed_the_plan_says_what_is_not_restored(place: Place, lonely: Fleet) -> None:
    words = ["restore", NAME, "--to", str(lonely.path), "--node", "s2", "--replace"]
    code, shown = answer(place.fleet, "n\n", *words)
    assert (code, place.states()) == (3, ["old"] * 3), shown
    planned = " ".join(shown.partition("replace these databases? [y/N]")[0].split())
    assert "s2: database shop will be set aside as shop_before_" in planned
    checked = run_as_text(place.fleet, *words, "--dry-run")
    assert planned.count(f"warning: {OTHERS_GONE}") == checked.count(f"warning: {OTHERS_GONE}\n") == 1


def test_the_report_on_one_shard_is_of_that_shard_alone(place: Place) -> None:
    sizes = {
        path.relative_to(place.stored): path.stat().st_size
        for path in (place.stored / "snapshots" / NAME).rglob("*")
        if "increments" not in path.parts and path.name != "snapshot.json" and path.is_file()
    }
    of_shard = [size for path, size in sizes.items() if "s2" in path.parts]
    left_out = tuple(LeftOut(node, LeftOutKind.UNLOGGED_TABLE, "public.x", "why") for node in ("s1", "s2"))
    for nodes, size, names in (((), sum(sizes.values()), ["s1", "s2"]), (("s2",), sum(of_shard), ["s2"])):
        plan = plan_restore(place.fleet, place.target, RestoreRequest(NAME, scope=RestoreScope(nodes=nodes)))
        assert plan.report().bytes == size
        (last,) = plan.chain.increments
        chain = replace(plan.chain, increments=(structs.replace(last, left_out=left_out),))
        assert [one.node for one in replace(plan, chain=chain).report().not_in_snapshot] == names
    assert 0 < sum(of_shard) < sum(sizes.values())


@pytest.mark.parametrize("how", ["resume", "abandon"])
def test_what_is_left_of_one_shard_is_ended_with_that_shard_alone(
    place: Place, lonely: Fleet, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = leave(place, lonely, RestoreCrashPoint.LOADING)
    assert f"snapshot restore-{how} {NAME} --node s2" in error.hint
    with monkeypatch.context() as later:
        # Its process is this one, and lives.
        later.setattr(signs, "DEAD_SECONDS", 0.0)
        listed = run_as_text(place.fleet, "list")
    assert f"snapshot --fleet {place.fleet.path} restore-{how} {NAME} --node s2" in listed
    to = ["--to", str(lonely.path)]
    code, refused = run_here(place.fleet, "restore", NAME, *to, "--node", "s2", "--replace", "--yes")
    assert (code, refused["error"]) == (3, "unfinished-restore")
    assert f"snapshot --fleet {place.fleet.path} restore-{how} {NAME} --node s2" in refused["hint"]
    confirmed = ("--yes",) * (how == "abandon")
    code, done = run_here(place.fleet, f"restore-{how}", NAME, *to, "--node", "s2", *confirmed, spark=place.spark)
    assert code == 0, done
    assert place.states() == ["old", "new" if how == "resume" else "old", "old"]
    assert open_restores(place) == []
    if how == "resume":
        assert sorted_copies(place.dsns()[1]) == place.truth[1]
        assert any(OTHERS_GONE in text for text in done["warnings"])


def test_without_node_the_record_says_which_shards_are_resumed(place: Place, lonely: Fleet) -> None:
    leave(place, lonely, RestoreCrashPoint.RENAMED)
    code, done = run_here(place.fleet, "restore-resume", NAME, "--to", str(place.target.path), spark=place.spark)
    assert (code, [one["node"] for one in done["nodes"]]) == (0, ["s2"]), done
    assert place.states() == ["old", "new", "old"]


def test_a_restore_of_all_shards_is_not_ended_on_one(place: Place) -> None:
    with old_databases(place):
        with pytest.raises(NodeUnreachableError):
            restore_until(place, place.target, RestoreCrashPoint.LOADING, RestoreScope())
        to = ["--to", str(place.target.path)]
        for how in (("restore-resume",), ("restore-abandon", "--yes")):
            code, refused = run_here(place.fleet, *how, NAME, *to, "--node", "s2")
            assert (code, refused["error"]) == (2, "usage")
            assert "also includes s1, s3, which this command does not name" in refused["message"]
        assert run_here(place.fleet, "restore-abandon", NAME, *to, "--yes")[0] == 0


@pytest.mark.parametrize("command", ["restore", "restore-resume"])
def test_an_unknown_node_is_refused_by_name(place: Place, command: str) -> None:
    code, refused = run_here(place.fleet, command, NAME, "--node", "s2", "--node", "s9")
    assert (code, refused["error"]) == (2, "usage")
    assert "--node s9" in refused["message"]
    assert "s1, s2, s3" in refused["hint"]


def test_a_chain_that_ends_on_one_node_leaves_slots_on_others_and_they_are_named(place: Place) -> None:
    """The slot of a chain is looked for by its name, so one of the target's own will do."""
    with old_databases(place), slot_on(place, "s2"):
        code, done = run_here(
            place.fleet, "restore", NAME, "--to", str(place.target.path), "--node", "s2", "--replace", "--yes",
            spark=place.spark,
        )  # fmt: skip
        assert (code, done["slots_dropped"]) == (0, ["s2: cutline_ended"]), done
        assert done["slots_left"] == ["s1: cutline_ended", "s3: cutline_ended"]


def test_only_the_shard_that_is_restored_is_locked(place: Place) -> None:
    """Another operation holds the lock of s1: a restore of s2 does not meet it, one of s1 does."""
    own = place.target
    with (
        old_databases(place),
        open_sessions(own, own.primaries[:1]) as sessions,
        lock_fleet(sessions, own.name, "cutline create daily ops@db7:4711"),
    ):
        leave(place, own, RestoreCrashPoint.LOCKED)
        with pytest.raises(FleetBusyError, match="create daily by ops@db7"):
            restore_until(place, own, RestoreCrashPoint.LOCKED, RestoreScope(nodes=("s1",)))


@contextmanager
def slot_on(place: Place, shard: str) -> Iterator[None]:
    (node,) = [one for one in place.target.primaries if one.id == shard]
    with psycopg.connect(node.dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_create_logical_replication_slot('cutline_ended', 'pgoutput')")
    try:
        yield
    finally:
        with psycopg.connect(with_database(node, "postgres").dsn, autocommit=True) as connection:
            query = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s"
            connection.execute(query, ("cutline_ended",))


def leave(place: Place, target: Fleet, point: RestoreCrashPoint) -> NodeUnreachableError:
    """Restore s2 until a node goes away at the point; return the error."""
    with pytest.raises(NodeUnreachableError) as raised:
        restore_until(place, target, point, RestoreScope(nodes=("s2",)))
    return raised.value


def restore_until(place: Place, target: Fleet, point: RestoreCrashPoint, scope: RestoreScope) -> None:
    def then(reached: Reached) -> None:
        if reached.point == str(point):
            raise NodeUnreachableError("node s2: it is gone", hint="bring it back")

    request = RestoreRequest(NAME, replace=True, scope=scope)
    restore_fleet(plan_restore(place.fleet, target, request), Ready(place.spark), Watching(then))
