"""Signs of life, which say how far an operation is, and requests to stop: small numbered objects of an operation.

A process stores a sign under a number of its own now and then. The newest counts, and the process deletes its
predecessor; so there are one or two. At the end it deletes them all. Of a process that was killed they stay: the
command that settles its operation deletes them, or gc. Requests stay, as records of who made them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timedelta

from msgspec import UnsetType

from cutline.fleet.own_process import is_gone
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
# Nobody stores so many; a higher number is none of Cutline's.
NUMBER_MAX = 10**9
# How late a sign may be. A store that does not answer, and clocks that differ, take their time.
DEAD_SECONDS = 60.0
# How many numbers are tried after a newest sign that has been deleted since it was listed.
TRIED_MAX = 5


def shows_life(intent: Intent | None, sign: SignOfLife | None, now: datetime) -> bool:
    """Whether the process of an operation is alive by its newest sign, or by its intent while it has no sign."""
    about = sign or intent
    if about is None or (not isinstance(about.process, UnsetType) and is_gone(about.process)):
        return False
    late_seconds = DEAD_SECONDS + (sign.next_seconds if sign else 0.0)
    silent = now - datetime.fromisoformat(sign.seen_at if sign else about.began_at)
    # Of a sign from the future nobody knows when it was stored.
    return timedelta(seconds=-DEAD_SECONDS) < silent <= timedelta(seconds=late_seconds)


def store_sign(store: ObjectStore, sign: SignOfLife, number: int) -> int:
    """Store a sign under the first free number from `number` on, and return that."""
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
    """The newest sign of an operation whose folder has these names; None if there is none. Raises ManifestError."""
    numbers = sign_numbers(names)
    if not numbers:
        return None
    # Its process may have replaced it since.
    for number in range(max(numbers), max(numbers) + TRIED_MAX):
        if sign := read_sign(store, operation, number):
            return sign
    return None


def newest_request(store: ObjectStore, operation: str, names: Iterable[str]) -> CancelRequest | None:
    """The newest request to stop an operation whose folder has these names; None if there is none."""
    numbers = request_numbers(names)
    return read_cancel_request(store, operation, max(numbers)) if numbers else None


def sign_numbers(names: Iterable[str]) -> list[int]:
    """The numbers of the signs among the names in an operation's folder."""
    return [int(found[1]) for name in names if (found := SIGN.fullmatch(name))]


def request_numbers(names: Iterable[str]) -> list[int]:
    """The numbers of the requests to stop among the names in an operation's folder."""
    return [int(found[1]) for name in names if (found := REQUEST.fullmatch(name))]


def next_number(numbers: Iterable[int]) -> int:
    """The number after these."""
    return max((number for number in numbers if number < NUMBER_MAX), default=0) + 1


def clear_signs(store: ObjectStore, operation: str) -> None:
    """Delete the signs of an operation that has ended, as far as the store lets us: they mean nothing any more."""
    with suppress(SnapshotError):
        for number in sign_numbers(store.list_children(f"operations/{operation}")):
            store.delete(operation_key(operation, sign_name(number)))


def sign_name(number: int) -> str:
    """The name of a sign's document."""
    return f"sign-{number}"
