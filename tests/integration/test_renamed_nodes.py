"""A chain goes on with the same databases under other ids; rows never get under the name of another shard.

Expected rows come from the servers (COPY), each by the id that its server has in the embedded fleet.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from msgspec import structs

from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.fleet.config import Fleet, load_fleet
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Noting, Silent
from cutline.nodes.baseline import BaselineChangedError, FleetTopologyError
from cutline.nodes.connections import NodeUnreachableError, database_name, with_database
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.snapshots.create.archive_ahead import archive_ahead
from cutline.snapshots.operations.open_operations import is_open, read_open_operations
from cutline.snapshots.operations.operation import new_operation
from cutline.snapshots.operations.settling import settle_operations
from cutline.snapshots.records.commit import Increment
from cutline.snapshots.records.documents import ManifestError, seal
from cutline.snapshots.records.operation_records import VALID, write_operation_record
from cutline.snapshots.records.proven_chains import commit_key, cut_time, free_turn, read_chain
from cutline.storage.errors import ChainEnd
from tests.commands.changing_fleet import ChangingFleet
from tests.commands.in_process import run_as_text, run_here
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, slots_of, sorted_copies
from tests.integration.refusing import execute
from tests.servers.dealt import fleet_and_target, start_fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EAST = {"s3": "east", "s3-b1": "east-b1"}
ALL = {"s1": "north", "s1-b1": "north-b1", "s2": "south", "s2-b1": "south-b1", **EAST}
SHARDS = ("s1", "s2", "s3")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedFleet, EmbeddedFleet]]:
    with fleet_and_target(tmp_path_factory.mktemp("renamed"), shards=3) as fleets:
        yield fleets


@dataclass
class Place(ChangingFleet):
    """A fleet whose fleet.toml gives its servers other ids, and the rows of the servers at each cut."""

    whole: Fleet | None = None
    text: str = ""
    held: dict[int, dict[str, dict[str, bytes]]] = field(default_factory=dict)

    def name(self, ids: Mapping[str, str], shards: tuple[str, ...] = SHARDS, more: str = "") -> None:
        """Write a fleet.toml with these shards, whose nodes have other ids, and with `more` at the top."""
        path = self.fleet.path
        path.write_text(f"{more}\n{with_ids(self.text, ids, shards)}")
        self.runs = Runs(load_fleet(path), self.runs.spark)

    def into(self, ids: Mapping[str, str]) -> Fleet:
        """Return the target with these ids in its file."""
        path = self.folder / "target-of-ids.toml"
        path.write_text(with_ids(self.target.path.read_text(), ids, SHARDS))
        return load_fleet(path)

    def servers_now(self) -> dict[str, str]:
        """The dsns by the ids of the embedded fleet, of the primaries that fleet.toml lists."""
        assert self.whole is not None
        listed = {node.dsn for node in self.fleet.primaries}
        return {node.id: node.dsn for node in self.whole.primaries if node.dsn in listed}

    def next(self, **options: Any) -> Increment:
        self.write()
        commit = self.increment(**options)
        assert isinstance(commit, Increment)
        self.held[commit.increment] = {server: sorted_copies(dsn) for server, dsn in self.servers_now().items()}
        return commit

    def check_held(self, *increments: int, ids: Mapping[str, str]) -> None:
        """Restore each increment into a target with these ids, and compare the rows of each server with its target."""
        databases = {node.id: node.dsn for node in self.target.primaries}
        for number in increments:
            self.runs.restore("chain", self.into(ids), number, use_backup_copies=True)
            expected = self.held[number]
            assert {server: sorted_copies(databases[server]) for server in expected} == expected


def with_ids(text: str, ids: Mapping[str, str], shards: tuple[str, ...]) -> str:
    """Return fleet.toml with other ids, and without the nodes of other shards."""
    head, *nodes = re.split(r"(?m)^(?=\[\[node\]\])", text)
    *_, last = nodes
    after = last[found.start() :] if (found := re.search(r"(?m)^\[(?!\[node)", last)) else ""
    nodes[-1] = last.removesuffix(after)
    kept = [node for node in nodes if any(f'"{shard}"' in node for shard in shards)]
    renamed = [
        re.sub(r'(?m)^(id|backup_of) = "(.*)"$', lambda key: f'{key[1]} = "{ids.get(key[2], key[2])}"', node)
        for node in kept
    ]
    return "".join([head, *renamed, after])


@pytest.fixture
def place(servers: tuple[EmbeddedFleet, EmbeddedFleet], tmp_path: Path, spark: SparkSession) -> Iterator[Place]:
    source, target = servers
    fleet = configure_fleet(source, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    into = configure_fleet(target, tmp_path / "target.toml", f"file://{tmp_path}/other-store")
    found = Place(source, into, Runs(fleet, Ready(spark)), tmp_path, whole=fleet, text=fleet.path.read_text())
    for number, node in enumerate(fleet.primaries):
        found.execute(
            node.id,
            "DROP TABLE IF EXISTS seen",
            "CREATE TABLE seen (id int PRIMARY KEY, text text NOT NULL)",
            f"INSERT INTO seen SELECT n, '{node.id}: ' || n FROM generate_series({number}, 50) n",
        )
    for standby in (node.id for node in fleet.nodes if node.backup_of):
        found.await_replay(standby)
    with dropping_slots(fleet):
        found.runs.init()
        yield found


def test_a_renamed_shard_goes_on_and_nothing_is_copied_again(place: Place) -> None:
    place.runs.full("chain")
    first = place.next()
    place.name(EAST)
    code, document = run_here(place.fleet, "init")
    assert (code, document["to_copy"]) == (0, [])
    assert [(one["node"], one["listed"]) for one in document["renamed"]] == [*EAST.items()]
    shown = run_as_text(place.fleet, "init")
    assert "east is s3 in chain: its increments go on with it under that id" in shown
    code, document = run_here(place.fleet, "create", "chain", "--incremental", "--dry-run")
    assert code == 0
    assert "s3 is called east in fleet.toml now: the chain still calls it s3" in " ".join(document["notes"])
    second = place.next()
    assert (second.renamed, second.renewed, second.retired) == (EAST, {}, ())
    assert second.counts["rows"] == 0
    assert second.segments.keys() == first.segments.keys()
    third = place.next()
    assert (third.renamed, third.renewed) == (EAST, {})
    for increment in (None, 1, 2):
        assert place.check(increment).result == VALID
    # A target may have either id; before the change, too.
    place.check_held(1, 3, ids=EAST)
    place.check_held(2, ids={})
    (entry,) = run_here(place.fleet, "list")[1]["snapshots"]
    assert not entry["slot_problems"]
    shown = run_as_text(place.fleet, "show", "chain")
    assert shown.count("is called east in fleet.toml, before s3") == 1


def test_a_restore_takes_either_id_of_a_node_in_its_options(place: Place) -> None:
    """Whichever of the ids the target's file lists, `--node`, and `--route` by a name or by a column, take both."""
    place.runs.full("chain")
    for number, shard in enumerate(SHARDS):
        place.execute(
            shard,
            "DROP TABLE IF EXISTS said",
            "CREATE TABLE said (id int PRIMARY KEY, region text)",
            f"INSERT INTO said SELECT {number * 10} + n, (ARRAY['s1', 's2', 's3', 'east'])[n]"
            " FROM generate_series(1, 4) n",
        )
    place.name(EAST)
    place.next()
    dsn, spark = place.target.node("s3").dsn, place.runs.spark.running

    def restored(*words: str) -> dict[str, bytes]:
        # A restore of some tables replaces no database.
        for node in place.target.primaries:
            execute(
                with_database(node, "postgres").dsn, f'DROP DATABASE IF EXISTS "{database_name(node.dsn)}" WITH (FORCE)'
            )
        to = ["--to", str(place.folder / "target-of-ids.toml"), "--yes"]
        code, document = run_here(place.fleet, "restore", "chain", *words, *to, spark=spark)
        assert code == 0, (words, document)
        return sorted_copies(dsn)

    for ids in ({}, EAST):
        place.into(ids)
        for node in ("s3", "east"):
            assert restored("--node", node) == place.held[1]["s3"], (ids, node)
            rows = restored("--group", "public.said", "--route", f"public.said=node('{node}')")["public.said"]
            assert rows.count(b"\n") == 12, (ids, node)
        rows = restored("--group", "public.said", "--route", "public.said=column(region)")["public.said"]
        assert (rows.count(b"\ts3\n"), rows.count(b"\teast\n"), rows.count(b"\n")) == (3, 3, 6), ids
    for shard in SHARDS:
        place.execute(EAST.get(shard, shard), "DROP TABLE said")


