"""The context of a create: the request, the fleet's lock, the operation, and the chain to continue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from datetime import datetime
from typing import TypeAlias

from msgspec import UNSET, Struct, field, structs

from cutline.fleet.config import Fleet, GroupRules, Node
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.lsn import Lsn
from cutline.fleet.messages import NEXT_COPIES
from cutline.fleet.progress import Progress, StepTimes
from cutline.nodes.lock import FleetLock
from cutline.nodes.read_only import check_terminal, undo_freeze
from cutline.nodes.sessions import Sessions
from cutline.snapshots.create.absent_copies import ENDING, leave_out_crowded, note_left_out, standby_wait_seconds
from cutline.snapshots.create.make_cut import LastCut
from cutline.snapshots.ddl.table_changes import KnownTables, NodeTables, TableSelection
from cutline.snapshots.listing.name_templates import read_template
from cutline.snapshots.operations.open_operations import document_names, resumable_creates
from cutline.snapshots.operations.operation import Operation, OutcomeDetails, exclusive, new_operation
from cutline.snapshots.operations.settling import note_restores, settle_operations
from cutline.snapshots.operations.signs import clear_signs
from cutline.snapshots.operations.slot_guard import guard_nodes, note_older_chains
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import DatabaseFacts, FullSnapshot, Increment
from cutline.snapshots.records.commit_rules import check_fits, count_listed, definition_counts
from cutline.snapshots.records.operation_records import Intent
from cutline.snapshots.records.proven_chains import commit_key, cut_time, free_turn
from cutline.snapshots.records.tombstones import ANOTHER_NAME, check_not_deleted
from cutline.snapshots.records.unfinished_records import UnfinishedCopy
from cutline.spark.needs import ExecutorNeeds
from cutline.storage.errors import UsageError
from cutline.storage.store import ObjectStore
from cutline.wal.cut.markers import Marker
from cutline.wal.drain.lineage import KnownMarker
from cutline.wal.drain.slots import drop_slots, slot_name
from cutline.wal.segments.archive import Segment

# The defaults of every create, for how often a cut is retried and how long it waits for standbys and transactions.
RETRIES, WAIT_SECONDS = 3, 60.0


class CreateRequest(Struct, frozen=True):
    """The options for a create.

    `include` replaces the patterns in fleet.toml; `exclude` adds to them. A `terminal` snapshot leaves the fleet
    read-only (snapshots/create/terminal.py). `large_objects` copies large objects. `only_cut` takes a restore point,
    which has no rows. Attempts that DDL invalidates are retried beyond `retries` until `ddl_seconds` have passed.
    `replaced` are the shards whose servers or databases were replaced by others: an increment copies
    them again. With `copies_between`, large standbys are copied after an increment's commit (copy_between.py).
    """

    name: str
    only_primary: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    retries: int = RETRIES
    wait_seconds: float = WAIT_SECONDS
    comment: str = ""
    terminal: bool = False
    large_objects: bool = False
    only_cut: bool = False
    replaced: tuple[str, ...] = ()
    ddl_seconds: float = 0.0
    copies_between: bool = True


class CreateContext(Struct, frozen=True):
    """The request for a create, the store for the snapshot, the operation, and the fleet lock that it holds.

    `began_with` are the nodes on which the operation may make slots: those that took part when it began. Standbys that
    are left out later are among them. `copied` is what the operation had copied when it was interrupted, if this create
    resumes it, and `ran_seconds` how long its earlier runs took.
    """

    request: CreateRequest
    store: ObjectStore
    operation: Operation
    lock: FleetLock
    began_with: tuple[Node, ...] = ()
    copied: UnfinishedCopy | None = None
    ran_seconds: float = 0.0

    @property
    def sessions(self) -> Sessions:
        """The sessions that hold the lock."""
        return self.lock.sessions

    @property
    def fleet(self) -> Fleet:
        """The fleet of the sessions: as fleet.toml describes it, with promoted standbys in their primaries' places."""
        return self.lock.sessions.fleet

    @property
    def standby_wait_seconds(self) -> float:
        """How long a cut waits for standbys: less for an increment that can do without them."""
        wait = self.request.wait_seconds
        return standby_wait_seconds(self.fleet, wait) if self.operation.increment else wait

    @property
    def executor_needs(self) -> ExecutorNeeds:
        """What the tasks for the create need from Spark executors."""
        nodes, wait = tuple(self.sessions.nodes), self.request.wait_seconds
        return ExecutorNeeds(self.fleet.store, nodes, writes=True, wait_seconds=wait)


