"""A chain over a shard whose standbys are promoted: increments by the product's functions, and what must hold of them.

To the promises of failover_chain.py this adds, from what the model knows of every server:

- `surviving`: an increment restores to exactly what its primary had committed, and so does every standby's copy.
- `renewal`: a copy begins again if its server lacks WAL that the archive has, segments that no commit lists included,
  or a slot from which the archive can be continued. Else it never does.
- `named`: an increment that holds lost transactions is named as such, and none that does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from msgspec import structs
from msgspec.structs import replace

from cutline.fleet.config import Node
from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.nodes.baseline import FoundNode, check_topology
from cutline.nodes.roles import ServerState, find_promoted, with_exchanged
from cutline.nodes.sessions import Absence, Sessions
from cutline.snapshots.create import absent_copies, make_cut, renewal
from cutline.snapshots.create.context import ChainState, CreateContext
from cutline.snapshots.create.renewal import NewCopies, _CopyPlan
from cutline.snapshots.operations import old_primaries
from cutline.snapshots.records.commit import Increment, LostWal
from cutline.storage.errors import SnapshotError
from cutline.wal.drain.replay import NOT_RECEIVING, ReplayState, replay_error
from cutline.wal.drain.slots import slot_name
from cutline.wal.segments.archive import archive_prefix, last_number, segment_key
from cutline.wal.segments.segments import COMMIT, MARKER, read_events, read_metadata
from tests.simulation import failover_chain
from tests.simulation.failover_chain import (
    FULL,
    KILL_IN_DRAIN_ODDS,
    NAME,
    BaseCopy,
    FailoverChain,
    ModelConnection,
    Watch,
    one_by_one,
    switches_before,
)
from tests.simulation.failover_model import Record, Server
from tests.simulation.fleet_records import APPENDED, Change
from tests.simulation.promotion_model import PRIMARY, PromotionWorld, committed
from tests.simulation.schedule import KilledError

SLOT = slot_name(FULL)
# More than any create reads here: each archives one segment of a node.
RECORDS = 100
Key = tuple[int, int, int, bytes]
# Timelines, and where they began.
Timelines = tuple[tuple[int, int], ...]


@dataclass(slots=True)
class PromotionChain(FailoverChain):
    """The chain.

    A create dies after `segments_left` segments, when only the standbys are drained if `only_standbys`, or right before
    its commit if `dies_at_end`. `finish` is the finish marker of the last cut, and `timelines` are those of the server
    from which the archive of the primary was extended last.
    """

    world: PromotionWorld
    segments_left: int = 0
    only_standbys: bool = False
    dies_at_end: bool = False
    finish: Record | None = None
    before: Before | None = None
    timelines: Timelines = ((1, 0),)

    # Sessions, as the product finds the roles.

    def open_sessions(self) -> Sessions:
        """Connect to the servers in their present roles; raise the errors of check_topology."""
        world = self.world
        standby, primary = (ServerState(is_in_recovery=recovers, system_identifier="7") for recovers in (True, False))
        states = {node.id: standby if node.id in world.standbys else None for node in self.fleet.nodes}
        states |= dict.fromkeys({world.listed, world.rival or world.listed}, primary)
        promoted = find_promoted(self.fleet, states)
        assert promoted in ({}, {PRIMARY: world.listed}) or world.rival
        fleet = with_exchanged(self.fleet, promoted)
        absent, connections, found = dict[str, Absence](), {}, {}
        for node in fleet.nodes:
            try:
                connection = self.connect(node)
            except SnapshotError as error:
                if node.backup_of is None:
                    raise
                absent[node.id] = Absence(error.message)
                continue
            connections[node.id] = connection
            found[node.id] = self.found(node)
        check_topology([node for node in fleet.nodes if node.id not in absent], found)
        identities = {name: one.identity for name, one in found.items()}
        sessions = Sessions(fleet, fleet.nodes, connections, identities, LeavingWatch(), absent=absent)  # type: ignore[arg-type]
        return replace(sessions, promoted=promoted)

    def found(self, node: Node) -> FoundNode:
        """The node's answer: what accepts writes shows that."""
        identity = self.identity(node)
        if node.backup_of is not None and self.listed_id(node.id) == self.world.rival:
            identity = structs.replace(identity, in_recovery=False)
        return FoundNode(identity, self.listed_id(node.id), SimpleNamespace())  # type: ignore[arg-type]

    def listed_id(self, node: str) -> str:
        # The roles of two servers are exchanged, so this also gives the role of a server that fleet.toml names.
        return {PRIMARY: self.world.listed, self.world.listed: PRIMARY}.get(node, node)

    def listed_server(self, node: str) -> Server | None:
        """None also for a server that is down: what a dead create has left on it is dropped when it is back."""
        return self.world.server(self.listed_id(node))

    # What may go wrong.

    def kill_sometimes(self, odds: int) -> None:
        """Die when enough segments are stored."""
        if odds == KILL_IN_DRAIN_ODDS and self.segments_left:
            self.segments_left -= 1
            if not self.segments_left:
                raise KilledError

    def _make_cut(self, context: CreateContext, state: ChainState) -> make_cut.ArchivedCut:
        cut = FailoverChain._make_cut(self, context, state)
        if self.dies_at_end:
            raise KilledError
        return cut

    def count_waiting(self) -> int:
        """How many transactions of the primary wait to be archived."""
        end = Before.of(self).end
        return sum(record.op == COMMIT and record.end > end for record in self.world.servers[0].records)

    # What must hold.

    def create(self) -> bool:
        """Take an increment; note before what the archive has."""
        self.before = Before.of(self)
        self.failed = None
        # A create that dies between two segments has one for each record.
        with patch.object(failover_chain, "SIZES", (1 if self.segments_left else RECORDS,)):
            done = FailoverChain.create(self)
        if done or Before.of(self).end > self.before.end:
            self.timelines = timelines_of_server(self.world.servers[0])
        self.segments_left, self.only_standbys, self.dies_at_end = 0, False, False
        return done

    def _create(self) -> None:
        with asking_standbys(self):
            FailoverChain._create(self)

    def _judge(self, commit: Increment, new: NewCopies) -> None:
        FailoverChain._judge(self, commit, new)
        before, server = self.before, self.world.servers[0]
        assert before
        survivors = committed(server)
        shown = self.shown[-1].parts
        assert shown == survivors, f"surviving: parts {shown ^ survivors} of the primary's copy"
        for node in self.chain.present:
            copy = self.restored_copy(self.chain, node).parts
            assert copy == survivors, f"surviving: parts {copy ^ survivors} of the copy of {node}"
        renewed, records = commit.renewed.get(PRIMARY), keys_of(server.records)
        lacks = before.held - records
        at = before.slot
        is_needed = bool(lacks) or at is None or at > before.end
        assert (renewed is not None) == is_needed, f"renewal: {renewed and renewed.reason}, and needed: {is_needed}"
        self.tally["primary renewed"] += renewed is not None
        if renewed is not None:
            self._judge_names(commit.increment, renewed.lost, before, records)
        cut = commit.cut.of(PRIMARY)
        self.finish = next(record for record in server.records if record.op == MARKER and record.end == cut.finish)

    def _judge_names(self, number: int, lost: LostWal | None, before: Before, records: frozenset[Key]) -> None:
        server = self.world.servers[0]
        since = None if lost is None else lost.since
        first = next((k for k in range(before.begun, number) if not self.shown[k].parts <= committed(server)), None)
        assert first is None or (since is not None and since <= first), (
            f"named: {first} holds lost transactions: {lost}"
        )
        if not before.held - records:
            assert since is None, f"named: {lost}, and nothing is lost"
            return
        # If the histories show where the server left that of the archive, that is where the loss begins.
        timelines = timelines_of_server(server)
        shared = {
            key for key in before.held if began_before(timelines, key[1]) == began_before(before.timelines, key[1])
        }
        if shared <= records:
            assert lost is not None, "named: nothing is named, and the histories show what is lost"
            wrong = [end for _, end, *_ in before.held - shared if end <= lost.after]
            wrong += [end for _, end, *_ in shared if end > lost.after]
            assert not wrong, f"named: {lost}, and {wrong} are on the other side of the switch"
            # Of copies before this one, too: either they had the same WAL, or their renewal has named them.
            within = [k for k in range(number) if before.positions[k] <= lost.after]
            beyond = within[-1] + 1 if within else 0
            assert since == (beyond if beyond < number else None), f"named: {lost}, and {beyond} is beyond the switch"
            self.tally["shown what is lost"] += 1
        self.tally["unknown what is lost"] += lost is not None and lost.after == ORIGIN


