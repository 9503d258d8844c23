"""Copies that can't be continued begin again in their chain: a restore equals the live servers at each cut."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from cutline.embedded.bank import read_invariants
from cutline.embedded.bank_workload import BankWorkload
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.lsn import ORIGIN
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.listing import metrics
from cutline.snapshots.listing.metrics_gathering import gather_once
from cutline.snapshots.operations.open_operations import read_open_operations
from cutline.snapshots.records.commit import Increment, LostWal
from cutline.snapshots.records.documents import ManifestError, seal
from cutline.snapshots.records.operation_records import INCONCLUSIVE, VALID
from cutline.snapshots.records.proven_chains import commit_key, read_chain
from cutline.wal.drain.open_transactions import SlotWaitError
from cutline.wal.segments.archive import ArchiveError
from tests.commands.changing_fleet import SEEN, ChangingFleet, absent_names, changing_fleet
from tests.commands.snapshot_runs import Runs, command_line, run_command, slots_of
from tests.commands.watching import Reached, Watching
from tests.faults.signalled_command import ABOUT_TO_COMMIT
from tests.servers.dealt import start_pair
from tests.unit.metric_values import of, read

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STANDBY, OTHER = "s1-b1", "s2-b1"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedFleet, EmbeddedFleet]]:
    with start_pair(tmp_path_factory.mktemp("renewed")) as pair:
        yield pair


@pytest.fixture
def place(
    servers: tuple[EmbeddedFleet, EmbeddedFleet], tmp_path: Path, spark: SparkSession, request: pytest.FixtureRequest
) -> Iterator[ChangingFleet]:
    tables = (*SEEN, "CREATE TABLE empty (id int PRIMARY KEY)")
    with changing_fleet(*servers, tmp_path, spark, tables=tables, more=getattr(request, "param", "")) as found:
        yield found


def next_increment(place: ChangingFleet) -> Increment:
    place.write()
    commit = place.increment()
    assert isinstance(commit, Increment)
    return commit


@pytest.mark.parametrize("place", ["", '[copies]\nrequire = "all"\n'], indirect=True, ids=["spared", "required"])
def test_a_standby_that_lost_its_slot_is_copied_again(place: ChangingFleet) -> None:
    place.runs.full("chain")
    next_increment(place)
    slot = place.drop_slot(STANDBY)
    second = next_increment(place)
    assert second.renewed.keys() == {STANDBY}
    assert slot in second.renewed[STANDBY].reason
    assert not second.absent
    assert absent_names(second) == set()
    assert slots_of(place.fleet.node(STANDBY).dsn) == [slot]
    assert place.check(since_last=True).result == VALID
    third = next_increment(place)
    assert not third.renewed
    assert place.check(since_last=True).result == VALID
    assert place.check().result == VALID
    assert place.check(1).result == VALID
    place.check_restores(1, 2, 3)
    place.check_restores_without("s1", 1, 2, 3)


def test_a_rebuilt_standby_is_copied_again(place: ChangingFleet) -> None:
    place.runs.full("chain")
    place.rebuild(STANDBY)
    first = next_increment(place)
    assert first.renewed.keys() == {STANDBY}
    # Twice in a row.
    place.rebuild(STANDBY)
    second = next_increment(place)
    assert second.renewed.keys() == {STANDBY}
    third = next_increment(place)
    assert not third.renewed
    report = place.check()
    assert report.result == VALID
    assert [(one.first, one.last, one.what) for one in report.uncompared_points] == [
        (0, 0, f"the copy of {STANDBY}"),
        (1, 1, f"the copy of {STANDBY}"),
    ]
    place.check_restores(1, 2, 3)
    place.check_restores_without("s1", 1, 2, 3)
    # Nothing compares the first copy any more, but damage to it is found.
    store = place.fleet.store.open()
    key = next(one.key for one in read_chain(store, "chain").full.named if one.node == STANDBY)
    store.delete(key)
    assert key in [conflict.object for conflict in place.check().conflicts]


def test_a_standby_that_was_added_is_copied(place: ChangingFleet) -> None:
    whole = place.fleet
    fewer = replace(whole, nodes=tuple(node for node in whole.nodes if node.id != STANDBY))
    place.runs = Runs(fewer, place.runs.spark)
    place.runs.full("chain")
    next_increment(place)
    place.runs = Runs(whole, place.runs.spark)
    second = next_increment(place)
    assert second.renewed.keys() == {STANDBY}
    next_increment(place)
    assert place.check(1).result == INCONCLUSIVE
    assert place.check().result == VALID
    place.check_restores(1, 2, 3)
    place.check_restores_without("s1", 2, 3)


def test_a_primary_that_lost_its_slot_is_copied_again(place: ChangingFleet) -> None:
    place.runs.full("chain")
    next_increment(place)
    place.drop_slot("s1")
    second = next_increment(place)
    assert second.renewed.keys() == {"s1"}
    assert of(metrics.GAPS, read(gather_once(place.fleet).samples)) == {"": 1}
    assert place.check(since_last=True).result == VALID
    next_increment(place)
    # Not only the increment itself has a gap, but its chain.
    assert of(metrics.GAPS, read(gather_once(place.fleet).samples)) == {"": 1}
    assert place.check(since_last=True).result == VALID
    assert place.check().result == VALID
    place.check_restores(1, 2, 3)
    place.check_restores_without("s1", 1, 2, 3)


def test_a_transaction_that_the_copied_shard_may_have_committed_is_awaited_on_the_others(place: ChangingFleet) -> None:
    """The new slot of s2 has not seen its COMMIT PREPARED there, so a cut would have its rows on s2 alone."""
    place.runs.full("chain")
    for node in ("s1", "s2"):
        place.execute(node, "BEGIN; INSERT INTO seen VALUES (-1, 'both'); PREPARE TRANSACTION 'both'")
    next_increment(place)
    place.execute("s2", "COMMIT PREPARED 'both'")
    place.drop_slot("s2")
    with pytest.raises(SlotWaitError) as raised:
        place.increment(wait_seconds=1)
    (transaction,) = raised.value.details["transactions"]  # type: ignore[misc]  # it is a list
    assert (transaction["node"], transaction["gid"]) == ("s1", "both")
    place.execute("s1", "COMMIT PREPARED 'both'")
    second = next_increment(place)
    assert second.renewed.keys() == {"s2"}
    assert all(b"-1\tboth" in rows["public.seen"] for rows in place.states[2])
    place.check_restores(2)


def test_a_shard_that_lost_all_slots_is_copied_again(place: ChangingFleet) -> None:
    place.runs.full("chain")
    next_increment(place)
    place.drop_slot("s1")
    place.drop_slot(STANDBY)
    second = next_increment(place)
    assert second.renewed.keys() == {"s1", STANDBY}
    place.execute("s1", "ALTER TABLE seen ADD COLUMN more int DEFAULT 7", "CREATE TABLE later (id int PRIMARY KEY)")
    next_increment(place)
    # Its rows are converted, which a copy made under the new definition can't be.
    place.execute("s1", "ALTER TABLE later ADD COLUMN more int")
    place.drop_slot(STANDBY)
    fourth = next_increment(place)
    assert fourth.absent.keys() == {STANDBY}
    assert next_increment(place).renewed.keys() == {STANDBY}
    assert place.check().result == VALID
    place.check_restores(1, 2, 3, 4, 5)
    place.check_restores_without("s1", 2, 3, 5)


def test_what_earlier_increments_lack_is_named_and_the_newest_is_valid(place: ChangingFleet) -> None:
    """A standby was away before its primary was copied again, and another until it caught up."""

    def check(*options: str) -> tuple[int, bool, list[tuple[int, int, str]]]:
        """Return the code, whether it rests on a record, and what it names; only commands leave records."""
        code, document = run_command(place.fleet, "check", "chain", *options)
        (found,) = document["snapshots"]
        points = [(one["first"], one["last"], one["what"]) for one in found["uncompared_points"]]
        return code, found["rests_on"] is not None, points

    lacked = [(0, 0, f"the copy of {STANDBY}"), (1, 1, "rows of shard s1"), (1, 1, f"the copy of {STANDBY}")]
    place.runs.full("chain")
    place.stop(STANDBY)
    assert next_increment(place).absent.keys() == {STANDBY}
    place.drop_slot("s1")
    place.start(STANDBY)
    assert "s1" in next_increment(place).renewed
    assert check() == (0, False, lacked)
    assert check("--since-last") == (0, True, lacked)
    assert check("--increment", "1")[::2] == (4, [])

    place.stop(OTHER)
    assert next_increment(place).absent.keys() == {OTHER}
    # It is still away: that is no matter of an earlier increment.
    assert check()[::2] == (4, lacked)
    assert check("--since-last") == (4, True, lacked)
    place.start(OTHER)
    assert not next_increment(place).absent
    lacked += [(3, 3, "rows of shard s2"), (3, 3, f"the copy of {OTHER}")]
    assert check() == (0, False, lacked)
    assert check("--since-last") == (0, True, lacked)
    assert check("--increment", "3")[0] == 4


def test_copies_begin_again_while_global_transactions_go_on(place: ChangingFleet) -> None:
    """Both shards' copies of each transaction are restored, or neither, before, at and after the new beginnings."""
    dsns = [node.dsn for node in place.fleet.primaries]
    with BankWorkload(dsns, clients=3, cross_shard_ratio=1.0, pause_seconds=0.02):
        place.runs.full("chain")
        for lost in ((), ("s1",), (), ("s2", STANDBY)):
            for node in lost:
                place.drop_slot(node)
            commit = place.runs.increment("chain")
            assert isinstance(commit, Increment)
            assert set(lost) <= commit.renewed.keys()
            assert commit.cut.global_transactions > 0
    assert place.check().result == VALID
    for number in range(1, 5):
        place.runs.restore("chain", place.target, number)
        invariants = read_invariants([node.dsn for node in place.target.primaries])
        assert invariants.hold
        assert sum(invariants.transfers) > 0