def not_ended_by_watch(fleet: Fleet, name: str, snapshots: Iterable[str]) -> list[str]:
    """Return the snapshots whose chains no watch ends because of the new snapshot `name`, and not that itself.

    A watch ends the older chains of its own template (cli/watch/following.py).
    """
    others = [one for one in snapshots if one != name]
    if fleet.watch is None:
        return others
    template = read_template(fleet.watch.name)
    return [one for one in others if not (template.values_in(name) and template.values_in(one))]


class ResumedFull(Struct, frozen=True):
    """An interrupted full snapshot that is resumed: its intent, what it has copied, and this resumption's number.

    `ran_seconds` is how long the earlier runs took together, as far as known.
    """

    intent: Intent
    copied: UnfinishedCopy
    resumption: int
    ran_seconds: float


# Finds the interrupted snapshot that a create resumes, by the names of all documents.
FindsResumable: TypeAlias = Callable[[Mapping[str, Set[str]]], ResumedFull | None]


@contextmanager
def begin_full(
    sessions: Sessions,
    store: ObjectStore,
    request: CreateRequest,
    fleet_id: str,
    progress: StepTimes,
    find_resumable: FindsResumable | None = None,
) -> Iterator[CreateContext]:
    """Hold the fleet's lock, settle dead operations, and start or resume a full snapshot of the sessions' nodes.

    Standbys with too few connections are left out. With `find_resumable`, interrupted snapshots that are not resumed
    are given up. The intent of a new operation is not stored yet. Raises the errors of `exclusive`, and any errors from
    the store and node checks.
    """
    with exclusive(sessions, store, "create", request.name) as lock, _hinting_to_begin_again():
        progress.reached(CrashPoint.LOCKED)
        operations = document_names(store)
        note_restores(store, settle_operations(store, sessions.fleet, progress, operations), sessions, progress)
        progress.reached(CrashPoint.SETTLED)
        check_not_deleted(store, request.name, ANOTHER_NAME)
        staying = guard_nodes(store, sessions, progress, operations).staying
        if not request.only_cut:
            note_older_chains(store, not_ended_by_watch(sessions.fleet, request.name, staying), progress)
        before = frozenset(sessions.absent)
        leave_out_crowded(sessions)
        note_left_out(sessions, before, progress)
        progress.reached(CrashPoint.SLOTS_DROPPED)
        check_terminal(sessions, fleet_id, progress, terminal=request.terminal)
        details = OutcomeDetails(times=progress)
        if find_resumable is not None:
            resumed = find_resumable(operations)
            try:
                kept = {resumed.intent.operation} if resumed else set()
                if given_up := {intent.operation for intent in resumable_creates(store, operations)} - kept:
                    settle_operations(store, sessions.fleet, progress, operations, given_up)
                if resumed is not None:
                    operation = Operation(
                        resumed.intent, is_resumable=True, resumption=resumed.resumption, details=details
                    )
                    began_with = tuple(node for node in sessions.chosen if node.listed_id in resumed.intent.nodes)
                    copied, ran_seconds = resumed.copied, resumed.ran_seconds
                    yield CreateContext(request, store, operation, lock, began_with, copied, ran_seconds)
                    return
            finally:
                if resumed is not None:
                    # The first sign of the resumption, if the command ends before its activity stores another.
                    clear_signs(store, resumed.intent.operation)
        elif any(intent.snapshot == request.name for intent in resumable_creates(store, operations)):
            raise UsageError(
                f"a full snapshot with the name {request.name} was interrupted, and can be resumed",
                hint=f"choose another name; to resume it: snapshot create {request.name}",
            )
        intent = new_operation("create", request.name, 0, tuple(node.id for node in sessions.nodes))
        # Find the turn only now: settling may have used up a turn.
        turn, terminal = free_turn(store, request.name, 0), request.terminal or UNSET
        intent = structs.replace(
            intent,
            slot=slot_name(intent.id),
            turn=turn,
            terminal=terminal,
            fleet_id=fleet_id,
            only_cut=request.only_cut or UNSET,
        )
        yield CreateContext(request, store, Operation(intent, details=details), lock, sessions.nodes)


