"""Gather a fleet's metrics from its store and nodes, within a time limit.

A store or node that doesn't answer is not an error: `cutline_store_up` and `cutline_node_up` report it, and unknown
values are absent.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from importlib.metadata import version

from msgspec import Struct, UnsetType
from msgspec.structs import replace

from cutline.fleet.config import Fleet, Node, Retention
from cutline.fleet.lsn import Lsn
from cutline.fleet.record import Time
from cutline.nodes.left_out import LeftOutKind
from cutline.snapshots.listing import metrics
from cutline.snapshots.listing.listing import (
    BROKEN,
    COMPLETE,
    ENDED,
    ONLY_FULL,
    SLOT_LOST,
    Entry,
    MissingPoint,
    committed_by,
    find_missing,
    first_store_chains,
    is_ahead,
    read_entry,
    with_slots,
)
from cutline.snapshots.listing.metrics import Metric, Sample
from cutline.snapshots.operations.ended_operations import (
    FULL,
    INCREMENT,
    ONLY_CUT,
    Ended,
    EndedOperations,
    EndedReader,
    NewestChecks,
    operation_kind,
)
from cutline.snapshots.operations.open_operations import document_names
from cutline.snapshots.operations.second_stores import states_of
from cutline.snapshots.operations.under_way import ActivityState, UnderWay, read_under_way
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.documents import NAME
from cutline.snapshots.records.operation_records import DONE, Intent, RestoreFigures
from cutline.snapshots.records.proven_chains import ASKING_THREADS_MAX, cut_time, is_committed
from cutline.snapshots.records.store_identity import StoreIdentity, read_identity
from cutline.snapshots.records.tombstones import tombstone_key
from cutline.storage.clock import utc_now
from cutline.storage.errors import SnapshotError
from cutline.storage.store import ObjectStore
from cutline.wal.drain.lags import FleetLags, LagsQuery, NodeLags

# The number of snapshots kept in memory, each with the size of its newest commits and a kilobyte per increment.
KEPT_MAX = 256
FULL_COMMIT, ENDED_FOLDER, BEGINS = "snapshot.", "ended", "begins"


class _Listed(Struct, frozen=True):
    """The listed files of a snapshot, which change when an increment or a mark is added, or a commit goes missing.

    `files` are its commit, its marks and its folders, and the marks in the folder BEGINS; `increments` is a digest of
    the names, sizes and times of its increments' commits.
    """

    name: str
    is_deleted: bool
    files: tuple[str, ...]
    increments: str


class _Known(Struct, frozen=True):
    """The entry read for a listed snapshot; None if the snapshot is not committed or was deleted."""

    listed: _Listed
    entry: Entry | None

    @property
    def may_stay(self) -> bool:
        """Whether the entry is valid until the listings change. A damaged object may be repaired in place."""
        if self.entry is None:
            return True
        # An earlier chain of the same name left the folder behind, so a new mark on this chain would not change the
        # listing.
        is_of_another = ENDED_FOLDER in self.listed.files and self.entry.ended is None
        return self.entry.problem is None and not is_of_another

    @property
    def newest_at(self) -> float:
        """The time of the newest cut, in seconds since 1970; 0 if unknown."""
        chain = self.entry.chain if self.entry else None
        return cut_time(chain.last).timestamp() if chain else 0.0


class EntryReader:
    """Reads the entries for all snapshots; an entry is read again only if its listing has changed.

    Therefore it does not notice if the commit of a full snapshot is later damaged in place; `check` does. The newest
    KEPT_MAX entries are kept, and all others are read each time.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def read(self, store: ObjectStore, fleet: Fleet) -> tuple[Entry, ...]:
        """Read the entry for every snapshot as shown by `list`, except the WAL that nodes retain.

        Raises StoreOfAnotherFleetError, StoreNotInitialisedError, ManifestError, StoreUnreachableError.
        """
        identity = read_identity(store, fleet)
        deleted = set(store.list_children("deleted"))
        names = [name for name in store.list_children("snapshots") if NAME.fullmatch(name)]
        with ThreadPoolExecutor(ASKING_THREADS_MAX) as threads:
            known = list(threads.map(lambda name: self._read(store, identity, name, deleted), names))
        kept = sorted(
            (snapshot for snapshot in known if snapshot.may_stay), key=lambda snapshot: snapshot.newest_at, reverse=True
        )
        self._known = {snapshot.listed.name: snapshot for snapshot in kept[:KEPT_MAX]}
        return tuple(snapshot.entry for snapshot in known if snapshot.entry is not None)

    def _read(self, store: ObjectStore, identity: StoreIdentity, name: str, deleted: set[str]) -> _Known:
        # List first, so that an object stored while the snapshot is read changes the next listings.
        listed = _list_snapshot(store, name, is_deleted=tombstone_key(name).partition("/")[2] in deleted)
        known = self._known.get(name)
        if known is not None and known.listed == listed:
            return known
        if not any(file.startswith(FULL_COMMIT) for file in listed.files) or not is_committed(store, name):
            return _Known(listed, None)
        return _Known(listed, read_entry(store, identity, name))


