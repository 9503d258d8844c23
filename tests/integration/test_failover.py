"""A chain goes on over failovers, if the promoted server has all WAL that the chain has; otherwise it is refused.

Servers are stopped and promoted as failover managers do it. Expected rows come from the surviving servers (COPY).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cutline.embedded.server import create_standby, delete_server, stop_server
from cutline.fleet.config import Node
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.fleet.progress import Silent
from cutline.nodes.baseline import FleetTopologyError, find_node
from cutline.nodes.connections import NodeUnreachableError
from cutline.nodes.read_only import resume_fleet
from cutline.nodes.sessions import open_sessions
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.restore.targets.target import databases
from cutline.restore.unfinished.unfinished import UnfinishedRestoreError
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full, preview_full
from cutline.snapshots.create.increment import create_increment, preview_increment
from cutline.snapshots.create.initialise import initialise
from cutline.snapshots.create.restore_point import create_restore_point, preview_restore_point
from cutline.snapshots.ddl.fingerprint import are_same_objects, read_fingerprint
from cutline.snapshots.operations.operation import exclusive
from cutline.snapshots.records.commit import Increment, LostWal
from cutline.snapshots.records.operation_records import INCONCLUSIVE, VALID
from cutline.storage.errors import SnapshotError, UnreachableError
from tests.commands.changing_fleet import ChangingFleet
from tests.commands.in_process import run_and_capture, run_here
from tests.commands.snapshot_runs import Ready, Runs, names_of_snapshots, run_command, sorted_copies
from tests.commands.watching import Reached, Watching
from tests.integration.promoting import (
    PRIMARY,
    STANDBY,
    become_standby,
    fleet_with_chain,
    follow,
    prepare,
    promote,
    take_replayed_increment,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def place(tmp_path: Path, spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[ChangingFleet]:
    """A fleet of one shard with one standby, or of as many of each as the test's parameter says."""
    shards, backups = getattr(request, "param", (1, 1))
    with fleet_with_chain(tmp_path, spark, shards, backups) as found:
        yield found


@pytest.mark.parametrize("place", [(2, 1)], indirect=True)
def test_a_chain_goes_on_after_a_failover(place: ChangingFleet) -> None:
    place.write()
    first = place.increment()
    place.write()
    prepare(place, "over-failover")
    place.await_replay(STANDBY)
    place.stop(PRIMARY)
    for take in (place.increment, lambda: preview_increment(place.fleet, CreateRequest("chain"), Silent())):
        with pytest.raises(NodeUnreachableError, match=PRIMARY) as away:
            take()
        assert str(away.value).endswith(f"; last in the cut of increment 1 of chain at {first.cut.made_at}")
        assert away.value.details["last_cuts"] == [{"node": PRIMARY, "increment": 1, "cut_at": first.cut.made_at}]
    promote(place, STANDBY)
    # psql must be told to connect to the server that accepts writes.
    address = conninfo_to_dict(initialise(place.fleet, Silent()).addresses[PRIMARY])
    assert address["host"] == conninfo_to_dict(place.fleet.node(STANDBY).dsn)["host"]
    second = place.increment()
    assert second.timelines == {PRIMARY: 2}
    assert second.absent.keys() == {STANDBY}
    place.write()
    place.execute(STANDBY, "COMMIT PREPARED 'over-failover'")
    place.increment()
    report = place.check()
    assert report.result == INCONCLUSIVE
    assert not report.conflicts
    place.check_restores(1, 2, 3)

    # The old primary is rebuilt as a standby of the promoted server; fleet.toml still lists them the other way round.
    old = place.servers.node(PRIMARY)
    delete_server(old)
    create_standby(place.servers._programs(old), old, place.servers.node(STANDBY))
    place.start(PRIMARY)
    place.write()
    commit = place.increment()
    assert commit.renewed.keys() == {STANDBY}
    assert not commit.absent
    # And back again.
    place.await_replay(PRIMARY)
    place.stop(STANDBY)
    promote(place, PRIMARY)
    place.write()
    place.increment()
    assert not place.check().conflicts
    place.check_restores(*place.states)


def test_a_chain_goes_on_over_switchovers_back_and_forth(place: ChangingFleet) -> None:
    """A server that is shut down loses nothing, and keeps its slots when it comes back as a standby."""
    current, other = PRIMARY, STANDBY
    for timeline in (2, 3):
        place.write()
        place.increment()
        place.write()
        stop_server(place.servers.node(current))
        promote(place, other)
        place.write()
        commit = place.increment()
        assert commit.timelines[PRIMARY] == timeline
        follow(place, current, other)
        place.write()
        commit = place.increment()
        assert commit.timelines[PRIMARY] == timeline
        current, other = other, current
    report = place.check()
    assert not report.conflicts
    place.check_restores(*place.states)


