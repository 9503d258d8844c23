"""List the snapshots and increments in a store by reading commits and the records of operations.

Comparing the records with the commits shows whether the newest increments of a chain, or a whole snapshot, were removed
by something other than Cutline. Nothing else shows this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import chain, groupby

from msgspec import Struct, field, structs

from cutline.fleet.config import Fleet, Retention
from cutline.fleet.messages import NODES_NAMED_MAX, list_some, restore_command
from cutline.fleet.progress import Silent
from cutline.fleet.units import duration_text
from cutline.nodes.clocks import AGREE_SECONDS_MAX
from cutline.snapshots.listing.unmerged import unmerged_text
from cutline.snapshots.operations.ended_operations import Ended, NewestChecks, list_ended, read_batches, read_checks
from cutline.snapshots.operations.open_operations import (
    OpenOperation,
    document_names,
    naming_open_operations,
    read_open_operations,
)
from cutline.snapshots.operations.second_stores import FirstStoreChain, SecondStoreState, read_states
from cutline.snapshots.operations.slot_guard import (
    KeptChain,
    ended_text,
    find_kept_chain,
    is_marked_ended,
    read_slot_owners,
    retained_text,
    rule_on_slots,
    ruling_text,
)
from cutline.snapshots.records.chain import Chain, summary_of
from cutline.snapshots.records.commit import CommitSummary
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.end_marks import EndMark, read_marks
from cutline.snapshots.records.merge_records import Merge, find_merge, first_increment, merge_numbers, newest_merge
from cutline.snapshots.records.merged_chain import MergedAwayError, before_beginning_error, read_from_merge
from cutline.snapshots.records.operation_records import DONE
from cutline.snapshots.records.pins import StoredPin, pins_in_force, read_pins
from cutline.snapshots.records.proven_chains import (
    SnapshotMissingError,
    cut_time,
    find_place,
    increment_label,
    lost_text,
    read_chain,
    read_lost_since,
    read_newest_part,
    read_readable_part,
    read_summaries,
    snapshot_names,
)
from cutline.snapshots.records.store_identity import StoreIdentity, check_of_fleet, read_identity
from cutline.snapshots.records.tombstones import SnapshotDeletedError, check_not_deleted, is_deleted, is_only_full
from cutline.storage.clock import utc_now
from cutline.storage.errors import RefusedError, SnapshotError
from cutline.storage.store import ObjectStore
from cutline.wal.drain.lags import Retained, RetainedAnswers, RetainedQuery
from cutline.wal.drain.slots import slot_name, slot_problem

COMPLETE, BROKEN, ENDED, ONLY_FULL, SLOT_LOST = "complete", "broken", "ended", "only-full", "slot-lost"


class Entry(Struct, frozen=True):
    """A snapshot. If its chain can't be read, `problem` is the reason and `chain` is the readable part, if any.

    `has_damaged_mark` is set if the whole chain can be read, and `problem` is about a mark. `ended` is set if a
    command ended the chain. `retained` is the WAL that the nodes keep for the chain. `is_only_full` is set
    if the increments were pruned. `summaries` describe the increments, including those before `first`, at which the
    chain begins for good if that is not 0: a base of `base_bytes` replaces them. `slot_problems` are the problems
    with the chain's slots, by node, as far as the nodes have answered; only chains that have not ended need slots.
    """

    name: str
    chain: Chain | None
    problem: str | None = None
    has_damaged_mark: bool = False
    ended: EndMark | None = None
    retained: tuple[Retained, ...] = ()
    is_only_full: bool = False
    summaries: tuple[CommitSummary, ...] = ()
    first: int = 0
    base_bytes: int | None = None
    slot_problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def operations(self) -> dict[int, str]:
        """The operations that committed the restore points, by increment; empty if the chain can't be read."""
        if self.chain is None:
            return {}
        full = self.chain.stored_full
        return {full.increment: full.operation, **{one.increment: one.operation for one in self.summaries}}

    @property
    def bytes(self) -> int:
        """The total size of the objects that the restore points need, according to the commits."""
        if self.chain is None:
            return 0
        base = self.chain.stored_full.counts.get("bytes", 0) if self.base_bytes is None else self.base_bytes
        return base + sum(summary.bytes for summary in self.summaries if summary.increment > self.first)

    @property
    def increments(self) -> int:
        """The number of increments that have not been given up."""
        return sum(summary.increment >= self.first for summary in self.summaries)

    @property
    def restore_points(self) -> int:
        """The number of restore points that have not been given up: the increments, and the full snapshot."""
        return self.increments + (self.chain is not None and not self.first)

    @property
    def state(self) -> str:
        """The state, determined without reading the objects that commits list (only `check` reads these).

        Broken: a commit is missing or damaged. Ended: a command ended the chain, or a mark is damaged. Only-full: the
        increments were pruned. No increment can follow in any of these states. Slot-lost: a primary has no usable slot
        of the chain, so WAL after the last increment is lost.
        """
        if self.problem and not self.has_damaged_mark:
            return BROKEN
        if self.is_only_full:
            return ONLY_FULL
        if self.ended or self.has_damaged_mark:
            return ENDED
        return SLOT_LOST if self.lost_slots else COMPLETE

    @property
    def lost_slots(self) -> dict[str, str]:
        """The problems with the chain's slots on primaries, by node."""
        if self.chain is None:
            return {}
        return {node: why for node, why in self.slot_problems.items() if self.chain.shard_of(node) == node}

    @property
    def remark(self) -> str:
        """The explanation of the state for the operator; "" if none is needed."""
        pruned = "its increments were pruned, and no more can be added" if self.is_only_full else ""
        return self.problem or pruned or (self.ended.text if self.ended else "") or self._slots_text

    @property
    def _slots_text(self) -> str:
        found = self.lost_slots or self.slot_problems
        if not found:
            return ""
        nodes = list_some([f"node {node}: {why}" for node, why in found.items()], NODES_NAMED_MAX)
        if not self.lost_slots:
            return f"{nodes}: the next increment copies these standbys again"
        return (
            f"{nodes}; the next increment copies these shards again: snapshot create {self.name} --incremental; to end"
            f" the chain instead, and keep its restore points: snapshot end {self.name}"
        )