def read_entries(store: ObjectStore, fleet: Fleet) -> tuple[Entry, ...]:
    """Read the entry for every snapshot as EntryReader.read does; raises its errors."""
    return EntryReader().read(store, fleet)


def _list_snapshot(store: ObjectStore, name: str, *, is_deleted: bool) -> _Listed:
    files = tuple(store.list_children(f"snapshots/{name}"))
    files += tuple(store.list_children(f"snapshots/{name}/{BEGINS}")) if BEGINS in files else ()
    increments = store.inventory(f"snapshots/{name}/increments") if "increments" in files else []
    digest = sha256()
    for increment in increments:
        digest.update(f"{increment.key} {increment.size} {increment.created_at.timestamp()}\n".encode())
    return _Listed(name, is_deleted, files, digest.hexdigest())


def samples_of_limits(rules: Retention) -> Iterator[Sample]:
    """Yield the limits for all snapshots that fleet.toml sets."""
    if rules.max_age_seconds is not None:
        yield metrics.MAX_AGE.of(rules.max_age_seconds)
    if rules.quota_bytes is not None:
        yield metrics.QUOTA.of(rules.quota_bytes)


def samples_of_nodes(lags: FleetLags, archived: Mapping[str, Lsn]) -> Iterator[Sample]:
    """Yield all samples for the nodes; `archived` maps nodes with WAL in the store to positions."""
    for node in lags.fleet.nodes:
        role = metrics.STANDBY if node.backup_of else metrics.PRIMARY
        node_lags = lags.nodes[node.id]
        yield metrics.NODE_UP.of(not node_lags.problem, node.id, role)
        yield metrics.RETAINED_LIMIT.of(node.retained_wal_bytes_max, node.id)
        if node.backup_of is None:
            yield metrics.PROMOTED.of(node.id in lags.promoted, node.id)
        if not node_lags.problem:
            yield from _samples_of_node(node, node_lags, archived.get(node.id))


def _samples_of_node(node: Node, found: NodeLags, archived: Lsn | None) -> Iterator[Sample]:
    yield metrics.NODE_IN_RECOVERY.of(found.is_in_recovery, node.id)
    for slot in found.slots:
        if slot.lag_bytes is not None:
            yield metrics.SLOT_LAG.of(slot.lag_bytes, node.id, slot.slot)
        yield metrics.RETAINED.of(slot.retained_bytes, node.id, slot.slot)
        yield metrics.SLOT_UNUSABLE.of(bool(slot.problem), node.id, slot.slot)
    if (behind := found.behind(archived)) is not None:
        yield metrics.ARCHIVE_LAG.of(behind, node.id)
    if found.replay is not None:
        yield metrics.REPLAY_LAG.of(found.replay.size_bytes, node.id)
        if found.replay.seconds is not None:
            yield metrics.REPLAY_LAG_SECONDS.of(found.replay.seconds, node.id)


