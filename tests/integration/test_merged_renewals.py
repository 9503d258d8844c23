"""Merges of chains whose copies begin again: restores of increments and exact times, and copies in a second store.

Expected rows come from the live servers (COPY) while nothing is written, and times from their clocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.snapshots.records.commit import Increment
from cutline.snapshots.records.operation_records import VALID
from cutline.snapshots.records.proven_chains import cut_time, read_chain, read_commit
from tests.commands.changing_fleet import ChangingFleet, changing_fleet
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Runs, configure_fleet, sorted_copies
from tests.servers.dealt import start_fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RENEWED, LEFT_OUT = "s1-b1", "s2-b1"
MERGED_AT = 4


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedFleet, EmbeddedFleet]]:
    folder = tmp_path_factory.mktemp("merged")
    try:
        fleet = start_fleet(folder / "fleet", shards=2, backups=1, settings={"track_commit_timestamp": "on"})
        target = start_fleet(folder / "target", shards=2, backups=0, like_shared=True)
        yield fleet, target
    finally:
        stop_fleet(folder / "fleet", delete=True)
        stop_fleet(folder / "target", delete=True)


@pytest.fixture
def place(servers: tuple[EmbeddedFleet, EmbeddedFleet], tmp_path: Path, spark: SparkSession) -> Iterator[ChangingFleet]:
    with changing_fleet(*servers, tmp_path, spark) as found:
        try:
            yield found
        finally:
            found.start(LEFT_OUT)


@dataclass
class Moments:
    """Times at which nothing was written, with the rows of the shards."""

    place: ChangingFleet
    at: dict[str, datetime] = field(default_factory=dict)
    states: dict[str, list[dict[str, bytes]]] = field(default_factory=dict)

    def note(self, name: str) -> None:
        self.place.write()
        with psycopg.connect(self.place.fleet.node("s1").dsn, autocommit=True) as connection:
            (now,) = connection.execute("SELECT clock_timestamp() FROM pg_sleep(0.05)").fetchone() or (datetime.min,)
            connection.execute("SELECT pg_sleep(0.05)")
        self.at[name], self.states[name] = now.astimezone(UTC), self.place.live_state()
        self.place.write()

    def between(self, name: str) -> tuple[int, int]:
        """Plan a restore to the time; return the increments around it, which `show --at` names, too."""
        request = RestoreRequest("chain", replace=True, at=self.at[name], exact=True)
        exact = plan_restore(self.place.fleet, self.place.target, request).exact
        assert exact is not None
        code, shown = run_here(self.place.fleet, "show", "chain", "--at", self.at[name].isoformat())
        assert (code, shown["exact"]["before"], shown["exact"]["after"]) == (
            0,
            exact.before.increment,
            exact.after.increment,
        )
        return exact.before.increment, exact.after.increment

    def refusal(self, name: str) -> dict[str, Any]:
        """Return the error with which both a restore to the time and `show --at` are refused."""
        at = self.at[name].isoformat()
        words = ["restore", "chain", "--to", str(self.place.target.path), "--at", at, "--exact", "--dry-run"]
        code, refused = run_here(self.place.fleet, *words)
        assert code == 3, refused
        code, shown = run_here(self.place.fleet, "show", "chain", "--at", at)
        assert (code, shown["error"]) == (3, refused["error"])
        return dict(refused)

    def restore(self, name: str, runs: Runs | None = None) -> None:
        target = self.place.target
        (runs or self.place.runs).restore("chain", target, at=self.at[name], exact=True)
        assert [sorted_copies(node.dsn) for node in target.primaries] == self.states[name], name


def take(place: ChangingFleet) -> Increment:
    place.write()
    commit = place.increment()
    assert isinstance(commit, Increment)
    return commit


def prepare(place: ChangingFleet, gid: str, key: int) -> None:
    for node in place.live:
        place.execute(node, f"BEGIN; INSERT INTO seen VALUES ({key}, '{gid}'); PREPARE TRANSACTION '{gid}'")


def decide(place: ChangingFleet, gid: str, verb: str) -> None:
    for node in place.live:
        place.execute(node, f"{verb} PREPARED '{gid}'")


def make_chain(place: ChangingFleet) -> Moments:
    """A chain of seven increments, around 4 of which a standby is left out; copies begin again at 2, 3 and 6."""
    moments = Moments(place)
    place.runs.full("chain")
    place.states[0] = place.live_state()
    moments.note("before the gap")
    take(place)
    moments.note("in the gap")
    place.drop_slot("s1")
    assert take(place).renewed.keys() == {"s1"}
    moments.note("after the gap")
    place.rebuild(RENEWED)
    assert take(place).renewed.keys() == {RENEWED}
    prepare(place, "commit-later", 9001)
    prepare(place, "roll-back-later", 9002)
    moments.note("before the merge")
    place.stop(LEFT_OUT)
    assert take(place).absent.keys() == {LEFT_OUT}
    moments.note("undecided")
    decide(place, "commit-later", "COMMIT")
    moments.note("after the merge")
    place.start(LEFT_OUT)
    assert not take(place).absent
    decide(place, "roll-back-later", "ROLLBACK")
    moments.note("in the later gap")
    place.drop_slot("s1")
    place.drop_slot(RENEWED)
    assert take(place).renewed.keys() == {"s1", RENEWED}
    moments.note("after the later gap")
    take(place)
    return moments


def merge(place: ChangingFleet, *words: str) -> dict[str, Any]:
    code, document = run_here(place.fleet, "merge", "chain", *words, spark=place.runs.spark.running)
    assert code == 0, document
    return dict(document)


def copy_into(place: ChangingFleet, name: str) -> ChangingFleet:
    """Copy the chain into a second store, and return the fleet that is restored from there."""
    folder = place.folder / name
    folder.mkdir()
    second = configure_fleet(place.servers, folder / "second.toml", f"file://{folder}/store")
    code, copied = run_here(place.fleet, "copy", "chain", "--to", str(second.path))
    assert (code, copied["behind"]) == (0, 0), copied
    return ChangingFleet(place.servers, place.target, Runs(second, place.runs.spark), folder, place.states)


def segments_of(place: ChangingFleet, node: str) -> dict[str, int]:
    """The number of a node's segments in the store, by the operation that began its archive."""
    folders = [path for path in (place.folder / "store/snapshots/chain/wal" / node).iterdir() if path.is_dir()]
    return {path.name: len([*path.iterdir()]) for path in folders if [*path.iterdir()]}