COMMIT_FILE = re.compile(r"/increments/0*(\d+)(?:\.\d+)?\.json$")


def read_restorable(store: ObjectStore, name: str, increment: int | None, merge_max: int | None = None) -> Chain:
    """Read a chain as read_from_merge does; if a commit is damaged or missing, the hint lists those before it."""
    try:
        return read_from_merge(store, name, increment, merge_max)
    except MergedAwayError:
        raise
    except (ManifestError, SnapshotMissingError) as error:
        if found := COMMIT_FILE.search(str(error.details.get("object", ""))):
            last = int(found[1]) - 1
            with suppress(SnapshotError):
                read_from_merge(store, name, last)
                error.hint += (
                    f"\nincrements that can still be restored: 0 to {last}; to restore the newest:"
                    f" {restore_command(name)} --increment {last}"
                )
        raise


def read_at(store: ObjectStore, name: str, moment: datetime) -> Chain:
    """Read a chain as `read_restorable` does, from the newest merge whose cut is not after `moment`."""
    chain = read_restorable(store, name, None)
    last = chain.last.increment
    while chain.beginning and cut_time(chain.full) > moment:
        # The first cut after the moment may be the one of the merge.
        try:
            chain = read_restorable(store, name, last, chain.full.increment - 1)
        except MergedAwayError as error:
            raise before_beginning_error(chain, moment, error) from None
    return chain


# Read at most this many operations that committed nothing or whose commit is gone; deletions leave many of them.
READ_MAX = 200


class MissingPoint(Struct, frozen=True):
    """A full snapshot (increment 0) or increment whose commit file `key` is missing."""

    snapshot: str
    increment: int
    key: str


def missing_texts(missing: Iterable[MissingPoint]) -> list[str]:
    """For each snapshot, return a line with its missing commits and the remedy; `missing` is ordered by increment."""
    return [_text_of(name, list(points)) for name, points in groupby(missing, key=lambda point: point.snapshot)]