WINDOW_SECONDS = 24 * 3600.0
UNKNOWN = "unknown"
# The metrics by unit of volume.
VOLUMES: Mapping[str, Metric] = {
    "bytes": metrics.SUCCESS_BYTES,
    "objects": metrics.SUCCESS_OBJECTS,
    "rows": metrics.SUCCESS_ROWS,
    "changes": metrics.SUCCESS_CHANGES,
    "transactions": metrics.SUCCESS_TRANSACTIONS,
}


@dataclass(frozen=True, slots=True)
class KindEnd:
    """The end of an operation, for metrics.

    `retries` is None if the operation makes no cuts; other fields are None if unknown.
    """

    kind: str
    ended_at: float
    code: int | None
    is_done: bool
    seconds: float | None = None
    volumes: Mapping[str, int] = field(default_factory=dict)
    retries: int | None = None
    figures: RestoreFigures | None = None


def moment_of(time: Time) -> float:
    """Convert a stored time to seconds since 1970."""
    return datetime.fromisoformat(time).timestamp()


def _label_of(command: str, increment: int | None, intent: Intent | None) -> str:
    kind = operation_kind(command, increment, intent)
    return kind if kind in metrics.KINDS else metrics.OTHER


def end_of(ended: Ended) -> KindEnd | None:
    """Return the end of an operation according to its outcome; None if the outcome can't be read."""
    if (outcome := ended.outcome) is None:
        return None
    kind, is_create = _label_of(ended.kind, ended.increment, ended.intent), ended.kind == "create"
    figures = None if isinstance(outcome.figures, UnsetType) else outcome.figures
    is_done = outcome.state == DONE
    return KindEnd(
        kind,
        moment_of(outcome.ended_at),
        code=ended.code,
        is_done=is_done,
        seconds=ended.seconds,
        volumes=ended.volumes,
        retries=len(ended.causes) if is_create else None,
        figures=figures,
    )


def end_of_commit(commit: Commit, kind: str) -> KindEnd:
    """Return the end of the operation that stored this commit."""
    ended_at = moment_of(commit.created_at) + commit.seconds
    return KindEnd(
        kind,
        ended_at,
        code=0,
        is_done=True,
        seconds=commit.seconds,
        volumes=commit.counts,
        retries=max(commit.cut.attempts - 1, 0),
    )


def samples_of_open(operations: Iterable[UnderWay], states: Mapping[str, ActivityState]) -> Iterator[Sample]:
    """Yield the number of operations for each kind and state; `states` maps operations to states."""
    counter = Counter(
        (_label_of(operation.kind, operation.increment, operation.intent), states[operation.id].value)
        for operation in operations
    )
    for kind in metrics.KINDS:
        for state in ActivityState:
            yield metrics.OPEN_OPERATIONS.of(counter[kind, state.value], kind, state.value)


def samples_of_ends(read: EndedOperations, committed: Iterable[KindEnd], now: float) -> Iterator[Sample]:
    """Yield the samples for the ends within the window, and for the last end of each kind.

    `committed` are ends known from commits, whose outcomes are not read.
    """
    ends = [*committed, *(end for ended in read.found if (end := end_of(ended)) is not None)]
    window = WINDOW_SECONDS if read.since is None else min(WINDOW_SECONDS, max(now - read.since.timestamp(), 0.0))
    yield metrics.HISTORY_WINDOW.of(window)
    counts = Counter((kind_end.kind, _code_text(kind_end)) for kind_end in ends if kind_end.ended_at >= now - window)
    for (kind, code), count in sorted(counts.items()):
        yield metrics.ENDED.of(count, kind, code)
    for kind in metrics.KINDS:
        own = sorted((kind_end for kind_end in ends if kind_end.kind == kind), key=lambda end: end.ended_at)
        if own and own[-1].code is not None:
            yield metrics.LAST_CODE.of(own[-1].code, kind)
        successes = [kind_end for kind_end in own if kind_end.is_done and not kind_end.code]
        if successes:
            yield from _success(successes[-1])
    measured = [kind_end for kind_end in ends if kind_end.figures is not None]
    if measured:
        yield from _restored(max(measured, key=lambda end: end.ended_at))