def test_wal_that_a_failover_lost_is_never_mixed_with_the_survivors(place: ChangingFleet) -> None:
    place.write()
    place.await_replay(STANDBY)
    place.increment()
    place.stop(STANDBY)
    # These rows are in the next increment, and never reach the standby.
    place.write()
    place.increment()
    place.stop(PRIMARY)
    place.servers.start_node(place.servers.node(STANDBY))
    promote(place, STANDBY)
    place.write()
    code, document = run_command(place.fleet, "create", "chain", "--incremental")
    assert code == 0
    (renewed,) = document["renewed"]
    assert renewed["node"] == PRIMARY
    assert re.search(r"timeline 1 at .* a failover lost transactions", renewed["reason"])
    assert any(f"{PRIMARY} is copied again" in warning for warning in document["warnings"])
    place.states[3] = place.live_state()
    assert "with a gap since increment 2" in run_and_capture(place.fleet, "show", "chain")[1]
    place.write()
    assert not place.increment().renewed
    report = place.check()
    assert not report.conflicts
    assert {skipped.what for skipped in report.skipped if skipped.is_absent} == {f"the copy of {STANDBY}"}
    # What the failover lost stays as it was stored.
    place.check_restores(*place.states)


def test_restore_points_that_hold_what_a_failover_has_lost_are_named(place: ChangingFleet, spark: SparkSession) -> None:
    take_replayed_increment(place)
    place.stop(STANDBY)
    for _ in range(2):
        place.write()
        place.increment()
    place.stop(PRIMARY)
    place.servers.start_node(place.servers.node(STANDBY))
    promote(place, STANDBY)
    place.write()
    renewed = place.increment()
    history = place.servers.node(STANDBY).data_directory / "pg_wal/00000002.history"
    (switch,) = re.findall(r"(?m)^1\t(\S+)", history.read_text())
    assert isinstance(renewed, Increment)
    assert renewed.renewed[PRIMARY].lost == LostWal(Lsn.parse(switch), 2)
    place.write()
    place.increment()

    what = f"may hold transactions of {PRIMARY} that are lost"
    text = f"increments 2 to 3 {what}: its server at increment 4 has their WAL only up to {Lsn.parse(switch)}"
    for words in (("show", "chain"), ("list",)):
        # They say where the histories parted once: it is the reason why the shard was copied again.
        output = run_and_capture(place.fleet, *words)[1]
        (line,) = [line for line in output.splitlines() if what in line]
        assert f"increments 2 to 3 {what}" in line
        assert line.count(str(Lsn.parse(switch))) == 1
    (listed,) = run_here(place.fleet, "list")[1]["snapshots"]
    assert [(gap["lost_since"], gap["increment"]) for gap in listed["gaps"]] == [(2, 4)]
    code, document = run_here(place.fleet, "check", "chain", spark=spark)
    (checked,) = document["snapshots"]
    assert (checked["gaps"], checked["conflicts"]) == (listed["gaps"], [])
    for number, is_named in ((0, False), (1, False), (2, True), (3, True), (4, False), (5, False)):
        words = ("--increment", str(number), "--to", str(place.target.path), "--replace", "--dry-run")
        code, document = restore_here(place, spark, "restore", *words)
        assert code == 0, document
        assert (text in document["warnings"]) == is_named, number
        shown = ("show", "chain", "--increment", str(number))
        assert (what in run_and_capture(place.fleet, *shown)[1]) == (is_named or number >= 4), number
        document = run_here(place.fleet, *shown)[1]
        assert [(gap["lost_since"], gap["increment"]) for gap in document["later_gaps"]] == [(2, 4)] * is_named
    rows = run_here(place.fleet, "list", "--flat")[1]["restore_points"]
    assert [row["lost_shards"] for row in rows] == [[], [], [PRIMARY], [PRIMARY], [], []]
    marked = [line for line in run_and_capture(place.fleet, "list", "--flat")[1].splitlines() if "lost on s1" in line]
    assert [line.split()[1] for line in marked] == ["2", "3"]
    # They stay restorable.
    place.check_restores(2, 3, 4)