@pytest.mark.timeout(1200)
def test_a_merge_between_copies_that_begin_again(place: ChangingFleet) -> None:
    moments = make_chain(place)
    store = place.fleet.store.open()
    merge(place, "--to", str(MERGED_AT))
    assert place.check().result == VALID
    place.check_restores(3, 4, 5, 6)
    place.check_restores_without("s1", 3, 4, 5, 6)

    moments.at["at the merge"] = cut_time(read_commit(store, "chain", MERGED_AT))
    assert moments.between("before the gap") == (0, 1)
    assert moments.between("after the gap") == (2, 3)
    assert moments.between("before the merge") == (3, 4)
    for name in ("in the gap", "in the later gap"):
        refused = moments.refusal(name)
        assert (refused["error"], refused["details"]["nodes"]) == ("exact-time", ["s1"])
    moments.restore("before the merge")
    check_later(moments)

    second = copy_into(place, "second")
    assert second.check().result == VALID
    second.check_restores(2, 4, 6)
    second.check_restores_without("s1", 3, 5, 7)
    moments.restore("after the merge", second.runs)

    chain = read_chain(store, "chain")
    assert chain.full.operation in segments_of(place, "s1")
    dropped = merge(place, "--to", str(MERGED_AT), "--drop-earlier", "--yes")["dropped"]
    assert dropped["increments"] == [0, 1, 2, 3]
    # Copies that had begun again before the merge have no segments of their earlier archives any more.
    for node in ("s1", RENEWED):
        assert chain.full.operation not in segments_of(place, node)
        assert len(segments_of(place, node)) == 2
    assert run_here(place.fleet, "gc", "--grace", "0s", "--dry-run")[1]["objects"] == 0
    assert place.check().result == VALID
    place.check_restores(4, 5, 7)
    place.check_restores_without("s1", 4, 5, 6)
    for name in ("before the gap", "in the gap", "after the gap", "before the merge"):
        assert moments.refusal(name)["error"] == "merged-away"
    check_later(moments)

    third = copy_into(place, "third")
    third.check_restores(4, 7)
    third.check_restores_without("s1", 5, 6)


def check_later(moments: Moments) -> None:
    """What follows the merge's cut is as before, also for the transactions that were undecided at it."""
    for name in ("at the merge", "undecided", "after the merge"):
        assert moments.between(name) == (MERGED_AT, 5), name
    assert moments.between("after the later gap") == (6, 7)
    moments.restore("undecided")
    moments.restore("after the merge")