def test_a_renamed_shard_is_retired_under_its_new_id(place: Place) -> None:
    place.runs.full("chain")
    place.name(EAST)
    place.next()
    place.name(EAST, more='retired = ["east"]')
    left = place.next()
    assert left.retired == ("s3",)
    assert left.renamed == EAST
    for node in place.servers.nodes:
        assert len(slots_of(node.dsn())) == (0 if node.id in EAST else 1)
    place.name(EAST, shards=("s1", "s2"))
    place.next()
    place.name(EAST)
    with pytest.raises(FleetTopologyError, match="s3: the chain had a shard with this id"):
        place.increment()
    for increment in (1, 3):
        assert place.check(increment).result == VALID
    # The newest commit still knows which shard that was.
    place.check_held(1, 3, ids=EAST)


def test_all_shards_are_renamed_and_get_their_ids_back(place: Place) -> None:
    """The lock needs no `init --forget-nodes`: the recorded servers are the same."""
    full = place.runs.full("chain")
    place.name(ALL)
    place.runs.init()
    first = place.next()
    assert (first.renamed, first.renewed) == (ALL, {})
    # A full snapshot has the ids of the file, and none of the chain's.
    other = place.runs.full("other")
    assert {node.node for node in other.cut.nodes} == {"north", "south", "east"}
    twice = {**ALL, "s3": "west", "s3-b1": "west-b1"}
    place.name(twice)
    second = place.next()
    assert (second.renamed, second.renewed) == (twice, {})
    place.name({"s1": "north"})
    third = place.next()
    assert (third.renamed, third.renewed) == ({"s1": "north"}, {})
    place.name({})
    fourth = place.next()
    assert (fourth.renamed, fourth.renewed) == ({}, {})
    for name in ("chain", "other"):
        assert place.check(name=name).result == VALID
    place.check_held(1, 4, ids={})
    between = cut_time(full) + (cut_time(first) - cut_time(full)) / 2
    moment = between.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    into = str(place.into({}).path)
    code, plan = run_here(
        place.fleet, "restore", "chain", "--at", moment, "--exact", "--to", into, "--replace", "--dry-run"
    )
    assert code == 0, plan