def _text_of(name: str, points: list[MissingPoint]) -> str:
    first, more = points[0], len(points) - 1
    others = f" (as are those of later increments: {more:,})" if more else ""
    text = (
        f"{increment_label(name, first.increment)} was committed, but its commit file is missing from the store{others}"
        f": put it back from a copy of the store: {first.key}"
    )
    if first.increment:
        return text
    return f"{text}   or, if there is no copy, delete the snapshot: snapshot delete {name} --force"


def read_missing(store: ObjectStore, documents: Mapping[str, Set[str]], entries: Iterable[Entry]) -> list[MissingPoint]:
    """Find commits that are missing from `entries` (all snapshots in the store) but recorded by the newest operations.

    `documents` is the result of document_names, listed before the entries were read.
    """
    entries = list(entries)
    committed = committed_by(entries)
    ids = [operation for operation in list_ended(documents, has_intent=True) if operation not in committed]
    return find_missing(store, _read(store, documents, ids[:READ_MAX]), entries)


def read_missing_after(store: ObjectStore, documents: Mapping[str, Set[str]], entry: Entry) -> list[MissingPoint]:
    """Find missing increments after a snapshot's last increment, from the records of operations started after it."""
    if entry.chain is None:
        return []
    second = _second_of(entry.chain.last.operation)
    ids = sorted(set(list_ended(documents, has_intent=True)) - committed_by([entry]))
    later = _read(store, documents, [operation for operation in ids if operation >= second][:READ_MAX])
    return find_missing(store, [ended for ended in later if ended.snapshot == entry.name], [entry])


def find_missing(store: ObjectStore, ended: Iterable[Ended], entries: Iterable[Entry]) -> list[MissingPoint]:
    """Find the operations' restore points whose commit files are missing, sorted by snapshot and increment.

    The entries come from a listing and only save reads: each commit file is looked up by its key.
    """
    by_name = {entry.name: entry for entry in entries}
    points: dict[str, set[int]] = {}
    for operation in ended:
        is_done = operation.outcome is not None and operation.outcome.state == DONE
        is_commit = operation.kind == "create" and operation.increment is not None and is_done
        if is_commit and _may_be_missing(operation.id, by_name.get(operation.snapshot)):
            points.setdefault(operation.snapshot, set()).add(operation.increment or 0)
    return [point for name in sorted(points) for point in _look_for(store, name, sorted(points[name]))]


def committed_by(entries: Iterable[Entry]) -> set[str]:
    """Return the ids of the operations that committed the entries' restore points."""
    operations = set[str]()
    for entry in entries:
        operations |= {entry.chain.full.operation} if entry.chain else set()
        operations |= {summary.operation for summary in entry.summaries}
    return operations


def _may_be_missing(operation: str, entry: Entry | None) -> bool:
    if entry is None:
        return True
    # If the chain can't be read, its problem is reported instead. A damaged mark may be the mark of pruned increments.
    if entry.chain is None or entry.problem:
        return False
    # Ids from different seconds sort by time. Operations that are older than the full snapshot belong to an earlier
    # chain.
    return operation >= _second_of(entry.chain.full.operation)


def _look_for(store: ObjectStore, name: str, increments: Iterable[int]) -> Iterator[MissingPoint]:
    # If a commit file is unreadable, it still exists, so the commit is not missing.
    with suppress(ManifestError):
        if is_deleted(store, name):
            return
        is_pruned = is_only_full(store, name)
        for increment in increments:
            if increment and is_pruned:
                return
            with suppress(ManifestError):
                place = find_place(store, name, increment)
                if place.commit is None:
                    yield MissingPoint(name, increment, place.key)


def _second_of(operation: str) -> str:
    return operation.rpartition("-")[0]


def _read(store: ObjectStore, documents: Mapping[str, Set[str]], operations: Sequence[str]) -> Iterable[Ended]:
    return chain.from_iterable(read_batches(store, documents, operations))


