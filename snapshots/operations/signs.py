"""Signs of life, which report an operation's progress, and requests to stop it. Both are numbered objects.

A process stores a sign at intervals, each under a new number. The newest sign counts, and the process deletes the
previous sign, so there are one or two at a time. At the end it deletes all its signs. The signs of a killed process
stay until gc, or the command that settles its operation, deletes them. Requests are kept as a record of who made them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timedelta

from msgspec import UNSET, UnsetType

from cutline.fleet.own_process import is_gone, own_label, own_process
from cutline.fleet.record import Time
from cutline.snapshots.records.operation_records import (
    CancelRequest,
    Intent,
    SignOfLife,
    operation_key,
    read_cancel_request,
    read_sign,
    write_operation_record,
)
from cutline.storage.errors import SnapshotError
from cutline.storage.store import ObjectExistsError, ObjectStore

SIGN, REQUEST = (re.compile(rf"{name}-([1-9]\d{{0,11}})\.json") for name in ("sign", "cancel"))
# No process stores this many signs; Cutline has not stored any sign with a higher number.
NUMBER_MAX = 10**9
# How often a process stores a sign.
SIGN_SECONDS = 6.0
# The maximum delay of a sign, which allows for a store that does not answer and for clocks that differ.
DEAD_SECONDS = 60.0
# How many numbers to try, starting at the newest listed sign, if that sign has been deleted since.
TRIED_MAX = 5


def shows_life(intent: Intent | None, sign: SignOfLife | None, now: datetime) -> bool:
    """Whether the process of an operation is alive according to its newest sign, or its intent if it has no sign."""
    about = sign or intent
    if about is None or (not isinstance(about.process, UnsetType) and is_gone(about.process)):
        return False
    late_seconds = DEAD_SECONDS + (sign.next_seconds if sign else 0.0)
    silent = now - datetime.fromisoformat(sign.seen_at if sign else about.began_at)
    # If a sign is from the future, its true time is unknown, so it does not count.
    return timedelta(seconds=-DEAD_SECONDS) < silent <= timedelta(seconds=late_seconds)


def first_sign(intent: Intent, phase: str, seen_at: Time) -> SignOfLife:
    """Return the sign that a process stores when it resumes the operation, before it has made any progress."""
    return SignOfLife(
        operation=intent.operation,
        kind=intent.kind,
        snapshot=intent.snapshot,
        increment=intent.increment,
        by=own_label(intent.kind, intent.snapshot),
        began_at=intent.began_at,
        seen_at=seen_at,
        next_seconds=SIGN_SECONDS,
        phase=phase,
        done=0,
        total=None,
        unit="",
        rate=None,
        nodes=(),
        seconds_left=None,
        is_rough=True,
        process=own_process() or UNSET,
    )


def store_sign(store: ObjectStore, sign: SignOfLife, number: int) -> int:
    """Store a sign under the first free number from `number` on; return that number."""
    return _store(store, "sign", sign, number)


def store_request(store: ObjectStore, request: CancelRequest) -> None:
    """Store a request to stop."""
    _store(store, "cancel", request, 1)


def _store(store: ObjectStore, kind: str, record: SignOfLife | CancelRequest, number: int) -> int:
    while True:
        try:
            write_operation_record(store, f"{kind}-{number}", record)
        except ObjectExistsError:
            number += 1
        else:
            return number


def newest_sign(store: ObjectStore, operation: str, names: Iterable[str]) -> SignOfLife | None:
    """Read the newest of the signs among the names in an operation's folder, or None; raises ManifestError."""
    numbers = sign_numbers(names)
    if not numbers:
        return None
    # The process may have replaced the sign since it was listed.
    for number in range(max(numbers), max(numbers) + TRIED_MAX):
        if sign := read_sign(store, operation, number):
            return sign
    return None


def newest_request(store: ObjectStore, operation: str, names: Iterable[str]) -> CancelRequest | None:
    """Read the newest of the requests to stop among the names in an operation's folder, or None."""
    numbers = request_numbers(names)
    return read_cancel_request(store, operation, max(numbers)) if numbers else None


def sign_numbers(names: Iterable[str]) -> list[int]:
    """Return the numbers of the signs among the names in an operation's folder."""
    return [int(found[1]) for name in names if (found := SIGN.fullmatch(name))]


def request_numbers(names: Iterable[str]) -> list[int]:
    """Return the numbers of the requests to stop among the names in an operation's folder."""
    return [int(found[1]) for name in names if (found := REQUEST.fullmatch(name))]


def next_number(numbers: Iterable[int]) -> int:
    """Return the number that follows the highest of `numbers`."""
    return max((number for number in numbers if number < NUMBER_MAX), default=0) + 1


def clear_signs(store: ObjectStore, operation: str) -> None:
    """Delete the signs of life of an operation that has ended, ignoring the store's errors."""
    with suppress(SnapshotError):
        for number in sign_numbers(store.list_children(f"operations/{operation}")):
            store.delete(operation_key(operation, sign_name(number)))


def sign_name(number: int) -> str:
    """Return the name of a sign's document."""
    return f"sign-{number}"