# In the order in which a create reaches them: each create is settled by the next.
POINTS = (
    (CrashPoint.INTENT_STORED, 1),
    (CrashPoint.SLOT_MADE, 1),
    (CrashPoint.SLOT_MADE, 2),
    (CrashPoint.PREPARED_OVER, 1),
    (CrashPoint.BASE_COPIED, 1),
    (CrashPoint.COPY_SLOTS_DROPPED, 1),
    (CrashPoint.FINISHES_WRITTEN, 1),
    (CrashPoint.ARCHIVED, 1),
    (ABOUT_TO_COMMIT, 1),
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("lost", [("s1", STANDBY), (STANDBY,)], ids=["shard", "standby"])
def test_a_create_that_is_killed_leaves_nothing_that_the_next_uses(place: ChangingFleet, lost: tuple[str, ...]) -> None:
    place.runs.full("chain")
    next_increment(place)
    for node in lost:
        slot = place.drop_slot(node)
    for point, count in POINTS:
        if lost == (STANDBY,) and (point, count) in ((CrashPoint.SLOT_MADE, 2), (CrashPoint.COPY_SLOTS_DROPPED, 1)):
            continue
        place.write()
        program = [sys.executable, "-m", "tests.faults.signalled_command", "SIGKILL", str(point), str(count), "--"]
        words = ["--fleet", str(place.fleet.path), "create", "chain", "--incremental"]
        done = subprocess.run([*program, *words], capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
    second = next_increment(place)
    assert second.renewed.keys() == set(lost)
    for node in place.fleet.nodes:
        assert slots_of(node.dsn) == [slot]
    assert not read_open_operations(place.fleet.store.open())
    next_increment(place)
    assert place.check().result == VALID
    place.check_restores(1, 2, 3)
    place.check_restores_without("s1", 1, 2, 3)


def test_a_commit_that_contradicts_itself_about_renewed_copies_is_refused(place: ChangingFleet) -> None:
    place.runs.full("chain")
    place.drop_slot("s1")
    place.drop_slot(OTHER)
    commit = next_increment(place)
    path = place.folder / "store" / commit_key("chain", 1)
    store, before, renewed = place.fleet.store.open(), path.read_bytes(), commit.renewed
    of_standby, of_primary = renewed[OTHER], renewed["s1"]
    (number, *_), changes = of_standby.copied, commit.definition_changes
    assert changes is not None
    without = structs.replace(changes, objects=tuple(one for one in changes.objects if one.node != OTHER))
    late = max(commit.cut.of(shard).finish for shard in ("s1", "s2"))
    values: list[tuple[str, dict[str, object]]] = [
        ("rows of a group", {"renewed": renewed | {OTHER: structs.replace(of_standby, copied={})}}),
        ("does not match the base copies", {"definition_changes": without}),
        (
            "does not match the base copies",
            {"renewed": renewed | {OTHER: structs.replace(of_standby, copied={**of_standby.copied, number: 1000})}},
        ),
        ("after the start of the cut", {"renewed": renewed | {OTHER: structs.replace(of_standby, base=late)}}),
        ("identity or reason", {"renewed": renewed | {OTHER: structs.replace(of_standby, reason="")}}),
        ("segments lists", {"renewed": renewed | {OTHER: of_primary}}),
        ("slots_complete_at does not match", {"slots_complete_at": {}}),
        ("slots_complete_at lists", {"slots_complete_at": {"s1": commit.slots_complete_at["s1"]}}),
        ("is not the key|contains rows of a group", {"renewed": {"s1": of_primary}}),
        # The cut before lies beyond 0/0, and not beyond this one's.
        ("that of a standby", {"renewed": renewed | {OTHER: structs.replace(of_standby, lost=LostWal(ORIGIN, 0))}}),
        ("not an earlier", {"renewed": renewed | {"s1": structs.replace(of_primary, lost=LostWal(ORIGIN, 1))}}),
        ("not match the cut", {"renewed": renewed | {"s1": structs.replace(of_primary, lost=LostWal(ORIGIN))}}),
        ("not match the cut", {"renewed": renewed | {"s1": structs.replace(of_primary, lost=LostWal(late, 0))}}),
        ("cut lists", {"renewed": renewed | {"s3": structs.replace(
            of_primary, identity=structs.replace(of_primary.identity, node="s3"))}}),
    ]  # fmt: skip
    for message, changed in values:
        path.write_bytes(seal(structs.replace(commit, **changed)))
        with pytest.raises((ManifestError, ArchiveError), match=message):
            read_chain(store, "chain").check_archive()
    path.write_bytes(before)
    read_chain(store, "chain").check_archive()


# DDL after which a table is copied again, is gone, or is another table of the same name.
CHANGES = {
    "new": ("CREATE TABLE added (id int PRIMARY KEY)", "INSERT INTO added VALUES (1), (2)"),
    "dropped": ("DROP TABLE empty",),
    "rewritten": ("ALTER TABLE seen ADD code int NOT NULL DEFAULT 7", "ALTER TABLE seen ALTER code TYPE bigint"),
    "created again": ("DROP TABLE empty", "CREATE TABLE empty (id int PRIMARY KEY)", "INSERT INTO empty VALUES (3)"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_standby_is_copied_again_although_tables_have_changed(place: ChangingFleet, change: str) -> None:
    """Its shard may have DDL in each increment: tables that are copied on all nodes anyway are not in its way."""
    place.runs.full("chain")
    place.drop_slot(STANDBY)
    place.execute("s1", *CHANGES[change])
    place.await_replay(STANDBY)
    first = next_increment(place)
    assert (first.renewed.keys(), dict(first.absent)) == ({STANDBY}, {})
    assert not next_increment(place).renewed
    assert place.check(1).result == place.check().result == VALID
    place.check_restores(1, 2)
    place.check_restores_without("s1", 1, 2)


def test_a_table_that_is_as_it_was_before_the_cut_is_copied_with_the_standby(place: ChangingFleet) -> None:
    """The copy of the standby did not have it, because it seemed to need a new base copy."""
    place.runs.full("chain")
    place.drop_slot(STANDBY)
    place.execute("s1", "ALTER TABLE seen REPLICA IDENTITY FULL")
    place.await_replay(STANDBY)
    place.write()

    def then(reached: Reached) -> None:
        if reached == Reached(CrashPoint.SNAPSHOTS_RELEASED, 1):
            place.execute("s1", "ALTER TABLE seen REPLICA IDENTITY DEFAULT")

    commit = create_increment(place.fleet, CreateRequest("chain"), place.runs.spark, Watching(then))
    assert isinstance(commit, Increment)
    place.states[1] = place.live_state()
    assert commit.renewed.keys() == {STANDBY}
    assert place.check().result == VALID
    place.check_restores(1)
    place.check_restores_without("s1", 1)


@pytest.mark.parametrize("place", ["[copies]\nwait = '2s'\n"], indirect=True)
def test_a_standby_that_can_not_be_copied_is_left_out(place: ChangingFleet) -> None:
    """Its slot waits for older transactions, which must not hold up the increment."""
    place.runs.full("chain")
    place.drop_slot(STANDBY)
    place.execute("s1", "BEGIN; INSERT INTO empty VALUES (1); PREPARE TRANSACTION 'in-the-way'")
    try:
        first = next_increment(place)
    finally:
        place.execute("s1", "COMMIT PREPARED 'in-the-way'")
    assert first.absent[STANDBY].has_ended
    assert "could not be copied again" in first.absent[STANDBY].reason
    assert slots_of(place.fleet.node(STANDBY).dsn) == []
    assert next_increment(place).renewed.keys() == {STANDBY}
    assert place.check().result == VALID
    place.check_restores(1, 2)
    place.check_restores_without("s1", 2)


def act_after_copying(place: ChangingFleet, act: Callable[[], object]) -> tuple[Increment, list[str]]:
    """Take an increment that copies both standbys again; `act` is called once, when their tables have been copied."""
    place.runs.full("chain")
    for standby in (STANDBY, OTHER):
        place.drop_slot(standby)
    place.write()

    def then(reached: Reached) -> None:
        if reached == Reached(CrashPoint.SNAPSHOTS_RELEASED, 1):
            act()

    progress = Watching(then)
    commit = create_increment(place.fleet, CreateRequest("chain"), place.runs.spark, progress)
    assert isinstance(commit, Increment)
    place.states[1] = place.live_state()
    assert any(one.point == CrashPoint.SNAPSHOTS_RELEASED for one in progress.reached_points)
    return commit, progress.notes


def test_a_primary_that_ends_sessions_costs_no_standby_its_copy(place: ChangingFleet) -> None:
    """Both are copied once more in the same increment."""
    end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'cutline%'"
    commit, notes = act_after_copying(place, lambda: place.execute("s1", end))
    assert any("retrying in" in note for note in notes), notes
    assert (commit.renewed.keys(), dict(commit.absent)) == ({STANDBY, OTHER}, {})
    assert place.check().result == VALID
    place.check_restores(1)
    place.check_restores_without("s1", 1)


@pytest.mark.parametrize("place", ["[copies]\nwait = '2s'\n"], indirect=True)
def test_a_transaction_that_stays_prepared_costs_only_its_shard_the_copy(place: ChangingFleet) -> None:
    prepare = "BEGIN; INSERT INTO empty VALUES (1); PREPARE TRANSACTION 'in-the-way'"
    try:
        commit, _ = act_after_copying(place, lambda: place.execute("s1", prepare))
    finally:
        place.execute("s1", "COMMIT PREPARED 'in-the-way'")
    assert (commit.renewed.keys(), commit.absent.keys()) == ({OTHER}, {STANDBY})
    assert "in-the-way" in commit.absent[STANDBY].reason
    assert slots_of(place.fleet.node(STANDBY).dsn) == []
    assert next_increment(place).renewed.keys() == {STANDBY}
    assert place.check().result == VALID
    place.check_restores(1, 2)


def test_a_gap_is_named_by_list_and_by_the_first_check_that_reads_it(place: ChangingFleet) -> None:
    def run(*words: str) -> tuple[str, str]:
        done = subprocess.run(
            command_line(place.fleet, *words), capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    def run_quiet(*words: str) -> tuple[str, str]:
        return run("--quiet", *words)

    place.runs.full("chain")
    next_increment(place)
    place.drop_slot("s1")
    next_increment(place)
    text = "no time between increment 1 and increment 2 can be restored: primary s1 was copied again: "
    warning = f"warning: chain: {text}"
    assert f"snapshot chain: {text}" in run_quiet("list")[0]
    (listed,) = run_command(place.fleet, "list")[1]["snapshots"]
    assert [(gap["increment"], gap["node"]) for gap in listed["gaps"]] == [(2, "s1")]
    first = run_quiet("check", "chain")
    assert (first[0], warning in first[1]) == ("", True)
    # A check of everything reads it as well, but it is no news any more.
    assert run_quiet("check", "chain") == ("", "")
    assert f"\nchain: {text}" in run("check", "chain")[0]
    next_increment(place)
    assert run_quiet("check", "chain", "--since-last") == ("", "")
    # The copy of a standby that begins again loses no time.
    place.drop_slot(STANDBY)
    assert next_increment(place).renewed.keys() == {STANDBY}
    _, document = run_command(place.fleet, "check", "chain")
    (checked,) = document["snapshots"]
    assert (checked["result"], checked["gaps"]) == (VALID, listed["gaps"])
