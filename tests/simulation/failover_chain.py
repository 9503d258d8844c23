"""A chain over a fleet whose primaries fail over: increments by the product's functions, and what must hold of them.

The checks of the nodes, the sessions, the lock, the drain with its decoder, the cut, the copies that begin again, and
the commits are the product's. Here is all that is patched: what asks a server, waits, or uses threads. At each of these
calls the world goes on, so a server may fail over between any two of them.

A commit is judged when it is stored, by what the surviving servers have; afterwards it must not change any more.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psycopg
import pyarrow as pa
from msgspec.structs import replace

from cutline.columns.bytes_column import BytesColumn, from_list
from cutline.fleet.config import Fleet, GroupRules, Node
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Silent
from cutline.nodes import lock as locks
from cutline.nodes import sessions as node_sessions
from cutline.nodes.baseline import NodeIdentity
from cutline.nodes.connections import raising_unreachable, unreachable_error
from cutline.nodes.lock import FleetLock
from cutline.nodes.sessions import Sessions
from cutline.nodes.timelines import parse_history
from cutline.snapshots.create import absent_copies, continuable, make_cut, prepare_tables, renewal
from cutline.snapshots.create.absent_copies import ENDING, switches_of, timelines_of
from cutline.snapshots.create.context import ChainState, CreateContext, CreateRequest, counted_increment, state_of
from cutline.snapshots.create.cut_attempt import plan_cut
from cutline.snapshots.create.prepare_tables import PreparedTables
from cutline.snapshots.create.renewal import NewCopies
from cutline.snapshots.ddl.table_changes import DdlPlan, ShardPlan, known_tables
from cutline.snapshots.operations.operation import Operation, new_operation
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import CutRecord, FullSnapshot, Increment, Previous
from cutline.storage.errors import RefusedError, SnapshotError
from cutline.storage.memory import InMemoryStore
from cutline.wal.cut.cut_values import NodeCut
from cutline.wal.cut.markers import MARKER_PREFIX, Marker, WrittenMarker
from cutline.wal.decoding.decoder import Decoded
from cutline.wal.drain import drain as draining
from cutline.wal.drain.lineage import agreed_position
from cutline.wal.drain.slots import SlotState, slot_name
from cutline.wal.segments.archive import Segment
from cutline.wal.segments.segments import (
    COMMIT,
    COMMIT_PREPARED,
    MARKER,
    PREPARE,
    ROLLBACK_PREPARED,
    SEGMENT_SCHEMA,
    read_changes,
)
from tests.run.own_sleep import own_sleep
from tests.simulation import promises
from tests.simulation.failover_model import FailoverWorld, Record, Server, is_prepared
from tests.simulation.fleet_model import seeded
from tests.simulation.fleet_records import APPENDED, WAL_BEGIN, Change, Part, Wave
from tests.simulation.made_cuts import ResolvedCut
from tests.simulation.runs import PromiseBrokenError
from tests.simulation.schedule import KilledError
from tests.unit.made_commits import MARKED_AT
from tests.wal import pgoutput_messages as pgoutput

NAME, FLEET_ID, FULL = "chain", "f", "20261120T110000Z-0000000000"
AT = datetime(2026, 11, 20, 11, 0, tzinfo=UTC)
LINES, INSERT = 99, ord("I")
KINDS = {COMMIT: b"C", PREPARE: b"P", COMMIT_PREPARED: b"K", ROLLBACK_PREPARED: b"r"}
# How many records of a slot are read at once, and make a segment.
SIZES = (1, 2, 8)
# A command is killed at one of so many calls, and after one of so many segments; one failure of so many brings another.
KILL_ODDS, KILL_IN_DRAIN_ODDS, TROUBLE_ODDS = 300, 10, 2
STORES = count()
START, FINISH = attrgetter("start"), attrgetter("finish")


@dataclass(frozen=True, slots=True)
class BaseCopy:
    """The rows of a node when its slot was created: the parts whose changes they show, and the last of each row."""

    parts: frozenset[int]
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore gives: the changes of every node, and all parts that they show."""

    changes: tuple[tuple[Change, ...], ...]
    parts: frozenset[int]