class Listing(Struct, frozen=True):
    """A store's snapshots by name, the WAL that the nodes keep, operations without an outcome, and checks.

    `missing` are committed restore points whose commit files are missing. `pins` are the pins in force, by snapshot.
    `age_problem` says that the newest restore point is older than fleet.toml allows; "" if it is not. `copies` are the
    second stores, if fleet.toml names any, as their last copies left them. `slot_warnings` name the remedy for every
    chain past half of a node's limit, and what the next create does with its slots. `unmerged` has a line for every
    chain that grows for ever.
    """

    entries: tuple[Entry, ...]
    answers: RetainedAnswers
    open_operations: tuple[OpenOperation, ...] = ()
    checks: NewestChecks = field(default_factory=NewestChecks)
    missing: tuple[MissingPoint, ...] = ()
    pins: Mapping[str, tuple[StoredPin, ...]] = field(default_factory=dict)
    age_problem: str = ""
    copies: tuple[SecondStoreState, ...] = ()
    slot_warnings: tuple[str, ...] = ()
    unmerged: tuple[str, ...] = ()

    @property
    def warnings(self) -> list[str]:
        """A line for restore points that are too old or missing, and for every chain that needs action."""
        age = [self.age_problem] if self.age_problem else []
        return [*age, *missing_texts(self.missing), *self.slot_warnings, *self.unmerged]

    @property
    def notes(self) -> list[str]:
        """A line for every chain for which a node retains much WAL, unless there is a warning about it."""
        kept = (
            KeptChain("", entry.retained, entry.name) for entry in self.entries if entry.retained and not entry.ended
        )
        return [retained_text(one) for one in kept if one.worst.is_much and not one.worst.is_past_half]


def list_store(fleet: Fleet, *, all_checks: bool = False) -> Listing:
    """List every snapshot in the fleet's store, and at the same time query the nodes, which may fail to answer.

    With `all_checks`, checks before the newest full checks are read as well.
    """
    store = fleet.store.open()
    identity = read_identity(store, fleet)
    # A copy feeds no chain, so no node retains WAL for it.
    query = RetainedQuery(replace(fleet, nodes=()) if identity.is_copy else fleet)
    documents = document_names(store)
    open_operations = read_open_operations(store, documents=documents)
    read = (read_entry(store, identity, name) for name in snapshot_names(store))
    entries = [entry for entry in read if entry is not None]
    checks = read_checks(store, documents, None if all_checks else {entry.name for entry in entries})
    checks = checks.from_increments({entry.name: entry.first for entry in entries})
    missing, answers = tuple(read_missing(store, documents, entries)), query.answers()
    listed, now = tuple(_with_retained(entry, answers) for entry in entries), utc_now()
    pins = {entry.name: pins_in_force(store, entry.name, now) for entry in entries}
    problem = age_problem(newest_cut(entries, now), fleet.retention, now)
    copies = tuple(read_states(store, documents, first_store_chains(entries), len(fleet.copies)))
    warnings = tuple(_slot_warnings(store, fleet, listed, answers, documents))
    going_on = (entry.chain for entry in listed if entry.chain and entry.state == COMPLETE)
    unmerged = tuple(text for one in going_on if (text := unmerged_text(store, one, fleet, now)))
    return Listing(listed, answers, open_operations, checks, missing, pins, problem, copies, warnings, unmerged)


def first_store_chains(entries: Iterable[Entry]) -> dict[str, FirstStoreChain]:
    """Return the snapshots that can be read, as second stores are compared with them."""
    return {
        entry.name: FirstStoreChain.of(entry.chain.stored_full, entry.first, len(entry.summaries))
        for entry in entries
        if entry.chain
    }