def _code_text(end: KindEnd) -> str:
    if end.code is not None:
        return str(end.code)
    # A settled operation has no code.
    return "0" if end.is_done else UNKNOWN


def _success(end: KindEnd) -> Iterator[Sample]:
    yield metrics.SUCCESS.of(end.ended_at, end.kind)
    if end.seconds is not None:
        yield metrics.SUCCESS_SECONDS.of(end.seconds, end.kind)
    if end.retries is not None:
        yield metrics.SUCCESS_RETRIES.of(end.retries, end.kind)
    for unit, metric in VOLUMES.items():
        if unit in end.volumes:
            yield metric.of(end.volumes[unit], end.kind)


def _restored(end: KindEnd) -> Iterator[Sample]:
    steps = end.figures.steps if end.figures else {}
    for name in metrics.RESTORE_STEPS:
        if name in steps:
            yield metrics.RESTORE_STEP.of(steps[name].seconds, name)
    if metrics.WAL_STEP in steps:
        yield metrics.RESTORE_CHANGES.of(steps[metrics.WAL_STEP].amount)


STATES = (COMPLETE, BROKEN, ENDED, ONLY_FULL, SLOT_LOST)
# At most this many snapshots are named in labels.
NAMED_MAX = 20


class StoreFacts(Struct, frozen=True):
    """The contents read from a store."""

    entries: tuple[Entry, ...]
    open_operations: tuple[UnderWay, ...]
    ended: EndedOperations
    missing: tuple[MissingPoint, ...] = ()

    @property
    def chains(self) -> list[Chain]:
        """The chains that can be read, ordered by the times of their newest cuts."""
        return chains_by_cut(self.entries)


def read_facts(fleet: Fleet, ended: EndedReader, reader: EntryReader | None = None) -> StoreFacts:
    """Read the fleet's store; a `reader` reads only what has changed since its last read.

    Raises the errors of EntryReader.read.
    """
    store = fleet.store.open()
    # List documents first, so that everything recorded as committed is stored when the entries are read.
    documents = document_names(store)
    entries = (reader or EntryReader()).read(store, fleet)
    operations = ended.read(store, committed_by(entries), documents)
    missing = tuple(find_missing(store, operations.found, entries))
    return StoreFacts(entries, tuple(read_under_way(store, documents)), operations, missing)


def chains_by_cut(entries: Iterable[Entry]) -> list[Chain]:
    """Return the readable chains, ordered by the times of their newest cuts."""
    return sorted((entry.chain for entry in entries if entry.chain), key=lambda one: cut_time(one.last))


def archived_positions(chains: Iterable[Chain]) -> dict[str, Lsn]:
    """Return the position up to which each node's WAL is in the store; `chains` are in the order of their commits.

    The nodes have the ids that fleet.toml had at the last commit.

    The newest position is not always the highest: a new server's WAL may start at a lower position than the WAL of the
    server it replaced.
    """
    return {chain.listed_id(node): chain.archived_to(node) for chain in chains for node in chain.parts}