@dataclass(slots=True)
class ModelConnection:
    """A session on the server that a node had when it was opened; it is lost when another takes its place."""

    world: FailoverWorld
    node: str
    server: Server
    closed: bool = False
    # Without failover slots, which no simulation has.
    info = SimpleNamespace(server_version=170000)

    def __enter__(self) -> ModelConnection:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        self.closed = True

    def execute(self, query: object, _values: object = ()) -> SimpleNamespace:
        """Answer where the WAL ends, of a standby only if it is asked for its replay; or that a lock is held."""
        self.check()
        row: tuple[object] = (str(Lsn(self.server.end)),) if "_wal_" in str(query) else (True,)
        if "pg_current_wal" in str(query) and self.node not in map(str, range(len(self.world.servers))):
            row = (None,)
        return SimpleNamespace(fetchone=lambda: row)

    def check(self) -> None:
        """Let time pass; raise OperationalError if the session is lost."""
        self.world.pass_some()
        if self.closed or self.world.server(self.node) is not self.server:
            self.closed = True
            raise psycopg.OperationalError("the server closed the connection unexpectedly")


class Watch(SimpleNamespace):
    """A watch of nodes that always answer."""

    def check(self) -> None: ...

    def silent(self) -> dict[str, float]:
        return {}


@dataclass(slots=True)
class FailoverChain:
    """The chain, its store, and what its commits showed when they were stored."""

    world: FailoverWorld
    tally: Counter[str]
    store: InMemoryStore = field(default_factory=lambda: InMemoryStore(f"memory://failovers-{next(STORES)}"))
    copies: dict[tuple[str, str], BaseCopy] = field(default_factory=dict)
    shown: list[Restored] = field(default_factory=list)
    unsettled: set[str] = field(default_factory=set)
    may_kill: bool = True
    failed: SnapshotError | None = None
    reading: int = 0
    read: dict[str, list[Change]] = field(default_factory=dict)
    fleet: Fleet = field(init=False)
    chain: Chain = field(init=False)

    def __post_init__(self) -> None:
        names = [str(number) for number in range(len(self.world.nodes))]
        location: Any = SimpleNamespace(open=lambda: self.store, url=self.store.url)
        standbys = tuple(Node(name, "", backup_of=primary) for name, primary in self.world.standbys_of.items())
        nodes = (*(Node(name, "") for name in names), *standbys)
        self.fleet = Fleet(Path("fleet.toml"), "model", location, nodes, "exact", GroupRules(), "local[1]", {})
        for node in nodes:
            server = self.world.server(node.id)
            assert server
            server.slots[slot_name(FULL)] = WAL_BEGIN
            server.confirmed.append(WAL_BEGIN)
            self.copies[FULL, node.id] = BaseCopy(frozenset())
        begin = Lsn(WAL_BEGIN)
        cuts = tuple(NodeCut(name, begin, begin, begin, 0, (), (), (), MARKED_AT) for name in names)
        self.chain = Chain(
            FullSnapshot(
                snapshot=NAME, increment=0, operation=FULL, chain=FULL, created_at=MARKED_AT, seconds=1.0, comment="",
                counts={"bytes": 0, "changes": 0, "transactions": 0}, cut=_cut_record(cuts),
                sequences=dict.fromkeys(names, ()), segments={node.id: () for node in nodes}, fleet_id=FLEET_ID,
                global_id_form="exact", baseline=tuple(map(self.identity, nodes)),
                groups=dict.fromkeys(names, ()), base={node.id: begin for node in nodes}, copied=(),
                roles=dict.fromkeys(names, ()), rules=GroupRules(), tables=dict.fromkeys(names, ()),
                fingerprints=dict.fromkeys(names, "same"), slots_complete_at=dict.fromkeys(names, begin),
            )
        )  # fmt: skip
        self.shown.append(self.restored(self.chain))

    def identity(self, node: Node) -> NodeIdentity:
        """The node as it is found now; its server must not be down."""
        server = self.world.server(node.id)
        assert server
        standby = node.backup_of is not None
        return NodeIdentity(
            node.id, node.backup_of, "7", server.timeline, 5, "db", 180000, "UTF8", "C", "C", in_recovery=standby
        )

    def kill_sometimes(self, odds: int) -> None:
        """Kill the command at one of so many calls."""
        if self.may_kill and not self.world.choose(odds):
            raise KilledError

    def connect(self, node: Node, **_options: object) -> ModelConnection:
        """Connect to the server that the node has now."""
        self.world.pass_some()
        if (server := self.world.server(node.id)) is None:
            raise unreachable_error(node, psycopg.OperationalError("connection refused"))
        return ModelConnection(self.world, node.id, server)

    def open_sessions(self) -> Sessions:
        """Connect to all nodes; the identities are read at once, and a failover meanwhile is seen at the next call."""
        connections: dict[str, Any] = {node.id: self.connect(node) for node in self.fleet.nodes}
        identities = {node.id: self.identity(node) for node in self.fleet.nodes}
        return Sessions(self.fleet, self.fleet.nodes, connections, identities, Watch())  # type: ignore[arg-type]

    # What a create does.

    def create(self) -> bool:
        """Take an increment, as create_increment does; return whether it was committed."""
        self.unsettled = self._undo(self.unsettled)
        with patched(self):
            try:
                self._create()
            except KilledError:
                self.tally["killed"] += 1
                return False
            except SnapshotError as error:
                self.tally[f"failed: {error.slug}"] += 1
                self.failed = error
                self.world.events.append(f"the increment fails: {error.message}")
                return False
        return True

    def _create(self) -> None:
        sessions = self.open_sessions()
        absent_copies.leave_out_late(sessions, Silent(), 0.0)
        lock = FleetLock(sessions, "model", "create", _taken=dict.fromkeys(sessions.primaries, 1))
        lock.check_held()
        sessions.read_histories()
        chain = self.chain
        to_renew = absent_copies.find_renewable(sessions, chain)
        ended = continuable._check_nodes(self.store, sessions, chain, to_renew)
        to_renew |= {node: error.message for node, error in ended.items()}
        agreed = {node: lsn for node, error in ended.items() if (lsn := agreed_position(error)) is not None}
        chain.check_archive()
        seen = known_tables(chain)
        state = state_of(chain, GroupRules(), seen, {})
        while True:
            operation = Operation(new_operation("create", NAME, chain.last.increment + 1, tuple(sessions.connections)))
            context = CreateContext(CreateRequest(NAME), self.store, operation, lock)
            try:
                self._take(context, state, to_renew, agreed)
                # The commit has the number of those that died: what they have left is not dropped any more.
                self.unsettled.clear()
                return
            except ENDING as error:
                node = str(error.details.get("node"))
                self.unsettled |= self._undo(map(self.listed_id, to_renew))
                if node in to_renew:
                    raise
                to_renew = {**to_renew, node: error.message}
                agreed |= {} if (lsn := agreed_position(error)) is None else {node: lsn}
                self.tally["found while it was read"] += 1
            except SnapshotError:
                self.unsettled |= self._undo(map(self.listed_id, to_renew))
                raise
            except KilledError:
                self.unsettled |= {self.listed_id(node) for node in to_renew}
                raise

    def _undo(self, nodes: Iterable[str]) -> set[str]:
        """Drop the chain's slot on nodes, by their ids in fleet.toml; return those that don't answer."""
        left = set()
        for node in nodes:
            if server := self.listed_server(node):
                server.slots.pop(slot_name(FULL), None)
            else:
                left.add(node)
        return left

    def listed_id(self, node: str) -> str:
        """The id in fleet.toml of the server that has a role."""
        return node

    def listed_server(self, node: str) -> Server | None:
        """The server with this id in fleet.toml, if it answers."""
        return self.world.server(node)

    def _take(
        self, context: CreateContext, state: ChainState, to_renew: dict[str, str], agreed: dict[str, Lsn]
    ) -> None:
        sessions, operation, chain = context.sessions, context.operation, self.chain
        new = renewal.renew_copies(context, state, chain, to_renew, None, Silent())  # type: ignore[arg-type]
        with patch.object(renewal, "read_commit", lambda _store, _name, number: chain.commit_of(number)):
            new = replace(new, lost=renewal.find_lost(self.store, chain, agreed))
        state = new.state_after(state, operation.id, sessions)
        cut = self._make_cut(context, state)
        renewal.drop_left_out(context, new, slot_name(FULL))
        absent, renewed = absent_copies.absent_copies(chain, sessions, None), new.of(chain, sessions, {})
        commit = Increment(
            snapshot=NAME, increment=operation.increment, operation=operation.id, chain=FULL, created_at=MARKED_AT,
            seconds=1.0, comment="", counts={}, cut=cut.record, sequences=dict.fromkeys(chain.primaries, ()),
            segments={node: () if node in absent else cut.segments[node] for node in {**chain.parts, **renewed}},
            idle={node: last for node, last in cut.idle.items() if node not in absent}, absent=absent,
            left_out=absent_copies.left_out_standbys(chain, absent, sessions, renewed),
            timelines=timelines_of(chain, sessions, renewed), switches=switches_of(sessions, chain.last, absent),
            previous=Previous(chain.last.operation, chain.last.digest), history=chain.next_history,
            definition_changes=new.with_entries(None, renewed), renewed=renewed,
            slots_complete_at=dict(new.slots_complete_at),
        )  # fmt: skip
        commit = counted_increment(chain, commit, cut.ignored)
        context.lock.check_held()
        self.chain = chain.followed_by(commit)
        self._judge(commit, new)

    def _make_cut(self, context: CreateContext, state: ChainState) -> make_cut.ArchivedCut:
        """Make the cut; without the standbys that fail, if there are any."""
        while True:
            try:
                return make_cut.make_cut(context.lock, self._plan(context, state), None, self.store, Silent())
            except SnapshotError as error:
                if not absent_copies.leave_out_failed(context.sessions, error, Silent()):
                    raise

    def _plan(self, context: CreateContext, state: ChainState) -> make_cut.CutPlan:
        archived = prepare_tables.read_archived(self.store, NAME, state, context.sessions.nodes)
        shards = {node: ShardPlan((), (), (), {}) for node in self.chain.primaries}
        return plan_cut(context, state, PreparedTables(DdlPlan(shards, {}), archived.last_segments))

    # What must hold.

    def restored(self, chain: Chain) -> Restored:
        """The state at the chain's last commit, from its base copies and segments as a restore reads them."""
        found = [self.restored_copy(chain, node) for node in chain.primaries]
        return Restored(
            tuple(changes for one in found for changes in one.changes),
            frozenset().union(*(one.parts for one in found)),
        )

    def restored_copy(self, chain: Chain, node: str) -> Restored:
        """The state of one copy at the chain's last commit."""
        copy = self.copies[chain.archive(node), node]
        position, excluded = chain.position(node), chain.excluded(node)
        changes = list(copy.changes)
        for segment in chain.segments(node):
            stored = self.changes_in(segment)
            changes += [one for one in stored if one.lsn < position and one.lsn not in excluded]
        return Restored((tuple(changes),), copy.parts | {change.part for change in changes})

    def changes_in(self, segment: Segment) -> list[Change]:
        """The changes in a segment, which is read once."""
        if segment.digest not in self.read:
            tables = read_changes(self.store, segment, ["lsn", "seq", "group", "row"])
            rows = [row for table in tables for row in table.to_pylist()]
            self.read[segment.digest] = [
                Change(row["lsn"], row["seq"], APPENDED if row["group"] == LINES else row["group"], int(row["row"]))
                for row in rows
            ]
        return self.read[segment.digest]

    def _judge(self, commit: Increment, new: NewCopies) -> None:
        """Assert the promises of docs/consistency.md for the newest commit, against what the servers have now."""
        world, before, state = self.world, self.shown[-1], self.restored(self.chain)
        cuts = commit.cut.nodes
        starts, finishes = ({int(cut.node): int(at(cut)) for cut in cuts} for at in (START, FINISH))
        wave = Wave(starts=starts, finishes=finishes)
        resolved = ResolvedCut(wave, cuts, tuple(map(list, state.changes)), set(state.parts))
        phantoms = [number for number in state.parts if world.parts[number].lsn is None]
        assert not phantoms, f"history: parts {phantoms} are restored, and no surviving server has them"
        gone = {number for number in before.parts - state.parts if str(world.parts[number].node) not in commit.renewed}
        assert not gone, f"monotone: parts {gone} are in the previous increment and not in this one, without a gap"
        promises.check_atomic(world, resolved)
        promises.check_causal(world, resolved)
        promises.check_positions(world, resolved)
        promises.check_undecided(world, resolved, self.tally)
        promises.check_in_doubt(world, resolved, self.tally)
        promises.check_order([world], [[resolved]])
        self.shown.append(state)
        self.tally["increments"] += 1
        self.tally["renewed"] += len(commit.renewed)
        self.tally["on another timeline"] += any(commit.timelines.get(node, 1) > 1 for node in self.chain.primaries)
        self.tally["with a loss"] += bool(before.parts - state.parts)
        world.events.append(f"increment {commit.increment} renews {dict(new.reasons)}")

    def check_kept(self) -> None:
        """Assert that every increment still restores to what it showed when it was committed."""
        for number, expected in enumerate(self.shown):
            found = self.restored(self.chain.up_to(number))
            assert found == expected, f"kept: increment {number} no longer restores to what it was"


