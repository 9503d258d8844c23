"""List a store: its snapshots and increments according to the commits, without reading any other object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from cutline.fleet.config import Fleet
from cutline.snapshots.activity.checks import NewestChecks, read_checks
from cutline.snapshots.listing.entry import Entry
from cutline.snapshots.listing.missing_points import MissingPoint, missing_texts, read_missing
from cutline.snapshots.operations.open_operations import OpenOperation, naming_open_operations, read_open_operations
from cutline.snapshots.operations.recorded import document_names
from cutline.snapshots.operations.slot_guard import KeptChain, ended_text, over_limit_text, warning_text
from cutline.snapshots.records.chain import Chain, summary_of
from cutline.snapshots.records.chains import read_chain, read_newest_part, read_readable_part, read_summaries
from cutline.snapshots.records.commits import SnapshotMissingError, snapshot_names
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.lost_chains import read_marks
from cutline.snapshots.records.store_identity import StoreIdentity, check_of_fleet, read_identity
from cutline.snapshots.records.tombstones import SnapshotDeletedError, check_not_deleted
from cutline.storage.errors import RefusedError
from cutline.storage.store import ObjectStore
from cutline.wal.slots.retained import RetainedAnswers, RetainedQuery
from cutline.wal.slots.slots import slot_name


@dataclass(frozen=True, slots=True)
class Listing:
    """The snapshots of a store by name, the WAL that the nodes keep, operations without an outcome, and checks.

    `missing` were committed, and their commit files are gone.
    """

    entries: tuple[Entry, ...]
    answers: RetainedAnswers
    open_operations: tuple[OpenOperation, ...] = ()
    checks: NewestChecks = field(default_factory=NewestChecks)
    missing: tuple[MissingPoint, ...] = ()

    @property
    def warnings(self) -> list[str]:
        """A line for every restore point that is missing, and for every chain past half of a node's limit."""
        entries_by_slot = {slot_name(one.chain.full.chain): one for one in self.entries if one.chain}
        warnings = missing_texts(self.missing)
        for slot in sorted({one.slot for one in self.answers.retained}):
            entry = entries_by_slot.get(slot)
            kept = KeptChain(slot, self.answers.of_slot(slot), entry.name if entry else None)
            if entry and entry.lost:
                warnings.append(f"{ended_text(kept)}: the next create drops its slots")
            elif kept.worst.is_past_limit:
                warnings.append(f"{over_limit_text(kept)}: the next create marks the chain as lost and drops its slots")
            elif kept.worst.is_past_half:
                warnings.append(warning_text(kept))
        return warnings


def list_store(fleet: Fleet, *, all_checks: bool = False) -> Listing:
    """Every snapshot in the fleet's store. The nodes are asked at the same time, and need not answer.

    With `all_checks`, also those before the newest full ones are looked for.
    """
    store = fleet.store.open()
    identity = read_identity(store, fleet)
    query = RetainedQuery(fleet.nodes)
    documents = document_names(store)
    open_operations = read_open_operations(store, documents=documents)
    read = (read_entry(store, identity, name) for name in snapshot_names(store))
    entries = [entry for entry in read if entry is not None]
    checks = read_checks(store, documents, None if all_checks else {entry.name for entry in entries})
    missing, answers = tuple(read_missing(store, documents, entries)), query.answers()
    listed = tuple(_with_retained(entry, answers) for entry in entries)
    return Listing(listed, answers, open_operations, checks, missing)


def read_entry(
    store: ObjectStore,
    identity: StoreIdentity,
    name: str,
    read_commits: Callable[[ObjectStore, str], Chain] = read_newest_part,
) -> Entry | None:
    """What `list` shows of the snapshot, and the chain as `read_commits` reads it; None if it has been deleted."""

    def read() -> Entry:
        chain = read_commits(store, name)
        check_of_fleet(chain, identity)
        entry = entry_of(store, chain)
        # A chain whose last commits were deleted meanwhile would seem to end earlier.
        check_not_deleted(store, name)
        return entry

    try:
        try:
            return read()
        except SnapshotMissingError:
            # Its increments may have been pruned while it was read.
            return read()
    except SnapshotDeletedError:
        return None
    except (ManifestError, RefusedError) as error:
        try:
            # Nothing is shown of a snapshot that may have been deleted.
            check_not_deleted(store, name)
            readable = read_readable_part(store, name)
            check_of_fleet(readable, identity)
        except (ManifestError, RefusedError):
            return Entry(name, None, error.message)
        # The restore points before what can't be read can be restored as ever.
        return Entry(name, readable, error.message, summaries=tuple(map(summary_of, readable.increments)))


def entry_of(store: ObjectStore, chain: Chain) -> Entry:
    """The entry of a chain that can be read; raises what read_summaries raises."""
    summaries, marks = read_summaries(store, chain), read_marks(store, chain.name, chain.full.chain)
    return Entry(
        chain.name,
        chain,
        marks.problem or None,
        has_damaged_mark=bool(marks.damaged),
        lost=marks.lost,
        is_only_full=marks.is_only_full,
        summaries=summaries,
    )


def _with_retained(entry: Entry, answers: RetainedAnswers) -> Entry:
    if entry.chain is None:
        return entry
    return replace(entry, retained=answers.of_slot(slot_name(entry.chain.full.chain)))


@dataclass(frozen=True, slots=True)
class SnapshotDetails:
    """One snapshot with its whole chain, and its operations without an outcome."""

    entry: Entry
    chain: Chain
    open_operations: tuple[OpenOperation, ...]


def show_snapshot(fleet: Fleet, name: str, increment: int | None = None) -> SnapshotDetails:
    """Read one snapshot, up to an increment (None: the newest); raises SnapshotMissingError, ManifestError."""
    store = fleet.store.open()
    identity = read_identity(store, fleet)
    open_operations = read_open_operations(store, name)
    with naming_open_operations(open_operations):
        chain = read_chain(store, name, increment)
    check_of_fleet(chain, identity)
    return SnapshotDetails(entry_of(store, chain), chain, open_operations)