def samples_of_store(facts: StoreFacts, now: datetime) -> Iterator[Sample]:
    """Yield all samples for a store."""
    states = Counter(entry.state for entry in facts.entries)
    for state in STATES:
        yield metrics.SNAPSHOTS.of(states[state], state)
    yield metrics.DAMAGED_MARKS.of(sum(entry.has_damaged_mark for entry in facts.entries))
    yield metrics.MISSING_POINTS.of(len(facts.missing))
    checks = NewestChecks()
    checks.add_all((*facts.ended.found, *facts.ended.earlier_checks))
    conflicts = [
        entry.name for entry in facts.entries if checks.standing_conflicts(entry.name, 1 + len(entry.summaries))
    ]
    yield metrics.STANDING_CONFLICTS.of(len(conflicts))
    sizes = {entry.name: entry.bytes for entry in facts.entries if entry.chain}
    yield metrics.RESTORE_POINTS.of(sum(entry.restore_points for entry in facts.entries))
    yield metrics.COMMITTED_BYTES.of(sum(sizes.values()))
    chains = facts.chains
    yield from _samples_of_names(facts.entries, chains, sizes, checks)
    if checked := list(_checked_cuts(facts.entries, checks)):
        yield metrics.CHECKED_CUT.of(max(checked).timestamp())
    if restorable := chains_by_cut(entry for entry in facts.entries if _has_rows(entry) and entry.state != BROKEN):
        # A cut in the future would hide that there are no new ones.
        past = [chain for chain in restorable if not is_ahead(cut_time(chain.last), now)]
        yield from _samples_of_newest((past or restorable)[-1])
    for second in states_of(facts.ended.found, first_store_chains(facts.entries)):
        yield metrics.COPY_NEWEST_CUT.of(second.newest_cut_at.timestamp(), second.url)
        yield metrics.COPY_BEHIND.of(sum(second.behind.values()), second.url)
    yield from samples_of_open(
        facts.open_operations,
        {open_operation.id: open_operation.state(now) for open_operation in facts.open_operations},
    )
    yield from samples_of_ends(facts.ended, _committed_ends(facts.entries), now.timestamp())


def _has_rows(entry: Entry) -> bool:
    return entry.chain is not None and not entry.chain.full.only_cut


def _samples_of_names(
    entries: Iterable[Entry], chains: list[Chain], sizes: Mapping[str, int], checks: NewestChecks
) -> Iterator[Sample]:
    by_name = {entry.name: entry for entry in entries}
    for chain in chains[-NAMED_MAX:]:
        yield metrics.SNAPSHOT_BYTES.of(sizes[chain.name], chain.name)
        yield metrics.SNAPSHOT_INCREMENTS.of(by_name[chain.name].increments, chain.name)
        if passed := checks.passed.get(chain.name):
            yield metrics.SNAPSHOT_CHECKED.of(passed.moment.timestamp(), chain.name)
            yield metrics.SNAPSHOT_CHECKED_BY_RECORDS.of(passed.point.rests_on_records, chain.name)
        record = checks.furthest_record(chain.name, by_name[chain.name].operations)
        if record and (oldest := record.point.oldest_read_at):
            yield metrics.SNAPSHOT_REREAD.of(moment_of(oldest), chain.name)


def _checked_cuts(entries: Iterable[Entry], checks: NewestChecks) -> Iterator[datetime]:
    """Yield the time of each snapshot's newest cut that was read by a check of everything that found nothing wrong."""
    for entry in entries:
        passed = checks.passed.get(entry.name)
        if passed is None or entry.chain is None or not _has_rows(entry):
            continue
        full = entry.chain.stored_full
        cuts = {full.increment: cut_time(full)}
        cuts |= {summary.increment: cut_time(summary) for summary in entry.summaries}
        if passed.point.increment in cuts:
            yield cuts[passed.point.increment]


def _samples_of_newest(chain: Chain) -> Iterator[Sample]:
    commit = chain.last
    yield metrics.NEWEST_CUT.of(cut_time(commit).timestamp())
    yield metrics.CUT_SECONDS.of(commit.cut.seconds)
    yield metrics.CUT_RETRIES.of(max(commit.cut.attempts - 1, 0))
    yield metrics.SAFE_TIME.of(moment_of(commit.cut.safe_at))
    yield metrics.CLOCK_SKEW.of(commit.cut.skew_seconds)
    names = {out.name for out in commit.left_out if out.kind == LeftOutKind.ABSENT_COPY}
    for standby in sorted(names | {identity.node for identity in chain.nodes if identity.backup_of is not None}):
        yield metrics.ABSENT_COPY.of(int(standby in names), chain.listed_id(standby))
    for standby, copying in commit.copying.items():
        yield metrics.COPYING_BYTES.of(copying.copied_bytes, chain.listed_id(standby))
        yield metrics.COPYING_BYTES_WANTED.of(copying.wanted_bytes, chain.listed_id(standby))
    yield metrics.GAPS.of(len(chain.gaps))
    for node in commit.cut.nodes:
        if isinstance(node.last_commit_at, str):
            yield metrics.NODE_LAST_COMMIT.of(moment_of(node.last_commit_at), chain.listed_id(node.node))