def run_failovers(first: int, histories: int) -> Counter[str]:
    """Run chains over the failovers of successive seeds; raise PromiseBrokenError with the first that breaks one."""
    tally: Counter[str] = Counter(histories=histories)
    for seed in range(first, first + histories):
        world = FailoverWorld(seeded(seed))
        try:
            run_chain(world, tally)
        except (AssertionError, SnapshotError) as error:
            story = "\n".join(world.events)
            raise PromiseBrokenError(f"CUTLINE_SEED={seed}: {error}\n{story}") from error
    return tally


def run_chain(world: FailoverWorld, tally: Counter[str]) -> None:
    """Take increments while the fleet fails over, and then without faults; assert all promises."""
    chain = FailoverChain(world, tally)
    world.on_time = lambda: chain.kill_sometimes(KILL_ODDS)
    while not world.is_over:
        for _ in range(world.choose(24)):
            world.pass_one()
        if not chain.create() and not world.choose(TROUBLE_ODDS):
            # What a command reads from may be what kills it.
            world.disrupt(chain.reading)
    chain.may_kill = False
    world.finish()
    assert chain.create(), f"continues: the chain does not go on: {world.events[-1]}"
    assert chain.create(), f"continues: the chain does not go on: {world.events[-1]}"
    everything = {part.number for part in world.parts if part.commit_lsn is not None}
    assert chain.shown[-1].parts == everything, f"complete: {chain.shown[-1].parts ^ everything}"
    chain.check_kept()


