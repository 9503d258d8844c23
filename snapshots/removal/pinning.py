"""The `keep` command: pin a restore point against removal, and release its pins. Contacts only the store.

A removal and a pin may meet. A removal stores its intent before it reads the pins, and its mark after that; a pin is
stored before its command reads the intents and marks. So at least one of the two sees the other: the removal then ends
before its mark, or the pin is released again and its command fails.
"""

from __future__ import annotations

from collections.abc import Container
from contextlib import suppress
from datetime import datetime

from msgspec import UNSET, Struct

from cutline.fleet.config import Fleet
from cutline.fleet.own_process import own_label
from cutline.fleet.record import Time
from cutline.snapshots.operations.open_operations import read_open_intents
from cutline.snapshots.operations.operation import current_time
from cutline.snapshots.records.merged_chain import check_kept, read_from_merge
from cutline.snapshots.records.operation_records import DELETE, PRUNE, Intent
from cutline.snapshots.records.pins import (
    Pin,
    PinRelease,
    StoredPin,
    pinned_text,
    pins_in_force,
    put_pin,
    put_release,
    release_key,
)
from cutline.snapshots.records.proven_chains import (
    check_name,
    increment_label,
    increments_pruned_error,
)
from cutline.snapshots.records.store_identity import read_identity
from cutline.snapshots.records.tombstones import check_not_deleted, is_only_full
from cutline.storage.clock import utc_now
from cutline.storage.errors import BusyError, RefusedError, SnapshotError
from cutline.storage.ids import new_operation_id
from cutline.storage.store import ObjectExistsError, ObjectStore

KEEP = "keep"


class PinnedError(RefusedError):
    """A removal would remove a pinned restore point."""


class NotPinnedError(RefusedError):
    """No pin of the restore point is in force."""


class NotReleasedError(RefusedError):
    """An object that can't be read is in the place of a release."""


class BeingRemovedError(BusyError):
    """The restore point is being removed, so a pin may come too late."""


class PinChange(Struct, frozen=True):
    """What `keep` did: the pins that it stored, or released, and the pins of the snapshot that are in force now."""

    snapshot: str
    changed: tuple[StoredPin, ...]
    in_force: tuple[StoredPin, ...]


def pin_point(fleet: Fleet, name: str, increment: int | None, until: datetime | None, reason: str) -> PinChange:
    """Pin a restore point; `increment` None is the newest.

    Raises SnapshotMissingError (MergedAwayError if the restore point was given up), ManifestError, and
    BeingRemovedError: no pin is in force then, unless the store failed.
    """
    store = fleet.store.open()
    read_identity(store, fleet)
    return pin_in_store(store, name, increment, until, reason)


def pin_in_store(
    store: ObjectStore, name: str, increment: int | None, until: datetime | None = None, reason: str = ""
) -> PinChange:
    """Like `pin_point`, in a store that belongs to the fleet."""
    chain = read_from_merge(store, name, increment)
    pin = Pin(
        snapshot=name,
        increment=chain.last.increment,
        pin=new_operation_id(utc_now()),
        at=current_time(),
        by=own_label(KEEP, name),
        until=UNSET if until is None else Time.of(until),
        reason=reason,
    )
    try:
        put_pin(store, pin)
        _check_not_removed(store, pin)
    except BaseException:
        # The answer to the put may be lost. Releasing a pin that does not exist does no harm.
        with suppress(SnapshotError):
            _release(store, name, pin.pin)
        raise
    return PinChange(name, (StoredPin(pin.pin, pin),), pins_in_force(store, name, utc_now()))


def release_pins(fleet: Fleet, name: str, increment: int | None) -> PinChange:
    """Release all pins of a restore point that are in force; `increment` None: of the whole snapshot.

    Raises NotPinnedError, NotReleasedError.
    """
    store = fleet.store.open()
    read_identity(store, fleet)
    return release_in_store(store, name, increment)


def release_in_store(store: ObjectStore, name: str, increment: int | None) -> PinChange:
    """Like `release_pins`, in a store that belongs to the fleet."""
    check_not_deleted(store, check_name(name))
    pins = pins_in_force(store, name, utc_now())
    chosen = tuple(pin for pin in pins if increment is None or pin.increment == increment)
    if not chosen:
        what = f"snapshot {name}" if increment is None else increment_label(name, increment)
        raise NotPinnedError(
            f"{what} has no pin in force", hint="see: snapshot list", details={"snapshot": name, "increment": increment}
        )
    for pin in chosen:
        _release(store, name, pin.id)
    left = pins_in_force(store, name, utc_now())
    if stuck := [pin for pin in left if pin in chosen]:
        key = release_key(name, stuck[0].id)
        raise NotReleasedError(
            f"{pinned_text(name, stuck[0])}; its release can't be stored, because object {key} is in its place",
            hint="Cutline did not write this object as it is: remove it from the store, then repeat the command",
            details={"snapshot": name, "object": key},
        )
    return PinChange(name, chosen, left)


def check_not_pinned(store: ObjectStore, name: str, kind: str) -> None:
    """Raise PinnedError if a pin is in force that a removal of this kind would break."""
    pins = pins_in_force(store, name, utc_now())
    broken = [pin for pin in pins if kind == DELETE or pin.increment != 0]
    if broken:
        raise pinned_error(name, broken[0])


def check_none_pinned(store: ObjectStore, name: str, increments: Container[int]) -> None:
    """Raise PinnedError if a pin is in force on one of the increments that are to be given up, or can't be read."""
    for pin in pins_in_force(store, name, utc_now()):
        if pin.increment is None or pin.increment in increments:
            raise pinned_error(name, pin)


def pinned_error(name: str, pin: StoredPin) -> PinnedError:
    """Return the error for removing a pinned restore point."""
    at = "" if pin.increment is None else f"@{pin.increment}"
    release = f"release the pin first: snapshot keep {name}{at} --release"
    return PinnedError(
        pinned_text(name, pin),
        hint=f"{release}   or delete the snapshot anyway: snapshot delete {name} --force",
        details={"snapshot": name, "increment": pin.increment, "pin": pin.id},
    )


def _release(store: ObjectStore, name: str, pin: str) -> None:
    with suppress(ObjectExistsError):
        put_release(store, PinRelease(snapshot=name, pin=pin, at=current_time(), by=own_label(KEEP, name)))


def _check_not_removed(store: ObjectStore, pin: Pin) -> None:
    """Raise unless no removal has removed the pinned restore point, or may still do so without having seen the pin."""
    for intent in read_open_intents(store, skips_unreadable=True):
        if intent.snapshot == pin.snapshot and _may_remove(intent, pin):
            raise BeingRemovedError(
                f"{increment_label(pin.snapshot, pin.increment)} was not pinned: operation {intent.id} may be removing"
                " it",
                hint="repeat the command when the operation has ended; see: snapshot status   if its process has died,"
                " the next prune or create settles it",
                details={"snapshot": pin.snapshot, "increment": pin.increment, "operation": intent.id},
            )
    check_not_deleted(store, pin.snapshot)
    if pin.increment and is_only_full(store, pin.snapshot):
        raise increments_pruned_error(pin.snapshot)
    check_kept(store, pin.snapshot, pin.increment)


def _may_remove(intent: Intent, pin: Pin) -> bool:
    """Whether the operation may remove the pinned restore point.

    A prune removes either all increments or, if it has an increment itself, what lies before that.
    """
    if intent.kind != PRUNE:
        return intent.kind == DELETE
    return pin.increment < intent.increment if intent.increment else pin.increment > 0
