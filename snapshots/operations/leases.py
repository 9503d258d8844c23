"""Leases: a restore, repair or merge records in the store that it reads a snapshot, which protects it from deletion.

A lease is an operation's intent with an expiry time; each renewal is a new object. A restore stores its lease and then
looks for a tombstone; a deletion stores its tombstone and then looks for leases. So if the two overlap, the second
command sees the first and ends. An operation that was suspended until its lease expired may fail because of what others
have done meanwhile, which it names (snapshots/operations/removed_chains.py). Leases only save work: no invariant
depends on them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime, timedelta

from msgspec import UNSET, Struct, UnsetType, structs

from cutline.fleet.own_process import own_label, own_process, read_label
from cutline.fleet.progress import Progress, Reading
from cutline.fleet.record import Time
from cutline.snapshots.operations.committing import decide
from cutline.snapshots.operations.open_operations import RESTORE, read_open_intents
from cutline.snapshots.operations.operation import OutcomeDetails, begin, code_of, reason_of, record_outcome
from cutline.snapshots.operations.removed_chains import check_not_removed, naming_removal
from cutline.snapshots.records.documents import checking
from cutline.snapshots.records.operation_records import (
    IN_STORE,
    MERGE,
    REPAIR,
    Intent,
    LeaseRenewal,
    RestoreFigures,
    operation_key,
    read_renewal,
    write_operation_record,
)
from cutline.storage.clock import utc_now
from cutline.storage.errors import BusyError, IndeterminateError, SnapshotError, UnreachableError
from cutline.storage.store import ObjectExistsError, ObjectStore, StoreUnfitError

# Long enough for a store that is unreachable for a few minutes, and for clocks that differ by a few minutes.
LEASE_SECONDS = 900.0
RENEW_SECONDS = 180.0
END_SECONDS_MAX = 5.0
LEASE_FILE = re.compile(r"lease-(\d+)\.json")
# The kinds of operations that hold a lease while they read a snapshot.
LEASED = (RESTORE, *IN_STORE)


class SnapshotInUseError(BusyError):
    """A restore, repair or merge is reading the snapshot."""


class Lease(Struct, frozen=True):
    """The lease of an operation without an outcome: the operation, the process that runs it, and the expiry."""

    operation: Intent
    label: str
    until: datetime

    def is_running(self, now: datetime) -> bool:
        """Whether the operation may still be reading."""
        return now < self.until

    @property
    def what(self) -> str:
        """What is being done with the snapshot."""
        return {REPAIR: "repaired", MERGE: "merged"}.get(self.operation.kind, "restored")

    def details(self) -> dict[str, object]:
        """Return snapshot, operation, owner and expiry, for the details of an error."""
        owner = read_label(self.label)
        return {
            "snapshot": self.operation.snapshot,
            "operation": self.operation.id,
            "user": owner.user if owner else None,
            "host": owner.host if owner else None,
            "process": owner.process if owner else None,
            "since": self.operation.began_at,
            "until": Time.of(self.until),
        }


class HeldLease(Struct):
    """A lease while it is held. `is_stored` is set if the operation is recorded in the store.

    If it could not be recorded, `problem` is the store's error.

    The holder sets `stays_open` if no outcome may be recorded when the process ends with an error, and `is_done` when
    the work is complete, even if the process is interrupted afterwards. It sets `is_committing` before it stores a
    repair or merge: from then on, only the store shows whether the work is done. If the block raises, `hold_lease`
    finds out, sets `is_done` if it was stored, and clears `is_committing`, unless the store does not answer. `figures`
    are the measurements to record, and `is_typical` allows estimates for other restores to use them; `volumes` are
    those of a repair. `code` is the exit code of a complete command, if it is not 0.
    """

    is_stored: bool
    stays_open: bool = False
    is_done: bool = False
    figures: RestoreFigures | UnsetType = UNSET
    is_typical: bool = False
    code: int = 0
    is_committing: bool = False
    volumes: dict[str, int] | UnsetType = UNSET
    problem: SnapshotError | None = None

    def details(self, code: int) -> OutcomeDetails:
        """Return the outcome's details for an operation that is done; `code` is the command's exit code."""
        figures = self.figures
        if isinstance(figures, UnsetType):
            return OutcomeDetails(code, self.volumes)
        volumes = {"rows": figures.rows, "bytes": figures.bytes, "transactions": figures.transactions}
        if self.is_typical:
            return OutcomeDetails(code, volumes, figures=figures)
        return OutcomeDetails(
            code, volumes, phases={name: step_figures.seconds for name, step_figures in figures.steps.items()}
        )


@contextmanager
def hold_lease(
    store: ObjectStore, intent: Intent, progress: Progress, begins_at: int = 0, *, is_resumed: bool = False
) -> Iterator[HeldLease]:
    """Record the operation, and protect its snapshot from deletion while the block reads it.

    `begins_at` is the increment with which the chain begins that the block reads. An intent without `by` gets this
    process's label. If the operation `is_resumed`, its intent is already stored, and only its lease is renewed. A store
    that accepts no writes is read without a lease, and `progress` gets a note; a repair or merge gets no note, because
    it has to raise the error (`problem`).

    Raises SnapshotDeletedError, even if the snapshot is deleted only while it is being read, and SnapshotMissingError
    if the increment was pruned or given up.
    """
    by = own_label(intent.kind, intent.snapshot) if isinstance(intent.by, UnsetType) else intent.by
    intent = structs.replace(intent, expires_at=lease_expiry(), by=by, process=own_process() or UNSET)
    held, is_unsure = HeldLease(is_stored=False), False
    number = 1
    try:
        if is_resumed:
            number = _renew(store, intent, number) + 1
        else:
            begin(store, intent)
        held.is_stored = True
    except (UnreachableError, StoreUnfitError, IndeterminateError) as error:
        is_unsure, held.problem = isinstance(error, IndeterminateError), error
        if intent.kind not in IN_STORE:
            progress.note(
                f"snapshot {intent.snapshot} is not protected from deletion while it is read, and history and metrics"
                f" may not show this {'drill' if intent.is_drill else intent.kind}: its lease could not be stored"
                f" ({error.message})"
            )
    try:
        if held.is_stored:
            progress.tell(Reading(0, operation=intent.operation))
        check_not_removed(store, intent.snapshot, intent.increment, begins_at)
        with (
            naming_removal(store, intent, begins_at, is_stored=held.is_stored),
            _renewing(store, intent, progress, number) if held.is_stored else nullcontext(),
        ):
            yield held
    except BaseException as error:
        progress.ending()
        if not held.stays_open and (held.is_stored or is_unsure):
            with suppress(SnapshotError):
                if held.is_committing:
                    held.is_done, held.is_committing = held.is_done or decide(store, intent), False
                if held.is_done:
                    record_outcome(store, intent, "done", details=held.details(code_of(error)))
                else:
                    record_outcome(store, intent, "failed", reason_of(error), OutcomeDetails(code_of(error)))
        raise
    progress.ending()
    # The intent may be stored although the store's answer was lost. Without an outcome, it would look like the intent
    # of a dead restore.
    if held.is_stored or is_unsure:
        try:
            record_outcome(store, intent, "done", details=held.details(held.code))
        except (UnreachableError, IndeterminateError) as error:
            progress.note(f"the outcome of operation {intent.operation} could not be stored: {error.message}")


def _renew(store: ObjectStore, intent: Intent, number: int) -> int:
    """Renew the lease under the first free number from `number` on; return that number."""
    while True:
        try:
            write_operation_record(store, f"lease-{number}", LeaseRenewal(intent.operation, lease_expiry()))
        except ObjectExistsError:
            # This renewal was stored by another process, or by an earlier put whose answer was lost.
            number += 1
        else:
            return number


@contextmanager
def _renewing(store: ObjectStore, intent: Intent, progress: Progress, number: int) -> Iterator[None]:
    """Renew the lease in a thread while the block runs; `number` is the number of the next renewal."""
    done = threading.Event()

    def renew() -> None:
        following = number
        while not done.wait(RENEW_SECONDS):
            try:
                following = _renew(store, intent, following) + 1
            except SnapshotError as error:
                progress.note(f"the lease on snapshot {intent.snapshot} could not be renewed: {error.message}")

    thread = threading.Thread(target=renew, name=f"lease of {intent.operation}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        # The wait is bounded, because the store may not answer.
        thread.join(END_SECONDS_MAX)


def open_leases(store: ObjectStore, *snapshots: str) -> list[Lease]:
    """Return the leases of operations without an outcome, oldest first: on these snapshots, or on all if none is named.

    Some may have expired.

    Raises ManifestError if a renewal can't be read; an unreadable intent is skipped.
    """
    return [
        read_lease(store, operation)
        for operation in read_open_intents(store, skips_unreadable=True)
        if operation.kind in LEASED and (not snapshots or operation.snapshot in snapshots)
    ]


def check_not_in_use(store: ObjectStore, snapshot: str) -> None:
    """Raise SnapshotInUseError if a restore or repair is reading the snapshot.

    A lease can't be overridden: it ends with its restore, and expires within minutes if the restore died. Such a
    restore stays open, because its databases still exist and must be removed.
    """
    now = utc_now()
    for lease in open_leases(store, snapshot):
        if lease.is_running(now):
            raise in_use_error(lease)


def in_use_error(lease: Lease) -> SnapshotInUseError:
    """Return the error for removing a snapshot that a restore or repair is reading."""
    details = lease.details()
    host = f"{details['user']}@{details['host']} (process {details['process']})" if details["host"] else "unknown"
    return SnapshotInUseError(
        f"snapshot {lease.operation.snapshot} is being {lease.what}: operation {lease.operation.id} by {host}, since"
        f" {lease.operation.began_at}; its lease runs until {details['until']}",
        hint=f"repeat the command when the {lease.operation.kind} has ended or, if its process is gone, when its lease"
        " has expired",
        details=details,
    )


def read_lease(store: ObjectStore, intent: Intent) -> Lease:
    """Read the lease of a restore, with the latest expiry among its renewals; raise ManifestError.

    Renewals are read from the highest number down.
    """
    until = _first_expiry(intent)
    listed = map(LEASE_FILE.fullmatch, store.list_children(f"operations/{intent.operation}"))
    numbers = {int(match[1]) for match in listed if match}
    # A listing may be out of date, so the number after each listed number is looked up by key. A listed object may be
    # missing, and a renewal may be older than those with lower numbers, unless the restore itself wrote all of them.
    for first in sorted({1, *numbers, *(number + 1 for number in numbers)}, reverse=True):
        number = first
        while renewal := read_renewal(store, intent.operation, number):
            until = max(until, datetime.fromisoformat(renewal.expires_at))
            number += 1
            if number in numbers:
                break
        if number > first and until > utc_now() + timedelta(seconds=RENEW_SECONDS):
            break
    return Lease(intent, "" if isinstance(intent.by, UnsetType) else intent.by, until)


def _first_expiry(intent: Intent) -> datetime:
    with checking(operation_key(intent.operation, "intent")):
        if not isinstance(intent.expires_at, UnsetType):
            return datetime.fromisoformat(intent.expires_at)
        return datetime.fromisoformat(intent.began_at) + timedelta(seconds=LEASE_SECONDS)


def lease_expiry() -> Time:
    """Return the expiry of a lease that begins now."""
    return Time.of(utc_now() + timedelta(seconds=LEASE_SECONDS))