def _slot_warnings(
    store: ObjectStore, fleet: Fleet, entries: Iterable[Entry], answers: RetainedAnswers, operations: Iterable[str]
) -> Iterator[str]:
    """Report chains past half of a node's limit, and every chain whose slots the next create drops."""
    entries_by_slot = {slot_name(entry.chain.full.chain): entry for entry in entries if entry.chain}
    slots = sorted({retained.slot for retained in answers.retained})
    # A listing reads the owners of slots only if there are slots that no readable snapshot explains.
    owners = None if entries_by_slot.keys() >= set(slots) else read_slot_owners(store, operations)
    for slot in slots:
        kept, entry = KeptChain(slot, answers.of_slot(slot)), entries_by_slot.get(slot)
        if entry is not None and entry.chain is not None:
            kept = structs.replace(kept, snapshot=entry.name, chain=entry.chain.full.chain)
            if entry.ended or entry.is_only_full:
                yield f"{ended_text(kept)}: the next create will drop its slots, or: snapshot end {entry.name}"
                continue
        elif owners is not None:
            kept = find_kept_chain(store, kept, owners.owner_of(slot))
        ended = entry is None and is_marked_ended(store, kept, Silent())
        if text := ruling_text(kept, rule_on_slots(kept, fleet, ended=ended)):
            yield text


def newest_cut(entries: Iterable[Entry], now: datetime) -> datetime | None:
    """Return the time of the newest cut with rows in a snapshot that is not broken; None if there is none.

    A cut in the future, when a clock was wrong, counts only if there is no other.
    """
    sound = [entry for entry in entries if entry.chain and not entry.chain.full.only_cut and entry.state != BROKEN]
    cuts = [cut_time(entry.chain.full) for entry in sound if entry.chain]
    cuts += [cut_time(summary) for entry in sound for summary in entry.summaries]
    return max(cuts, key=lambda cut: (not is_ahead(cut, now), cut), default=None)


def is_ahead(cut_at: datetime, now: datetime) -> bool:
    """Whether a cut is in the future, because a clock was wrong."""
    return cut_at > now + timedelta(seconds=AGREE_SECONDS_MAX)


def age_problem(newest: datetime | None, rules: Retention, now: datetime) -> str:
    """Return the problem with a newest restore point that is older than `max_age`; "" if it is not, or none is set."""
    limit_seconds = rules.max_age_seconds
    if limit_seconds is None:
        return ""
    limit = f"[retention] max_age allows {duration_text(limit_seconds)}"
    if newest is None:
        return f"there is no restore point; {limit}"
    if (age_seconds := (now - newest).total_seconds()) <= limit_seconds:
        return ""
    age = f"{age_seconds / 3600:,.1f} h"
    return f"the newest restore point, of {newest.astimezone(UTC):%Y-%m-%d %H:%M} UTC, is {age} old; {limit}"


def read_entry(
    store: ObjectStore,
    identity: StoreIdentity,
    name: str,
    read_commits: Callable[[ObjectStore, str], Chain] = read_newest_part,
) -> Entry | None:
    """Read the snapshot's entry for `list`, with the chain as read by `read_commits`; None if it has been deleted."""

    def read() -> Entry:
        chain = read_commits(store, name)
        check_of_fleet(chain, identity)
        entry = entry_of(store, chain)
        # A chain whose last commits were deleted in the meantime would seem to end earlier.
        check_not_deleted(store, name)
        return entry

    try:
        try:
            return read()
        except SnapshotMissingError:
            # The increments may have been pruned while the chain was read.
            return read()
    except SnapshotDeletedError:
        return None
    except (ManifestError, RefusedError) as error:
        try:
            # Don't show parts of a snapshot that may have been deleted.
            check_not_deleted(store, name)
            readable = read_readable_part(store, name)
            check_of_fleet(readable, identity)
        except (ManifestError, RefusedError):
            return Entry(name, None, error.message)
        # The restore points before the unreadable commit can still be restored.
        return Entry(name, readable, error.message, summaries=tuple(map(summary_of, readable.increments)))


def entry_of(store: ObjectStore, chain: Chain) -> Entry:
    """Read the entry of a readable chain; raises the errors of read_summaries."""
    summaries, marks = read_summaries(store, chain), read_marks(store, chain.name, chain.full.chain)
    first, merge = first_increment(store, chain.name), None
    # The chain may begin with a later merge; then a restore needs nothing of this one.
    with suppress(ManifestError):
        merge = newest_merge(store, chain.name, first) if first else None
    return Entry(
        chain.name,
        chain,
        marks.problem or None,
        has_damaged_mark=bool(marks.damaged),
        ended=marks.ended,
        is_only_full=marks.is_only_full,
        summaries=summaries,
        first=first,
        base_bytes=merge.counts["bytes"] if merge else None,
    )