@contextmanager
def _hinting_to_begin_again() -> Iterator[None]:
    """Correct the hint of an error with which a node's copy ends: no chain has the copy yet."""
    try:
        yield
    except ENDING as error:
        error.hint = error.hint.replace(NEXT_COPIES, "repeat the command: it begins again")
        raise


def undo_create(context: CreateContext, slots: Iterable[str], progress: Progress) -> bool:
    """Remove `slots` and other traces of a failed create from the nodes; return False if anything remains."""
    operation, primaries = context.operation, context.fleet.primaries
    is_writable = not operation.intent.is_terminal or undo_freeze(primaries, operation.id, progress)
    left = [node for slot in slots for node in drop_slots(context.began_with, slot)]
    return not left and is_writable


class ChainState(Struct, frozen=True):
    """The state of a chain before its next cut.

    `chain` is the id of the operation that started the chain. `known` holds the tables as the last commit records them;
    `seen` holds the primaries' tables as last found: read, or taken from the last commit. `base` holds the position at
    which each node's archive begins, `archives` the operations that began archives after the full snapshot, by node,
    `segments` the newest segments that commits list, and `last_cut` the last cut on each primary. `last_at` is the time
    of that cut. `absent` are the nodes whose copies the last commit leaves out, and those whose copies begin again.
    `facts` are those about the shards' databases in the last commit.
    """

    chain: str
    selection: TableSelection
    known: KnownTables
    seen: Mapping[str, NodeTables]
    base: Mapping[str, Lsn]
    segments: Mapping[str, tuple[Segment, ...]]
    last_cut: Mapping[str, LastCut]
    last_at: datetime | None = None
    absent: frozenset[str] = frozenset()
    archives: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, DatabaseFacts] = field(default_factory=dict)

    def archive(self, node: str) -> str:
        """Return the operation that began the node's archive."""
        return self.archives.get(node, self.chain)


def state_of(chain: Chain, rules: GroupRules, known: KnownTables, seen: Mapping[str, NodeTables]) -> ChainState:
    """Return the state of a chain that continues under `rules`.

    `known` are the tables at its last commit, and `seen` the primaries' tables, which were just read.
    """
    return ChainState(
        chain.full.operation,
        TableSelection(chain.full.fleet_id, rules),
        known,
        seen,
        chain.bases,
        {node.node: chain.newest_segments(node.node) for node in chain.nodes},
        {
            cut.node: LastCut(
                cut.position,
                cut.undecided,
                cut.in_doubt,
                cut.last_commit_at,
                KnownMarker(Marker(chain.full.operation, chain.last.cut.id, "finish"), cut.finish),
            )
            for cut in chain.last.cut.nodes
        },
        cut_time(chain.last),
        frozenset(chain.absent),
        {node: chain.archive(node) for node in chain.renewals},
        {shard: facts for shard, facts in chain.last.databases.items() if shard not in known.lost},
    )


def counted_full(commit: FullSnapshot, ignored: int) -> FullSnapshot:
    """Return the commit with its counts; `ignored` is the number of changes that were decoded but not archived."""
    counts = count_listed(set(commit.primaries), commit) | definition_counts(Chain(commit))
    return structs.replace(commit, counts=counts | {"ignored": ignored})


def counted_increment(chain: Chain, commit: Increment, ignored: int) -> Increment:
    """Return the chain's next commit with its counts; raise ManifestError if its parts are inconsistent."""
    last = chain.followed_by(commit)
    counts = count_listed(set(last.primaries), commit) | definition_counts(last)
    commit = structs.replace(commit, counts=counts | {"ignored": ignored})
    # A commit that no command would accept must not be stored.
    check_fits(chain, commit, commit_key(chain.name, commit.increment))
    return commit