def _cut_record(cuts: tuple[NodeCut, ...]) -> CutRecord:
    return CutRecord(
        id=f"{FULL}.1", attempts=1, seconds=0.0, nodes=cuts, global_transactions=0, included_early=0, in_flight=0,
        made_at=MARKED_AT, safe_at=MARKED_AT, skew_seconds=0.0,
    )  # fmt: skip


def events_of(records: list[Record]) -> pa.Table:
    """The events of records (SEGMENT_SCHEMA)."""
    return _table(
        op=[one.op for one in records],
        xid=[one.xid for one in records],
        lsn=[one.lsn for one in records],
        seq=[one.at for one in records],
        end_lsn=[one.end for one in records],
        global_id=[one.gid for one in records],
        row=[one.content for one in records],
    )


def changes_of(world: FailoverWorld, records: list[Record]) -> pa.Table:
    """The changes of records (SEGMENT_SCHEMA); `group` is the row, or LINES for a line, and `row` the part."""
    found = [
        (one, seq, row)
        for one in records
        if one.op in (COMMIT, PREPARE)
        for seq, row in enumerate((*world.parts[one.xid].writes, LINES))
    ]
    return _table(
        op=[INSERT for _ in found],
        lsn=[one.begin for one, _, _ in found],
        end_lsn=[one.begin for one, _, _ in found],
        seq=[seq for _, seq, _ in found],
        group=[row for _, _, row in found],
        row=[str(one.xid).encode() for one, _, _ in found],
    )


