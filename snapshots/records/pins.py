"""Pins: restore points that an operator wants to keep, whatever the retention rules say.

A pin is a document of its own, and so is its release; neither is ever changed. A pin is in force from the moment at
which it is stored until its release is stored or its time is up. A pinned restore point needs its full snapshot and the
increments before it, so these stay, too. `prune` never removes a pinned restore point; `delete` does so only if forced.

A pin that can't be read is in force: it keeps everything in its snapshot. A release that can't be read releases
nothing. Pins are deleted with their snapshot.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime
from enum import StrEnum

from msgspec import UNSET, Struct, UnsetType

from cutline.fleet.own_process import read_label
from cutline.fleet.record import Count, Record, Time
from cutline.snapshots.records.documents import ManifestError, check_about, read_sealed, seal
from cutline.snapshots.records.proven_chains import increment_label
from cutline.storage.ids import OPERATION_ID
from cutline.storage.store import ObjectMissingError, ObjectStore
from cutline.storage.storing import create_or_find

PIN_FILE = re.compile(rf"(?P<pin>{OPERATION_ID.pattern})(?P<released>\.released)?\.json")


class PinState(StrEnum):
    """The state of a pin: in force, past its time, or released."""

    IN_FORCE = "in-force"
    EXPIRED = "expired"
    RELEASED = "released"


class Pin(Record, frozen=True, kw_only=True, omit_defaults=True, tag_field="schema", tag="cutline/pin/1"):
    """The pin of a restore point: an increment, or the full snapshot (0).

    `pin` is its id, in the form of an operation's id. `by` is the label of the command that stored it at `at`. It
    expires at `until`, if set.
    """

    snapshot: str
    increment: Count
    pin: str
    at: Time
    by: str
    until: Time | UnsetType = UNSET
    reason: str = ""


class PinRelease(Record, frozen=True, kw_only=True, tag_field="schema", tag="cutline/pin-release/1"):
    """The release of a pin: from `at` on, it keeps nothing. `by` is the label of the command that stored it."""

    snapshot: str
    pin: str
    at: Time
    by: str


class StoredPin(Struct, frozen=True):
    """A pin in the store; `pin` is None if it can't be read, and `problem` then says why."""

    id: str
    pin: Pin | None
    release: PinRelease | None = None
    problem: str = ""

    def state(self, now: datetime) -> PinState:
        """Return the state of the pin at a time."""
        if self.release is not None:
            return PinState.RELEASED
        until = self.until
        return PinState.EXPIRED if until is not None and until <= now else PinState.IN_FORCE

    @property
    def increment(self) -> int | None:
        """The pinned increment; None if it is unknown, so that everything in the snapshot is pinned."""
        return None if self.pin is None else self.pin.increment

    @property
    def until(self) -> datetime | None:
        """The time at which the pin expires; None if it does not."""
        if self.pin is None or isinstance(self.pin.until, UnsetType):
            return None
        return datetime.fromisoformat(self.pin.until)

    @property
    def text(self) -> str:
        """By whom, until when and why the restore point is pinned."""
        if self.pin is None:
            return f"the pin can't be read, so it keeps the whole snapshot: {self.problem}"
        label = read_label(self.pin.by)
        by = f"by {label.user}@{label.host}" if label else "by an unknown user"
        until = "" if isinstance(self.pin.until, UnsetType) else f" until {self.pin.until[:16].replace('T', ' ')} UTC"
        return f"{by}{until}" + (f": {self.pin.reason}" if self.pin.reason else "")


def pin_key(snapshot: str, pin: str) -> str:
    """Return the key of a pin."""
    return f"{_folder(snapshot)}/{pin}.json"


def release_key(snapshot: str, pin: str) -> str:
    """Return the key of the release of a pin."""
    return f"{_folder(snapshot)}/{pin}.released.json"


def _folder(snapshot: str) -> str:
    return f"snapshots/{snapshot}/pins"


def put_pin(store: ObjectStore, pin: Pin) -> None:
    """Store a pin; raises StoreAnswersLostError if it is unknown whether it was stored."""
    create_or_find(store, pin_key(pin.snapshot, pin.pin), seal(pin))


def put_release(store: ObjectStore, release: PinRelease) -> None:
    """Store the release of a pin; raises ObjectExistsError if the pin was released before."""
    create_or_find(store, release_key(release.snapshot, release.pin), seal(release))


def read_pins(store: ObjectStore, snapshot: str) -> tuple[StoredPin, ...]:
    """Return all pins of a snapshot, oldest first."""
    found = [match for child in store.list_children(_folder(snapshot)) if (match := PIN_FILE.fullmatch(child))]
    released = {match["pin"] for match in found if match["released"]}
    ids = sorted(match["pin"] for match in found if not match["released"])
    pins = (_read_stored(store, snapshot, pin, is_released=pin in released) for pin in ids)
    return tuple(pin for pin in pins if pin is not None)


def pins_in_force(store: ObjectStore, snapshot: str, now: datetime) -> tuple[StoredPin, ...]:
    """Return the pins of a snapshot that are in force at a time, oldest first."""
    return tuple(pin for pin in read_pins(store, snapshot) if pin.state(now) is PinState.IN_FORCE)


def pinned_text(snapshot: str, pin: StoredPin, *, is_over: bool = False) -> str:
    """Return what a pin pins, or did if it `is_over`, by whom, until when and why."""
    what = f"snapshot {snapshot}" if pin.increment is None else increment_label(snapshot, pin.increment)
    return f"{what} {'was' if is_over else 'is'} pinned {pin.text}" if pin.pin else f"{what}: {pin.text}"


def read_pin(store: ObjectStore, snapshot: str, pin_id: str) -> Pin:
    """Read a pin; raise ObjectMissingError or ManifestError."""
    key = pin_key(snapshot, pin_id)
    pin: Pin = read_sealed(store, key, Pin)
    check_about(key, f"pin {pin.pin} of snapshot {pin.snapshot}", f"pin {pin_id} of snapshot {snapshot}")
    return pin


def read_release(store: ObjectStore, snapshot: str, pin_id: str) -> PinRelease:
    """Read the release of a pin; raise ObjectMissingError or ManifestError."""
    key = release_key(snapshot, pin_id)
    release: PinRelease = read_sealed(store, key, PinRelease)
    check_about(key, f"pin {release.pin} of snapshot {release.snapshot}", f"pin {pin_id} of snapshot {snapshot}")
    return release


def _read_stored(store: ObjectStore, snapshot: str, pin_id: str, *, is_released: bool) -> StoredPin | None:
    """Return a pin with its release; None if it has been deleted with its snapshot."""
    release: PinRelease | None = None
    if is_released:
        with suppress(ObjectMissingError, ManifestError):
            release = read_release(store, snapshot, pin_id)
    try:
        return StoredPin(pin_id, read_pin(store, snapshot, pin_id), release)
    except ObjectMissingError:
        return None
    except ManifestError as error:
        return StoredPin(pin_id, None, release, error.message)