@dataclass(frozen=True, slots=True)
class Before:
    """What the archive of the primary had before a create, on what timelines, and the slot of its server."""

    held: frozenset[Key]
    end: Lsn
    slot: Lsn | None
    timelines: Timelines
    begun: int
    positions: Mapping[int, int]

    @classmethod
    def of(cls, chain: PromotionChain) -> Before:
        """Read it from the store, and from the model's servers."""
        records, store = chain.chain, chain.store
        segments = list(records.segments(PRIMARY))
        prefix, number = archive_prefix(NAME, PRIMARY, records.archive(PRIMARY)), last_number(tuple(segments))
        while store.exists(key := segment_key(prefix, number + 1)):
            number += 1
            segments.append(read_metadata(store, PRIMARY, key, number).segment)
        held = {key for segment in segments for key in keys_of_events(read_events(store, segment))}
        held |= keys_of([chain.finish]) if chain.finish else frozenset()
        end = segments[-1].through if segments else records.bases[PRIMARY]
        server = chain.world.servers[0]
        at = server.slots.get(SLOT)
        begun = records.begun(PRIMARY)
        positions = {k: int(records.up_to(k).position(PRIMARY)) for k in range(records.last.increment + 1)}
        return cls(frozenset(held), end, None if at is None else Lsn(at), chain.timelines, begun, positions)


def timelines_of_server(server: Server) -> Timelines:
    """The timelines of the server, and where they began."""
    numbers, begins = (
        (*sorted(server.switches), server.timeline),
        (0, *(at for _, at in sorted(server.switches.items()))),
    )
    return tuple(zip(numbers, begins, strict=True))