@pytest.mark.parametrize("place", [(1, 2)], indirect=True)
def test_a_standby_whose_archive_ends_before_the_lost_wal_continues(place: ChangingFleet) -> None:
    """It was away at the cut whose markers the failover lost, and follows the promoted server."""
    other = "s1-b2"
    place.write()
    place.increment()
    for standby in (STANDBY, other):
        place.await_replay(standby)
        stop_server(place.servers.node(standby))
    place.write()
    place.increment()
    place.stop(PRIMARY)
    for standby in (STANDBY, other):
        place.servers.start_node(place.servers.node(standby))
    promote(place, STANDBY)
    stop_server(place.servers.node(other))
    follow(place, other, STANDBY)
    place.write()
    commit = place.increment()
    assert commit.renewed.keys() == {PRIMARY}
    assert commit.absent.keys() == {STANDBY}, commit.absent
    place.write()
    commit = place.increment()
    assert not commit.renewed
    assert commit.absent.keys() == {STANDBY}
    report = place.check()
    assert not report.conflicts
    place.check_restores(*place.states)


def test_ddl_that_a_failover_lost_is_not_taken_for_other_ddl(place: ChangingFleet) -> None:
    """The promoted server gives the same transaction ids again, and so the fingerprint of its catalogs is the same."""
    take_replayed_increment(place)
    place.stop(STANDBY)
    place.execute(PRIMARY, "ALTER TABLE seen ADD COLUMN lost int")
    lost = place.increment()
    assert lost.definition_changes is not None
    place.stop(PRIMARY)
    place.servers.start_node(place.servers.node(STANDBY))
    promote(place, STANDBY)
    place.execute(STANDBY, "ALTER TABLE seen ADD COLUMN kept int")
    commit = place.increment()
    assert PRIMARY in commit.renewed
    with psycopg.connect(place.fleet.node(STANDBY).dsn) as connection:
        assert are_same_objects(lost.definition_changes.fingerprints[PRIMARY], read_fingerprint(connection))
    assert not place.check().conflicts
    place.check_restores(*place.states)


def test_wal_that_was_lost_before_it_was_archived_does_not_matter(place: ChangingFleet) -> None:
    place.write()
    place.await_replay(STANDBY)
    place.increment()
    place.stop(STANDBY)
    place.write()
    place.stop(PRIMARY)
    place.servers.start_node(place.servers.node(STANDBY))
    promote(place, STANDBY)
    place.written = 5
    place.write()
    place.increment()
    assert not place.check().conflicts
    place.check_restores(1, 2)


def test_two_servers_that_accept_writes_are_refused(place: ChangingFleet) -> None:
    place.write()
    promote(place, STANDBY)
    with pytest.raises(FleetTopologyError, match="both accept writes"):
        place.increment()
    assert place.check(0).result == VALID


def with_hosts(place: ChangingFleet, *ids: str) -> Runs:
    """The fleet with both servers of the shard in the dsn of these nodes; libpq finds the one for the node's role."""
    hosts = ",".join(str(place.servers.node(node).socket_folder) for node in (PRIMARY, STANDBY))

    def to_hosts(node: Node) -> Node:
        kind = "standby" if node.backup_of else "primary"
        return replace(node, dsn=make_conninfo(node.dsn, host=hosts, port="5432,5432", target_session_attrs=kind))

    nodes = tuple(to_hosts(node) if node.id in ids else node for node in place.fleet.nodes)
    return Runs(replace(place.fleet, nodes=nodes), place.runs.spark)


def test_a_dsn_of_several_hosts_follows_the_primary_by_itself(place: ChangingFleet) -> None:
    of_hosts = with_hosts(place, PRIMARY, STANDBY)
    place.write()
    place.await_replay(STANDBY)
    assert not of_hosts.increment("chain").absent
    place.stop(PRIMARY)
    promote(place, STANDBY)
    place.write()
    commit = of_hosts.increment("chain")
    assert commit.timelines == {PRIMARY: 2}
    assert commit.absent.keys() == {STANDBY}
    place.states[2] = place.live_state()
    place.check_restores(2)


def test_a_primary_that_crashes_after_its_wal_was_archived_is_retried(place: ChangingFleet) -> None:
    class Crashing(Silent):
        crashed = False

        def reached(self, point: CrashPoint, **_: object) -> None:
            if point == CrashPoint.ARCHIVED and not self.crashed:
                self.crashed = True
                stop_server(place.servers.node(PRIMARY), immediate=True)
                place.servers.start_node(place.servers.node(PRIMARY))

    place.write()
    progress = Crashing()
    create_increment(place.fleet, CreateRequest("chain"), place.runs.spark, progress)
    assert progress.crashed
    place.states[1] = place.live_state()
    assert not place.check().conflicts
    place.check_restores(1)