def _committed_ends(entries: Iterable[Entry]) -> Iterator[KindEnd]:
    """Yield the ends of the operations with commits; only the first and newest of a chain have all details."""
    for entry in entries:
        if (chain := entry.chain) is None:
            continue
        yield end_of_commit(chain.full, ONLY_CUT if chain.full.only_cut else FULL)
        for summary in entry.summaries:
            if summary.operation == chain.last.operation:
                yield end_of_commit(chain.last, INCREMENT)
            else:
                ended_at = moment_of(summary.created_at) + summary.seconds
                volumes = {"bytes": summary.bytes, "changes": summary.changes, "transactions": summary.transactions}
                yield KindEnd(INCREMENT, ended_at, code=0, is_done=True, seconds=summary.seconds, volumes=volumes)


GATHERING_SECONDS_MAX = 10.0
# Read at most this many operations that committed nothing; operations with and without an intent count separately.
READ_MAX, READ_ONCE_MAX = 1000, 200


class Gathered(Struct, frozen=True):
    """A fleet's samples at one moment. `problems` are the reasons why the store or nodes yielded no samples."""

    samples: tuple[Sample, ...]
    problems: tuple[str, ...]
    at: datetime


class MetricsGatherer:
    """Gathers metrics repeatedly; facts that can no longer change are read once.

    A store that does not answer keeps only one thread waiting, not one per gathering.
    """

    def __init__(self, read_max: int = READ_MAX) -> None:
        self._ended = EndedReader(read_max)
        self._entries = EntryReader()
        self._reading: _Reading | None = None

    def gather(self, fleet: Fleet, seconds_max: float = GATHERING_SECONDS_MAX) -> Gathered:
        """Query the store and all nodes at the same time, for at most `seconds_max`; does not raise their errors."""
        began = time.monotonic()
        query = LagsQuery(fleet)
        facts, problem = self._read(fleet, seconds_max)
        lags, now = query.lags(), utc_now()
        samples = [metrics.BUILD_INFO.of(1, version("cutline")), metrics.STORE_UP.of(facts is not None)]
        if facts is not None:
            entries = tuple(with_slots(entry, lags.slots) for entry in facts.entries)
            samples += samples_of_store(replace(facts, entries=entries), now)
        samples += samples_of_limits(fleet.retention)
        samples += samples_of_nodes(lags, archived_positions(facts.chains) if facts else {})
        samples += [metrics.GATHERED.of(now.timestamp()), metrics.GATHERING.of(time.monotonic() - began)]
        problems = [f"node {lag.node}: {lag.problem}" for lag in lags.nodes.values() if lag.problem]
        return Gathered(tuple(samples), tuple([problem] * bool(problem) + problems), now)

    def _read(self, fleet: Fleet, seconds_max: float) -> tuple[StoreFacts | None, str]:
        """Return the store's contents, or the reason why they could not be read."""
        if self._reading is not None and self._reading.thread.is_alive():
            return None, "the store has not answered the previous request yet"
        self._reading = _Reading(lambda: read_facts(fleet, self._ended, self._entries))
        self._reading.thread.join(seconds_max)
        if self._reading.thread.is_alive():
            return None, f"the store did not answer within {seconds_max:.0f} s"
        return self._reading.facts, self._reading.problem


def gather_once(fleet: Fleet, seconds_max: float = GATHERING_SECONDS_MAX) -> Gathered:
    """Gather the metrics in a process that is about to exit, reading fewer records of past operations."""
    return MetricsGatherer(READ_ONCE_MAX).gather(fleet, seconds_max)


@dataclass(slots=True)
class _Reading:
    """Reads in a daemon thread, which does not keep the process from exiting."""

    read: Callable[[], StoreFacts]
    facts: StoreFacts | None = None
    problem: str = "the store could not be read"
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="metrics of the store", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.facts, self.problem = self.read(), ""
        except SnapshotError as error:
            self.problem = error.message