def began_before(timelines: Timelines, position: int) -> Timelines:
    """Those that began before the position: two servers for which they are the same have the same WAL up to there."""
    return tuple(one for one in timelines if one[1] < position)


def keys_of(records: list[Record]) -> frozenset[Key]:
    """What tells records apart in an archive: the event, its end, its time, and a marker's content."""
    return frozenset((one.op, one.end, one.at if one.op != MARKER else 0, one.content) for one in records)


def keys_of_events(events: object) -> Iterator[Key]:
    """The same, of a segment's events."""
    for row in events.select(["op", "end_lsn", "seq", "row"]).to_pylist():  # type: ignore[attr-defined]
        is_marker = row["op"] == MARKER
        yield row["op"], row["end_lsn"], 0 if is_marker else row["seq"], row["row"] if is_marker else b""


class LeavingWatch(Watch):
    """A watch of nodes that always answer, some of which are left out."""

    def leave_out(self, _node: str) -> None: ...


@dataclass(slots=True)
class StandbyCalls:
    """What the product asks of standbys."""

    chain: PromotionChain

    def read_timeline(self, node: Node) -> int:
        return self.chain.connect(node).server.timeline

    def read_switches(self, node: Node, timeline: int) -> dict[int, Lsn]:
        server = self.chain.connect(node).server
        return switches_before(server, timeline)

    def replay_state(self, node: str, connection: ModelConnection, needed: Lsn) -> ReplayState:
        self.chain.world.replicate()
        end = connection.server.end
        return ReplayState(node, Lsn(end), max(needed - end, 0), None, NOT_RECEIVING, None)

    def read_replay(self, node: str, connection: ModelConnection, needed: Lsn) -> ReplayState | None:
        state = self.replay_state(node, connection, needed)
        return state if state.replayed < needed else None

    def check_replayed(self, connection: ModelConnection, node: Node, needed: Lsn) -> None:
        if state := self.read_replay(node.id, connection, needed):
            raise replay_error(state, f"node {node.id}", 0.0)

    def await_standbys(self, standbys: list[Node], needed: dict[str, Lsn], *_others: object) -> None:
        for node in standbys:
            self.check_replayed(self.chain.connect(node), node, needed[node.shard])

    def run_tasks(self, work: Callable[[Any], Any], tasks: list[Any], *_others: object) -> list[Any]:
        if self.chain.only_standbys:
            for task in tasks:
                if task.node.backup_of is not None:
                    work(task)
            raise KilledError
        return [work(task) for task in tasks]

    def ask_nodes(self, nodes: list[Node]) -> dict[str, FoundNode]:
        found = {}
        for node in nodes:
            server = self.chain.world.server(node.id)
            if server is not None:
                found[node.id] = self.chain.found(node)
        return found

    def copy_standbys(self, context: CreateContext, new: NewCopies, nodes: list[Node], *_others: object) -> NewCopies:
        """Create the slots of standbys, and copy what they have."""
        positions = dict[str, Lsn]()
        for node in nodes:
            server = self.chain.connect(node).server
            server.slots[SLOT] = server.end
            self.chain.copies[context.operation.id, node.id] = copy_of_server(self.chain.world, server)
            positions[node.id] = Lsn(server.end)
        return replace(new, positions={**new.positions, **positions})


def copy_of_server(world: PromotionWorld, server: Server) -> BaseCopy:
    """What a copy of the server shows now."""
    parts = committed(server)
    rows = {row: number for number in sorted(parts) for row in world.parts[number].writes}
    lines = (Change(0, 0, APPENDED, number) for number in sorted(parts))
    return BaseCopy(parts, (*lines, *(Change(0, 0, row, number) for row, number in rows.items())))


@contextmanager
def asking_standbys(chain: PromotionChain) -> Iterator[None]:
    """Let the product ask the standbys of the model as well."""
    calls = StandbyCalls(chain)
    replaced: dict[object, dict[str, object]] = {
        absent_copies: {
            "in_parallel": one_by_one,
            "read_timeline": calls.read_timeline,
            "read_switches": calls.read_switches,
            "read_replay": calls.read_replay,
            "replay_state": calls.replay_state,
            "_flush_for_late": lambda *late: None,
        },
        failover_chain.draining: {"check_replayed": calls.check_replayed},
        make_cut: {"await_standbys": calls.await_standbys, "run_own_tasks": calls.run_tasks},
        old_primaries: {
            "identify": lambda node, connection: chain.found(node),
            "ask_nodes": calls.ask_nodes,
        },
        renewal: {
            "_plan_copies": lambda *of: _CopyPlan({}, {}, frozenset(), {}),
            "_copy_standbys": calls.copy_standbys,
        },
    }
    with ExitStack() as stack:
        for module, values in replaced.items():
            for name, value in values.items():
                stack.enter_context(patch.object(module, name, value))
        yield


def new_chain(standbys: int, tally: Counter[str]) -> PromotionChain:
    """A chain of which only the full snapshot is there."""
    return PromotionChain(PromotionWorld(standbys), tally)