def test_a_standby_under_another_id_is_recognised_by_its_slot(place: Place) -> None:
    place.runs.full("chain")
    place.name({"s2-b1": "replica"})
    first = place.next()
    assert (first.renamed, first.renewed, first.absent) == ({"s2-b1": "replica"}, {}, {})
    assert place.next().renamed == first.renamed
    # Without the slot, it is one that was added, and the other was removed.
    place.name({"s2-b1": "another"})
    (slot,) = slots_of(place.fleet.node("another").dsn)
    with psycopg.connect(place.fleet.node("another").dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
    third = place.next()
    assert third.renewed.keys() == {"another"}
    assert third.absent.keys() == {"s2-b1"}
    assert third.renamed == {"s2-b1": "replica"}
    assert place.next().renewed == {}
    assert place.check(2).result == VALID
    # The copy that has ended is named as left out.
    assert not place.check().conflicts
    place.check_held(4, ids={})


def test_ids_that_are_exchanged_or_given_to_another_shard_are_refused(place: Place) -> None:
    full = place.runs.full("chain")
    place.next()
    exchanged = {"s1": "s2", "s1-b1": "s2-b1", "s2": "s1", "s2-b1": "s1-b1"}
    place.name(exchanged)
    match = "its server and database are those of s[12], and the chain has another shard with the id s[12]"
    with pytest.raises(FleetTopologyError, match=match) as refused:
        place.increment()
    assert refused.value.ends_chain is ChainEnd.PERHAPS
    assert "--replaced" in refused.value.hint
    with pytest.raises(FleetTopologyError, match="s1: it has the id of a shard of the chain that is called s2 now"):
        place.increment(replaced=("s1",))
    # A cycle, and an id that another shard left.
    place.name({"s1": "s2", "s2": "s3", "s3": "s4"})
    with pytest.raises(FleetTopologyError, match=match.replace("[12]", "[123]")):
        place.increment()
    assert read_chain(place.fleet.store.open(), "chain").last.increment == 1
    # Whoever insists gets both copied under their new ids.
    place.name(exchanged)
    second = place.next(replaced=("s1", "s2"))
    assert second.renewed.keys() == {"s1", "s1-b1", "s2", "s2-b1"}
    assert second.renamed == {}
    assert place.check().result == VALID
    place.check_held(1, ids={})
    place.check_held(2, ids=exchanged)
    assert full.increment == 0


def test_an_added_shard_can_not_have_the_id_that_another_had(place: Place) -> None:
    place.name({}, shards=("s1", "s2"))
    place.runs.full("chain")
    # s2 is called east, and another server has its id.
    place.name({"s2": "east", "s2-b1": "east-b1", "s3": "s2", "s3-b1": "s2-b1"})
    with pytest.raises(FleetTopologyError, match="node s2: it has the id of a shard of the chain that is called east"):
        place.increment()
    place.name({"s2": "east", "s2-b1": "east-b1", "s3": "west", "s3-b1": "west-b1"})
    first = place.next()
    assert first.renamed == {"s2": "east", "s2-b1": "east-b1"}
    assert first.renewed.keys() == {"west", "west-b1"}
    # The shard that has joined is renamed, too.
    ids = {"s2": "east", "s2-b1": "east-b1", "s3": "north", "s3-b1": "north-b1"}
    place.name(ids)
    second = place.next()
    assert second.renamed == {"s2": "east", "s2-b1": "east-b1", "west": "north", "west-b1": "north-b1"}
    assert second.renewed == {}
    place.next()
    assert place.check().result == VALID
    place.check_held(1, 3, ids=ids)


def test_a_retired_shard_with_another_id_is_copied_again_as_the_file_says(place: Place) -> None:
    place.runs.full("chain")
    place.next()
    place.name(EAST, more='retired = ["s3"]')
    second = place.next()
    assert second.retired == ("s3",)
    assert second.renewed.keys() == {*EAST.values()}
    assert second.renamed == {}
    place.name(EAST)
    place.next()
    for increment in (1, 3):
        assert place.check(increment).result == VALID
    for node in place.servers.nodes:
        assert len(slots_of(node.dsn())) == 1
    place.check_held(1, ids={})
    place.check_held(3, ids=EAST)


def test_a_chain_with_renamed_nodes_is_merged_copied_drilled_and_contradictions_are_refused(place: Place) -> None:
    spark = place.runs.spark.running
    place.runs.full("chain")
    place.next()
    place.name(EAST)
    second = place.next()
    check_contradictions(place, second)
    place.next()
    assert run_here(place.fleet, "merge", "chain", "--to", "3", spark=spark)[0] == 0
    place.next()
    assert place.check().result == VALID
    second_store = place.folder / "second.toml"
    text = re.sub(r"(?m)^store = .*$", f'store = "file://{place.folder}/second"', place.fleet.path.read_text())
    second_store.write_text(text)
    code, copied = run_here(place.fleet, "copy", "chain", "--to", str(second_store))
    assert code == 0, copied
    place.check_held(2, 4, ids=EAST)
    own, place.runs = place.runs, Runs(load_fleet(second_store), place.runs.spark)
    place.check_held(4, ids=EAST)
    place.runs = own
    # An assertion has the id of the file, whatever the snapshot has.
    own.fleet.path.write_text(
        own.fleet.path.read_text()
        + '\n[[drill.assertion]]\nnode = "east"\nsql = "SELECT count(*) > 0 FROM seen"\nexpected = true\n'
    )
    code, drilled = run_here(own.fleet, "drill", "chain", "--to", str(place.into(EAST).path), spark=spark)
    assert [one["holds"] for one in drilled["assertions"]] == [True], drilled
    assert code == 0
    code, live = run_here(own.fleet, "check", "chain", "--live", spark=spark)
    assert (code, live["result"]) == (0, VALID), live


def check_contradictions(place: Place, commit: Increment) -> None:
    """Commits whose ids could mean two nodes, or none, are refused."""
    store, path = place.fleet.store.open(), place.folder / "store" / commit_key("chain", commit.increment)
    whole = path.read_bytes()
    for renamed, message in (
        ({"s3": "s1"}, "the id of another node: s1"),
        ({"s3": "east", "s2": "east"}, "contains id 'east' twice"),
        ({"s9": "east"}, "names s9, which is not in the snapshot"),
        ({"s3": ""}, "renamed"),
    ):
        path.write_bytes(seal(structs.replace(commit, renamed=renamed)))
        with pytest.raises(ManifestError, match=message):
            read_chain(store, "chain", commit.increment)
        path.write_bytes(whole)
    read_chain(store, "chain")


def test_a_create_that_is_killed_under_new_ids_leaves_nothing(place: Place) -> None:
    """Its operation has the ids of the file; whoever settles it may have others by then."""
    place.runs.full("chain")
    place.name(EAST)
    (slot,) = slots_of(place.fleet.node("east").dsn)
    with psycopg.connect(place.fleet.node("east").dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
    # The slot of the chain, then the slots that export the rows.
    for point, count, ids in ((CrashPoint.INTENT_STORED, 1, EAST), (CrashPoint.SLOT_MADE, 3, ALL)):
        place.name(ids)
        program = [sys.executable, "-m", "tests.faults.signalled_command", "SIGKILL", str(point), str(count), "--"]
        words = ["--fleet", str(place.fleet.path), "create", "chain", "--incremental"]
        done = subprocess.run([*program, *words], capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
    left = slots_of(place.fleet.node("east").dsn)
    assert len(left) > 1
    # Another command than an increment settles it, under still other ids.
    place.name({**ALL, "s3": "west", "s3-b1": "west-b1"})
    place.runs.full("other")
    assert not read_open_operations(place.fleet.store.open())
    first = place.next()
    assert first.renewed.keys() == {"s3"}
    assert place.check().result == VALID
    for node in place.servers.nodes:
        assert len(slots_of(node.dsn())) == 2
    place.check_held(1, ids={})


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_chain_is_deleted_under_new_ids_and_leaves_no_slot(place: Place, *, is_recorded: bool) -> None:
    place.runs.full("chain")
    place.name({"s2-b1": "replica", **EAST})
    if is_recorded:
        place.next()
    code, deleted = run_here(place.fleet, "delete", "chain", "--force", "--yes")
    assert (code, deleted["slots_unknown"], deleted["slots_left"]) == (0, [], []), deleted
    assert not any(slots_of(node.dsn()) for node in place.servers.nodes)


def test_a_killed_restore_is_resumed_and_undone_under_either_id(place: Place) -> None:
    """The records in its databases have the ids of the snapshot."""
    spark = place.runs.spark.running
    place.runs.full("chain")
    place.name(EAST)
    place.next()
    into = {str(ids): place.into(ids).path.rename(place.folder / f"{len(ids)}.toml") for ids in ({}, EAST)}
    before = {node.id: sorted_copies(node.dsn) for node in place.target.primaries}
    program = [sys.executable, "-m", "tests.faults.signalled_command", "SIGKILL", str(RestoreCrashPoint.CLOSED), "1"]
    words = [
        "--",
        "--fleet",
        str(place.fleet.path),
        "restore",
        "chain",
        "--replace",
        "--yes",
        "--to",
        str(into[str(EAST)]),
    ]
    for command, other in (("restore-abandon", {}), ("restore-abandon", EAST), ("restore-resume", EAST)):
        done = subprocess.run([*program, *words], capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        options = ["--yes"] if command == "restore-abandon" else []
        code, document = run_here(place.fleet, command, "chain", "--to", str(into[str(other)]), *options, spark=spark)
        assert code == 0, document
        now = {node.id: sorted_copies(node.dsn) for node in place.target.primaries}
        assert now == (before if command == "restore-abandon" else place.held[1])


def test_a_shard_gets_another_id_and_fails_over_at_the_same_time(tmp_path: Path, spark: SparkSession) -> None:
    """The database is identified on the promoted standby, and the chain goes on with it without a gap."""
    try:
        source = start_fleet(tmp_path / "fleet", shards=2, backups=1)
        target = start_fleet(tmp_path / "target", shards=3, backups=0, like_shared=True)
        fleet = configure_fleet(source, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
        into = configure_fleet(target, tmp_path / "target.toml", f"file://{tmp_path}/other-store")
        place = Place(source, into, Runs(fleet, Ready(spark)), tmp_path, whole=fleet, text=fleet.path.read_text())
        for node in fleet.primaries:
            place.execute(node.id, "CREATE TABLE seen (id int PRIMARY KEY, text text NOT NULL)")
        place.await_replay("s1-b1")
        place.runs.init()
        place.runs.full("chain")
        place.next()
        place.await_replay("s1-b1")
        place.stop("s1")
        place.execute("s1-b1", "SELECT pg_promote(true, 60)")
        place.name({"s1": "east", "s1-b1": "east-b1"})
        place.promoted["east"] = "east-b1"
        place.write()
        second = place.increment()
        assert isinstance(second, Increment)
        assert second.renamed == {"s1": "east", "s1-b1": "east-b1"}
        assert (second.renewed, second.timelines) == ({}, {"s1": 2})
        assert second.absent.keys() == {"s1-b1"}
        assert not place.check().conflicts
        place.runs.restore("chain", place.into({"s1": "east"}), 2)
        restored = {node.id: sorted_copies(node.dsn) for node in place.target.primaries}
        assert [restored["s1"], restored["s2"]] == place.states[2]
    finally:
        stop_fleet(tmp_path / "fleet", delete=True)
        stop_fleet(tmp_path / "target", delete=True)


def test_a_shard_that_may_be_another_is_not_guessed_while_it_is_away(place: Place) -> None:
    place.runs.full("chain")
    place.name(EAST)
    place.fleet.path.write_text(re.sub(r"/s3(-b1)?&", r"/nowhere\1&", place.fleet.path.read_text()))
    place.runs = Runs(load_fleet(place.fleet.path), place.runs.spark)
    with pytest.raises(NodeUnreachableError, match="east: it can't be reached, and may be a shard of the chain"):
        place.increment()
    with pytest.raises(NodeUnreachableError):
        archive_ahead(place.fleet, "chain", Silent())
    place.name({}, shards=("s1", "s2"))
    with pytest.raises(BaselineChangedError, match="s3: it is a shard of the chain, but not in fleet"):
        place.increment()
    place.name(EAST)
    assert archive_ahead(place.fleet, "chain", Silent()).needs_increment
    assert place.next().renewed == {}
    assert not archive_ahead(place.fleet, "chain", Silent()).needs_increment


def test_a_restore_to_exchanged_ids_says_so_before_anything_is_replaced(place: Place) -> None:
    """The servers of s1 and s2 have each other's ids in the file of the target."""
    place.runs.full("chain")
    for ids, shards in (
        ({"s1": "s2", "s2": "s1", "s1-b1": "s2-b1", "s2-b1": "s1-b1"}, {"s1": "s2", "s2": "s1"}),
        ({}, {}),
    ):
        place.name(ids)
        text = run_as_text(place.fleet, "restore", "chain", "--replace", "--dry-run")
        found = re.findall(r"(s\d): in the snapshot, this server and database are those of (s\d)", text)
        assert dict(found) == shards, text


def test_a_dead_increment_takes_no_slot_from_the_server_that_has_an_id_now(place: Place) -> None:
    """It had begun the copy of a node whose id another server of the chain has by the time that it is settled."""
    place.runs.full("chain")
    store, s3 = place.fleet.store.open(), place.fleet.node("s3")
    (slot,) = slots_of(s3.dsn)
    own = read_chain(store, "chain").baseline["s3"].place
    for renewed, left in (("7/5", [slot]), (own, [])):
        dead = structs.replace(
            new_operation("create", "chain", 1, ("s3",)), renews={"s3": renewed}, turn=free_turn(store, "chain", 1)
        )
        write_operation_record(store, "intent", dead)
        noting = Noting(Silent())
        settle_operations(store, place.fleet, noting)
        assert slots_of(s3.dsn) == left
        assert any("is not listed under another id" in note for note in noting.notes) == bool(left), noting.notes
        assert not is_open(store, dead.operation)