def _table(**columns: list[Any]) -> pa.Table:
    count = len(columns["op"])
    others = dict.fromkeys(("xid", "seq", "group", "partition", "changes"), [0] * count)
    others |= dict.fromkeys(("key", "row"), [b""] * count) | {"global_id": [None] * count}
    return pa.table(others | columns, SEGMENT_SCHEMA)


@dataclass(slots=True)
class ModelDecoder:
    """Decodes the messages of the model's slots (wal.decoding.decoder): one for every record."""

    world: FailoverWorld
    open: None = None
    read: int = 0
    read_bytes: int = 0

    def view(self, column: BytesColumn) -> BytesColumn:
        return column

    def decode(self, column: BytesColumn) -> Decoded:
        records = [self.world.sent[message] for message in column.to_arrow().to_pylist()]
        self.read += len(records)
        through = Lsn(max((one.end for one in records), default=0))
        return Decoded(changes_of(self.world, records), events_of(records), through, None, 0)


def message_of(world: FailoverWorld, record: Record) -> bytes:
    """What a slot sends for a record: a marker as pgoutput does, else only the message that ends it."""
    if record.op == MARKER:
        message = pgoutput.message(record.end, MARKER_PREFIX.decode(), record.content)
    else:
        # Every end of a transaction has its end and its time at the same offsets, but for that of a rollback.
        message = struct.pack(">cbqqqq", KINDS[record.op], 0, record.begin, record.end, record.at, record.at)
    world.sent[message] = record
    return message