def test_a_failover_in_a_create_is_named_as_the_cause_of_the_gap(place: ChangingFleet) -> None:
    """The create archives WAL of the standby that is promoted, and not of the primary: nothing else moved the slot."""

    rules = place.servers.node(PRIMARY).data_directory / "pg_hba.conf"
    allowed = rules.read_text()

    def refuses() -> bool:
        try:
            place.execute(PRIMARY, "SELECT pg_sleep(0.01)")
        except psycopg.OperationalError as error:
            return "pg_hba.conf" in str(error)
        return False

    def admit_nobody(reached: Reached) -> None:
        if reached == Reached(CrashPoint.FINISHES_WRITTEN, 1):
            place.await_replay(STANDBY)
            rules.write_text("local all all reject\n")
            place.execute(PRIMARY, "SELECT pg_reload_conf()")
            deadline = time.monotonic() + 20
            while not refuses():
                assert time.monotonic() < deadline

    place.write()
    place.increment()
    place.write()
    failing = Watching(admit_nobody)
    with pytest.raises(UnreachableError, match=f"node {PRIMARY}: "):
        create_increment(place.fleet, CreateRequest("chain", retries=0), place.runs.spark, failing)
    rules.write_text(allowed)
    place.stop(PRIMARY)
    promote(place, STANDBY)
    progress = Watching()
    commit = create_increment(place.fleet, CreateRequest("chain"), place.runs.spark, progress)
    place.states[2] = place.live_state()
    assert isinstance(commit, Increment)
    assert commit.renewed.keys() == {PRIMARY}
    cause = f"a command that failed during a failover had archived the WAL of standby {STANDBY} up to there"
    (warning,) = [note for note in progress.notes if f"primary {PRIMARY} is copied again" in note]
    assert warning.endswith(f": {cause}; no time between increment 1 and this increment can be restored")
    assert not place.check().conflicts
    place.check_restores(1, 2)


@pytest.mark.parametrize("clean", [True, False])
def test_two_servers_with_the_same_timeline_are_told_apart(place: ChangingFleet, *, clean: bool) -> None:
    """Each of two servers begins timeline 2; what is on one of them only must not be taken for the other's."""
    take_replayed_increment(place)
    stop_server(place.servers.node(PRIMARY), immediate=not clean)
    promote(place, STANDBY)
    place.write()
    assert place.increment().timelines == {PRIMARY: 2}
    place.stop(STANDBY)
    become_standby(place, PRIMARY)
    promote(place, PRIMARY)
    place.written = 6
    place.write()
    # The WAL of this server reaches beyond the end of the archive.
    place.execute(PRIMARY, "SELECT pg_logical_emit_message(false, 'x', repeat('y', 400000)), pg_switch_wal()")
    place.write()
    commit = place.increment()
    assert "its WAL lacks the finish marker of cut" in commit.renewed[PRIMARY].reason
    assert not place.check().conflicts
    place.check_restores(1, 2, 3)


def test_a_standby_of_another_history_is_left_out(place: ChangingFleet) -> None:
    """Its timeline has the number of its primary's, and it has replayed more bytes than its primary has written."""
    take_replayed_increment(place)
    place.stop(PRIMARY)
    promote(place, STANDBY)
    place.write()
    place.increment()
    become_standby(place, PRIMARY)
    place.execute(
        PRIMARY,
        "SELECT pg_promote(true, 60)",
        "SELECT pg_logical_emit_message(false, 'x', repeat('y', 400000)), pg_switch_wal()",
        "CHECKPOINT",
    )
    stop_server(place.servers.node(PRIMARY))
    become_standby(place, PRIMARY)
    place.write()
    commit = place.increment()
    assert commit.absent[STANDBY].has_ended
    assert "a failover lost transactions" in commit.absent[STANDBY].reason
    assert not place.check().conflicts
    place.check_restores(1, 2, 3)


def test_an_old_primary_that_can_not_follow_the_promoted_server_is_left_out(place: ChangingFleet) -> None:
    """It came back without pg_rewind, and has replayed more bytes than the promoted server has written."""
    take_replayed_increment(place)
    place.stop(STANDBY)
    place.execute(PRIMARY, "SELECT pg_logical_emit_message(false, 'x', repeat('y', 400000)), pg_switch_wal()")
    place.write()
    place.stop(PRIMARY)
    place.servers.start_node(place.servers.node(STANDBY))
    promote(place, STANDBY)
    become_standby(place, PRIMARY)
    place.written = 5
    place.write()
    commit = place.increment()
    assert commit.cut.attempts == 1
    assert commit.absent[STANDBY].has_ended
    assert "it can't follow its primary" in commit.absent[STANDBY].reason
    # It is not tried in vain to copy it.
    place.write()
    assert "it can't follow its primary" in place.increment().absent[STANDBY].reason
    assert not place.check().conflicts
    place.check_restores(*place.states)