def _with_retained(entry: Entry, answers: RetainedAnswers) -> Entry:
    if entry.chain is None:
        return entry
    retained = answers.of_slot(slot_name(entry.chain.full.chain))
    return structs.replace(with_slots(entry, answers.slots), retained=retained)


def with_slots(entry: Entry, slots: Mapping[str, Mapping[str, str]]) -> Entry:
    """Return the entry with the problems of its slots; `slots` has each slot's problem ("" if none), by node.

    The nodes in `slots` have the ids of fleet.toml; nodes that did not answer are missing. The copy of a standby that
    has ended needs no slot.
    """
    chain = entry.chain
    if chain is None or chain.full.only_cut or structs.replace(entry, slot_problems={}).state != COMPLETE:
        return entry
    own, problems = slot_name(chain.full.chain), dict[str, str]()
    for identity in chain.nodes:
        node, copy = identity.node, chain.absent.get(identity.node)
        of_node = slots.get(chain.listed_id(node))
        if of_node is None or (copy is not None and copy.has_ended):
            continue
        if problem := of_node.get(own, slot_problem(own, None)):
            problems[node] = problem
    return structs.replace(entry, slot_problems=problems)


class SnapshotDetails(Struct, frozen=True):
    """A snapshot with its whole chain, its operations without an outcome, all its pins, and the merges of the chain."""

    entry: Entry
    chain: Chain
    open_operations: tuple[OpenOperation, ...]
    pins: tuple[StoredPin, ...] = ()
    merges: tuple[Merge, ...] = ()


def show_snapshot(fleet: Fleet, name: str, increment: int | None = None) -> SnapshotDetails:
    """Read a snapshot up to an increment (None: the newest); raises SnapshotMissingError, ManifestError."""
    store = fleet.store.open()
    identity = read_identity(store, fleet)
    open_operations = read_open_operations(store, name)
    with naming_open_operations(open_operations):
        chain = read_shown(store, name, increment)
    check_of_fleet(chain, identity)
    entry = entry_of(store, chain)
    merges = tuple(_read_merges(store, name, range(entry.first, chain.last.increment + 1)))
    return SnapshotDetails(entry, chain, open_operations, read_pins(store, name), merges)


def _read_merges(store: ObjectStore, name: str, increments: range) -> Iterator[Merge]:
    """Yield the merges at these increments that can be read: a check reports the others."""
    for number in merge_numbers(store, name):
        with suppress(ManifestError):
            if number in increments and (merge := find_merge(store, name, number).merge) is not None:
                yield merge


def read_shown(store: ObjectStore, name: str, increment: int | None = None) -> Chain:
    """Read a chain up to an increment (None: the newest) from where it begins for good: its full snapshot or a merge.

    Raises the errors of read_from_merge.
    """
    first = first_increment(store, name)
    if not first:
        return read_chain(store, name, increment)
    return read_from_merge(store, name, increment, first if increment is None else min(first, increment))


def find_doubts(
    store: ObjectStore, documents: Mapping[str, Set[str]], chain: Chain, *, is_newest: bool
) -> tuple[str, ...]:
    """Report conflicts found by a check and, if the chain `is_newest`, later increments with missing commit files.

    If it is not, report the shards of which its last increment may hold transactions that were lost since.

    `documents` is the result of document_names, listed before the chain was read. Raises the errors of read_summaries.
    """
    missing = read_missing_after(store, documents, entry_of(store, chain)) if is_newest else []
    doubts = missing_texts(missing)
    doubts += [] if is_newest else map(lost_text, read_lost_since(store, chain))
    checks = read_checks(store, documents, {chain.name})
    last = chain.last.increment
    if standing := checks.standing_conflicts(chain.name, last + 1):
        doubts.append(
            f"a check of {chain.name} up to increment {standing.point.increment}, which ended at {standing.ended_at},"
            f" found conflicts; to check whether they affect increment {last}: snapshot check"
            f" {chain.name} --increment {last}{' --restorable' * (standing.point.restorable is False)}"
        )
    return tuple(doubts)