class Stored:
    """Stores segments in the thread that reads (BackgroundCalls)."""

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *_error: object) -> None: ...

    def run(self, work: Callable[[], object]) -> None:
        work()

    def wait(self) -> None: ...


@contextmanager
def read_at_once(read: Callable[[], Iterator[Any]]) -> Iterator[Iterator[Any]]:
    """Read in the thread that decodes (read_ahead)."""
    yield read()


def one_by_one(work: Callable[[Any], Any], items: Iterable[Any], _interrupted: object = None) -> list[Any]:
    """Do the work on one item after the other (in_parallel)."""
    return [work(item) for item in items]


@dataclass(slots=True)
class ServerCalls:
    """What the product asks a server, or waits for, on the servers of the model; `operation` is the create's."""

    chain: FailoverChain
    operation: str = ""

    @property
    def world(self) -> FailoverWorld:
        return self.chain.world

    def read_slot(self, connection: ModelConnection, name: str) -> SlotState | None:
        connection.check()
        at = connection.server.slots.get(name)
        return None if at is None else SlotState(Lsn(at), "reserved", two_phase=True)

    def advance(self, connection: ModelConnection, name: str, through: Lsn) -> None:
        connection.check()
        server = connection.server
        if name not in server.slots or server.slots[name] > through:
            raise psycopg.errors.ObjectNotInPrerequisiteState("cannot advance replication slot")
        server.slots[name] = min(int(through), server.end)
        server.confirmed.append(server.slots[name])

    def peek(
        self, node: Node, slot: str, _publications: object, finish: Lsn, _most: int, **_how: object
    ) -> Iterator[Any]:
        connection, batch = self.chain.connect(node), list[bytes]()
        self.chain.reading = int(node.shard)
        try:
            connection.check()
            begin = connection.server.slots.get(slot)
            if begin is None:
                raise psycopg.OperationalError(f'replication slot "{slot}" does not exist')
            for record in [one for one in connection.server.records if begin < one.end <= finish]:
                batch.append(message_of(self.world, record))
                if len(batch) >= SIZES[self.world.choose(len(SIZES))]:
                    yield from_list(batch).to_arrow()
                    batch = []
                    self.chain.kill_sometimes(KILL_IN_DRAIN_ODDS)
                    connection.check()
            if batch:
                yield from_list(batch).to_arrow()
        except psycopg.OperationalError as error:
            raise unreachable_error(node, error) from error

    def write_markers(self, connections: dict[str, ModelConnection], marker: Marker) -> dict[str, WrittenMarker]:
        written = {}
        for node, connection in connections.items():
            for _ in range(self.world.choose(4)):
                self.world.pass_one()
            connection.check()
            at = self.world.write_marker(int(node), marker.to_bytes(), MARKER)
            written[node] = WrittenMarker(Lsn(at), AT, AT, AT)
        return written

    @contextmanager
    def export(
        self, _fleet: Fleet, nodes: Iterable[Node], slot: str, *_others: object, **_options: bool
    ) -> Iterator[dict[str, Any]]:
        made = {}
        for node in nodes:
            connection, number = self.chain.connect(node), int(node.shard)
            # A server also finishes a slot while transactions are prepared that began after this wait, and then sends
            # them as a whole with COMMIT PREPARED. The model does not.
            while waited_for := [part for part in self.world.parts if part.node == number and is_prepared(part)]:
                self._await_over(waited_for)
            with raising_unreachable(node):
                connection.check()
            server = connection.server
            server.slots[slot] = server.end
            server.confirmed.append(server.end)
            self.chain.copies[self.operation, node.id] = copy_of(self.world, number)
            made[node.id] = SimpleNamespace(position=Lsn(server.end))
        yield made

    def await_prepared(self, sessions: Sessions, *_others: object) -> None:
        self._await_over([part for part in self.world.parts if is_prepared(part)])
        sessions.ask_primaries(lambda connection: connection.execute("SELECT"))

    def _await_over(self, parts: list[Part]) -> None:
        while any(map(is_prepared, parts)):
            if self.world.is_over:
                raise RefusedError("transactions stay prepared", hint="decide them")
            self.world.pass_one()

    def drop(self, nodes: Iterable[Node], name: str) -> list[str]:
        for node in nodes:
            if server := self.world.server(node.id):
                server.slots.pop(name, None)
            self.world.pass_some()
        return []

    def check_exclusive(self, lock: FleetLock, _store: object, operation: Operation) -> None:
        self.operation = operation.id
        lock.check_held()

    def read_switches(self, node: Node, timeline: int) -> dict[int, Lsn]:
        server = self.chain.connect(node).server
        if server.timeline < timeline:
            raise unreachable_error(node, psycopg.OperationalError("could not open the history file"))
        return switches_before(server, timeline)