def shown_timeline(place: ChangingFleet, node: str) -> int:
    """The timeline that the node's control file and its receiver show."""
    with psycopg.connect(place.fleet.node(node).dsn, autocommit=True) as connection:
        return find_node(place.fleet.node(node), connection).identity.timeline


def test_a_standby_that_shows_its_timeline_late_goes_on(place: ChangingFleet) -> None:
    """It has followed its primary to a new timeline, and receives no WAL for a moment."""
    place.runs = Runs(replace(place.fleet, standby_wait_seconds=1), place.runs.spark)
    place.write()
    place.increment()
    stop_server(place.servers.node(PRIMARY))
    promote(place, STANDBY)
    with (place.servers.node(PRIMARY).data_directory / "postgresql.auto.conf").open("a") as settings:
        # Writing a page would show the timeline in the control file.
        settings.write("bgwriter_lru_maxpages = 0\n")
    follow(place, PRIMARY, STANDBY)
    place.write()
    place.await_replay(PRIMARY)
    assert place.increment().timelines == {PRIMARY: 2, STANDBY: 2}
    place.await_replay(PRIMARY)
    (conninfo,) = psycopg.connect(place.fleet.node(PRIMARY).dsn).execute("SHOW primary_conninfo").fetchone() or ("",)
    place.execute(PRIMARY, "ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()")
    await_no_receiver(place, PRIMARY)
    assert shown_timeline(place, PRIMARY) == 1
    commit = place.increment()
    # It replays no markers.
    assert not commit.absent[STANDBY].has_ended
    place.execute(PRIMARY, f"ALTER SYSTEM SET primary_conninfo = '{conninfo}'", "SELECT pg_reload_conf()")
    place.write()
    place.await_replay(PRIMARY)
    commit = place.increment()
    assert not commit.absent
    assert not commit.renewed
    assert not place.check().conflicts
    place.check_restores(*place.states)


def await_no_receiver(place: ChangingFleet, node: str) -> None:
    """Wait until the standby receives no WAL."""
    with psycopg.connect(place.fleet.node(node).dsn, autocommit=True) as connection:
        for _ in range(300):
            if connection.execute("SELECT count(*) FROM pg_stat_wal_receiver").fetchone() == (0,):
                return
            time.sleep(0.1)
    raise AssertionError(f"{node} still receives WAL")


def test_a_promoted_server_without_its_history_is_copied_again(place: ChangingFleet) -> None:
    take_replayed_increment(place)
    place.stop(PRIMARY)
    promote(place, STANDBY)
    (place.servers.node(STANDBY).data_directory / "pg_wal" / "00000002.history").unlink()
    place.write()
    renewal = place.increment().renewed[PRIMARY]
    assert "its server is on timeline 2, whose history file 00000002.history it lacks, but" in renewal.reason
    assert renewal.lost == LostWal(ORIGIN, 0)
    place.write()
    assert not place.increment().renewed
    assert not place.check().conflicts
    place.check_restores(*place.states)


def bring_back_the_old_primary(place: ChangingFleet) -> None:
    """Take an increment on the promoted standby, then stop it; the old primary accepts writes again."""
    take_replayed_increment(place)
    place.stop(PRIMARY)
    promote(place, STANDBY)
    place.write()
    place.increment()
    place.stop(STANDBY)
    place.servers.start_node(place.servers.node(PRIMARY))


def test_the_old_primary_is_not_copied_while_the_promoted_server_is_away(place: ChangingFleet) -> None:
    bring_back_the_old_primary(place)
    with pytest.raises(
        NodeUnreachableError, match="it may be the old primary from before a failover, and s1-b1 can't be"
    ):
        place.increment()
    place.stop(PRIMARY)
    place.servers.start_node(place.servers.node(STANDBY))
    place.write()
    assert not place.increment().renewed
    place.check_restores(*place.states)
    # The promoted server is gone for good, and so no longer in fleet.toml.
    place.stop(STANDBY)
    place.servers.start_node(place.servers.node(PRIMARY))
    place.promoted.clear()
    place.runs = Runs(replace(place.fleet, nodes=place.fleet.primaries), place.runs.spark)
    reason = place.increment().renewed[PRIMARY].reason
    assert "its server is on timeline 1, which left the history of the chain's timeline 2 at" in reason
    place.check_restores(max(place.states))