def switches_before(server: Server, timeline: int) -> dict[int, Lsn]:
    """What the history file of the timeline shows."""
    lines = [f"{one}\t{Lsn(at)}\tno recovery target specified" for one, at in server.switches.items() if one < timeline]
    return parse_history("\n".join(lines))


@contextmanager
def patched(chain: FailoverChain) -> Iterator[None]:
    """Let the product ask the servers of the model, and do one thing after the other."""
    calls, world = ServerCalls(chain), chain.world
    replaced: dict[Any, dict[str, object]] = {
        continuable: {
            "in_parallel": one_by_one,
            "find_undecodable_nodes": lambda sessions: {},
            "slot_state": calls.read_slot,
        },
        draining: {
            "connect": chain.connect,
            "slot_state": calls.read_slot,
            "advance_slot": calls.advance,
            "current_timeline": lambda connection: connection.server.timeline,
            "peek": calls.peek,
            "read_ahead": read_at_once,
            "BackgroundCalls": Stored,
            "Decoder": lambda *of, convert: ModelDecoder(world),
            "texts_of": lambda connection: None,
            "check_own_store": lambda store, fleet_id: None,
            "find_undecodable": lambda *task: None,
            "find_unprintable": lambda *task: None,
            # A segment for every batch.
            "SEGMENT_BYTES_MAX": 0,
        },
        make_cut: {
            "write_markers": calls.write_markers,
            "run_own_tasks": lambda work, tasks, *others: [work(task) for task in tasks],
            "await_standbys": lambda *waiting: None,
            "check_clocks": lambda readings, progress, last_at: SimpleNamespace(nodes=[one.node for one in readings]),
        },
        make_cut.time: {"sleep": own_sleep(lambda seconds: world.pass_some())},
        prepare_tables: {"in_parallel": one_by_one},
        renewal: {
            "repair_options": lambda _connection, _fleet_id: [],
            "export_snapshots": calls.export,
            "await_prepared": calls.await_prepared,
            "drop_slots": calls.drop,
            "check_exclusive": calls.check_exclusive,
        },
        node_sessions: {
            "in_parallel": one_by_one,
            "read_switches": calls.read_switches,
            "connect": chain.connect,
            "identify": lambda node, connection: SimpleNamespace(identity=chain.identity(node)),
        },
        locks: {"in_parallel": one_by_one, "take_lock": lambda *of, former: 1},
    }
    with ExitStack() as stack:
        for module, values in replaced.items():
            for name, value in values.items():
                stack.enter_context(patch.object(module, name, value))
        yield


def copy_of(world: FailoverWorld, number: int) -> BaseCopy:
    """What a copy of the node shows now."""
    committed = [part for part in world.parts if part.node == number and part.commit_lsn is not None]
    lines = [Change(0, 0, APPENDED, part.number) for part in committed]
    rows = [Change(0, 0, row, writers[-1]) for row, writers in enumerate(world.nodes[number].writers) if writers]
    return BaseCopy(frozenset(part.number for part in committed), (*lines, *rows))