def as_hosts_of_one_dsn(place: ChangingFleet) -> Node:
    """Return the primary with a dsn that names its server and the standby's, and admits the one that accepts writes."""
    primary, standby = place.fleet.nodes
    given = [conninfo_to_dict(node.dsn) for node in (primary, standby)]
    lists = {name: f"{given[0][name]},{given[1][name]}" for name in ("host", "port")}
    return replace(primary, dsn=make_conninfo(primary.dsn, target_session_attrs="read-write", **lists))


KINDS = ["full", "dry-run", "only-primary", "only-cut", "only-cut dry-run", "another chain"]


def create(place: ChangingFleet, kind: str, name: str) -> object:
    """Run a create of this kind that does not continue `chain`."""
    request = CreateRequest(name, only_primary=kind == "only-primary", only_cut=kind.startswith("only-cut"))
    if kind == "another chain":
        return create_increment(place.fleet, CreateRequest("other"), place.runs.spark, Silent())
    if kind == "dry-run":
        return preview_full(place.fleet, request, Silent())
    if kind == "only-cut dry-run":
        return preview_restore_point(place.fleet, request, Silent())
    if request.only_cut:
        return create_restore_point(place.fleet, request, Silent())
    return create_full(place.fleet, request, place.runs.spark, Silent())


def test_no_create_uses_the_old_primary_while_the_promoted_server_is_away(place: ChangingFleet) -> None:
    place.runs.full("other")
    bring_back_the_old_primary(place)

    def check_refused(error: type[SnapshotError], text: str) -> None:
        for kind in KINDS:
            with pytest.raises(error, match=text):
                create(place, kind, f"wrong-{kind.replace(' ', '-')}")

    check_refused(NodeUnreachableError, "it may be the old primary from before a failover, and s1-b1 can't be")
    # A dsn that leads to the old primary, too, is no sign of another server.
    listed, old = place.runs, place.fleet.node(PRIMARY).dsn
    nodes = tuple(replace(node, dsn=old) if node.id == STANDBY else node for node in place.fleet.nodes)
    place.runs = Runs(replace(place.fleet, nodes=nodes), place.runs.spark)
    check_refused(
        NodeUnreachableError, "it may be the old primary from before a failover, and s1-b1 can't be reached .the dsn"
    )
    place.runs = listed
    # Commands that lock the fleet on the old primary do not forget the promoted server.
    store = place.fleet.store.open()
    with open_sessions(place.fleet, place.fleet.primaries) as sessions, exclusive(sessions, store, "delete", "chain"):
        pass
    check_refused(NodeUnreachableError, "it may be the old primary")
    assert names_of_snapshots(place.fleet) == ["chain", "other"]
    # Now both accept writes.
    place.servers.start_node(place.servers.node(STANDBY))
    check_refused(FleetTopologyError, "both accept writes")
    # Nor if they are the hosts of one dsn, of which libpq takes the first that accepts writes.
    place.runs = Runs(replace(place.fleet, nodes=(as_hosts_of_one_dsn(place),)), place.runs.spark)
    check_refused(FleetTopologyError, f"node {PRIMARY}: .* and .* accept writes")
    place.runs = listed
    assert names_of_snapshots(place.fleet) == ["chain", "other"]
    place.stop(PRIMARY)
    place.runs.full("right")
    # The promoted server is gone for good, and so no longer in fleet.toml.
    place.stop(STANDBY)
    place.servers.start_node(place.servers.node(PRIMARY))
    listed = place.runs
    place.runs = Runs(replace(place.fleet, nodes=place.fleet.primaries), place.runs.spark)
    place.runs.full("without")
    # From then on, it is the primary, also if a standby that is rebuilt is away.
    place.runs = listed
    for kind in KINDS[:-1]:
        create(place, kind, f"more-{kind.replace(' ', '-')}")


def test_a_server_that_was_restored_to_a_point_in_time_is_copied(place: ChangingFleet) -> None:
    """It begins a later timeline than any that is known, so that it is taken for no old primary."""
    place.stop(STANDBY)
    stop_server(place.servers.node(PRIMARY))
    become_standby(place, PRIMARY)
    promote(place, PRIMARY)
    place.promoted.clear()
    assert shown_timeline(place, PRIMARY) == 2
    for kind in KINDS[:-2]:
        create(place, kind, f"restored-{kind.replace(' ', '-')}")


def test_a_server_of_another_cluster_does_not_take_the_primarys_place(place: ChangingFleet) -> None:
    place.stop(PRIMARY)
    other = place.target.node(PRIMARY)
    nodes = tuple(replace(node, dsn=other.dsn) if node.id == STANDBY else node for node in place.fleet.nodes)
    runs = Runs(replace(place.fleet, nodes=nodes), place.runs.spark)
    with pytest.raises(NodeUnreachableError, match=PRIMARY):
        runs.full("second")
    with pytest.raises(NodeUnreachableError, match=PRIMARY):
        create_restore_point(runs.fleet, CreateRequest("second", only_cut=True), Silent())


def test_idle_cuts_of_another_server_are_missed(place: ChangingFleet) -> None:
    take_replayed_increment(place)
    place.stop(PRIMARY)
    promote(place, STANDBY)
    place.increment()
    place.stop(STANDBY)
    become_standby(place, PRIMARY)
    promote(place, PRIMARY)
    place.execute(PRIMARY, "SELECT pg_logical_emit_message(false, 'x', repeat('y', 400000)), pg_switch_wal()")
    assert PRIMARY in place.increment().renewed
    assert not place.check().conflicts
    place.check_restores(1, 2, 3)


def test_a_stray_standby_is_left_out(place: ChangingFleet) -> None:
    """It was promoted by mistake, wrote something, and was made a standby again."""
    take_replayed_increment(place)
    place.stop(STANDBY)
    become_standby(place, STANDBY)
    place.execute(
        STANDBY,
        "SELECT pg_promote(true, 60)",
        "INSERT INTO seen VALUES (5000, 'stray')",
        "SELECT pg_logical_emit_message(false, 'x', repeat('y', 400000)), pg_switch_wal()",
        "CHECKPOINT",
    )
    stop_server(place.servers.node(STANDBY))
    become_standby(place, STANDBY)
    place.write()
    commit = place.increment()
    # It does not replay what its primary writes, so it can't be copied either.
    assert commit.absent[STANDBY].has_ended
    assert not place.check().conflicts
    place.check_restores(2)


def test_a_standby_that_has_caught_up_with_an_idle_primary_may_take_its_place(place: ChangingFleet) -> None:
    place.write()
    place.increment()
    place.stop(STANDBY)
    place.write()
    place.increment()
    place.start(STANDBY)
    place.increment()
    place.increment()
    place.await_replay(STANDBY)
    stop_server(place.servers.node(PRIMARY))
    promote(place, STANDBY)
    place.write()
    place.increment()
    assert not place.check().conflicts
    place.check_restores(*place.states)


def test_a_standby_whose_dsn_leads_to_the_promoted_server_is_left_out(place: ChangingFleet) -> None:
    of_hosts = with_hosts(place, PRIMARY)
    place.write()
    place.await_replay(STANDBY)
    of_hosts.increment("chain")
    place.stop(PRIMARY)
    promote(place, STANDBY)
    place.write()
    commit = of_hosts.increment("chain")
    assert "leads to the server of s1" in commit.absent[STANDBY].reason
    place.states[2] = place.live_state()
    place.check_restores(2)


def test_a_frozen_fleet_resumes_on_the_promoted_server(place: ChangingFleet) -> None:
    place.write()
    create_increment(place.fleet, CreateRequest("chain", terminal=True), place.runs.spark, Silent())
    place.await_replay(STANDBY)
    place.stop(PRIMARY)
    promote(place, STANDBY)
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        place.execute(STANDBY, "DELETE FROM seen WHERE false")
    resume_fleet(place.fleet, Silent())
    place.write()
    assert not place.increment().terminal
    place.check_restores(2)


def test_resume_does_not_let_an_old_primary_accept_writes(place: ChangingFleet) -> None:
    """The old primary has come back, and is read-only like the server that was promoted."""
    place.write()
    create_increment(place.fleet, CreateRequest("chain", terminal=True), place.runs.spark, Silent())
    place.await_replay(STANDBY)
    place.stop(PRIMARY)
    promote(place, STANDBY)
    place.servers.start_node(place.servers.node(PRIMARY))
    primary, standby = place.fleet.nodes
    given = [conninfo_to_dict(node.dsn) for node in place.fleet.nodes]
    lists = {name: f"{given[0][name]},{given[1][name]}" for name in ("host", "port")}
    several = replace(standby, dsn=make_conninfo(standby.dsn, target_session_attrs="standby", **lists))
    for fleet in (replace(place.fleet, nodes=(primary, several)), place.fleet):
        with pytest.raises(FleetTopologyError, match=f"{STANDBY} is not a standby, .* both accept writes"):
            resume_fleet(fleet, Silent())
    # Nor if they are the hosts of one dsn, of which libpq takes the first that accepts writes.
    hosts = replace(primary, dsn=make_conninfo(primary.dsn, target_session_attrs="read-write", **lists))
    of_hosts = replace(place.fleet, nodes=(hosts,))
    places = [re.escape(f"{one['host']}:{one['port']}") for one in given]
    with pytest.raises(FleetTopologyError, match=f"node {PRIMARY}: {' and '.join(places)} accept writes"):
        resume_fleet(of_hosts, Silent())
    for node in (PRIMARY, STANDBY):
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            place.execute(node, "DELETE FROM seen WHERE false")
    # Two names of one server are one.
    twice = {name: f"{value},{given[0][name]}" for name, value in lists.items()}
    place.stop(STANDBY)
    resume_fleet(replace(of_hosts, nodes=(replace(hosts, dsn=make_conninfo(hosts.dsn, **twice)),)), Silent())
    place.execute(PRIMARY, "DELETE FROM seen WHERE false")
    place.servers.start_node(place.servers.node(STANDBY))
    place.stop(PRIMARY)
    resume_fleet(place.fleet, Silent())
    place.execute(STANDBY, "DELETE FROM seen WHERE false")


def restore_here(place: ChangingFleet, spark: SparkSession, command: str, *words: str) -> tuple[int, dict[str, Any]]:
    return run_here(place.fleet, command, "chain", *words, spark=spark)


def databases_of(place: ChangingFleet, node: str) -> set[str]:
    with psycopg.connect(place.fleet.node(node).dsn) as connection:
        return databases(connection)


def test_a_restore_replaces_the_database_of_the_server_that_is_the_primary_now(
    place: ChangingFleet, spark: SparkSession
) -> None:
    take_replayed_increment(place)
    place.write()
    before = sorted_copies(place.fleet.node(PRIMARY).dsn), databases_of(place, PRIMARY)
    promote(place, STANDBY)
    for words in ([], ["--to", str(place.fleet.path)], ["--node", PRIMARY]):
        code, document = restore_here(place, spark, "restore", "--replace", "--yes", *words)
        assert (code, document["error"]) == (FleetTopologyError.exit_code, "fleet-topology")
        assert f"node {STANDBY}" in document["message"]
        assert f"backup_of = {PRIMARY}: both accept writes" in document["message"]
    assert (sorted_copies(place.fleet.node(PRIMARY).dsn), databases_of(place, PRIMARY)) == before

    stop_server(place.servers.node(PRIMARY))
    code, document = restore_here(place, spark, "restore", "--replace", "--dry-run")
    assert code == 0, document
    code, document = restore_here(place, spark, "restore", "--replace", "--yes")
    assert code == 0, document
    assert place.live_state() == place.states[1]
    (aside,) = databases_of(place, STANDBY) - before[1]
    # What was set aside is dropped on the same server.
    code, document = run_here(place.fleet, "restore-discard", "--yes")
    assert code == 0
    assert [old["database"] for old in document["discarded"]] == [aside]


def test_a_restore_is_not_ended_on_another_server_than_it_began_on(
    place: ChangingFleet, spark: SparkSession, tmp_path: Path
) -> None:
    take_replayed_increment(place)

    def leave(reached: Reached) -> None:
        if reached.point == RestoreCrashPoint.ROWS_LOADED:
            raise NodeUnreachableError(f"node {PRIMARY}: it is gone", hint="bring it back")

    plan = plan_restore(place.fleet, place.fleet, RestoreRequest("chain", replace=True))
    with pytest.raises(NodeUnreachableError):
        restore_fleet(plan, Ready(spark), Watching(leave))
    place.await_replay(STANDBY)
    place.stop(PRIMARY)
    promote(place, STANDBY)
    before = databases_of(place, STANDBY)
    began, now = (f"{place.servers.node(node).socket_folder}:5432" for node in (PRIMARY, STANDBY))
    for words in (("restore-resume",), ("restore-abandon", "--yes")):
        code, document = restore_here(place, spark, *words)
        assert code == UnfinishedRestoreError.exit_code
        assert f"it began on {began}, but {now} is the primary of shard {PRIMARY} now" in document["message"]
    assert databases_of(place, STANDBY) == before

    text = place.fleet.path.read_text()
    nodes = text.split("[[node]]")
    own = next(part for part in nodes if f'"{STANDBY}"' in part)
    alone = re.sub(r"(?m)^backup_of.*$", "", own.replace(f'id = "{STANDBY}"', f'id = "{PRIMARY}"'))
    (tmp_path / "alone.toml").write_text(f"{nodes[0]}[[node]]{alone}")
    code, document = restore_here(place, spark, "restore-abandon", "--yes", "--to", str(tmp_path / "alone.toml"))
    assert code == 0, document
    assert len(databases_of(place, STANDBY)) == len(before) - 1
    code, document = restore_here(place, spark, "restore", "--replace", "--yes")
    assert code == 0, document
    assert place.live_state() == place.states[1]
