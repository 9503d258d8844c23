"""Signs of life: how far an operation is, as its process stores it now and then.

A sign is a small object under a number of its own. The newest counts, and the process deletes the one before; so one or
two are there. At the end it deletes them all. Of a process that was killed they stay: whoever settles its operation
deletes them, or gc.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress

from snapshots.records.operation_records import SignOfLife, operation_key, read_sign, write_operation_record
from storage.errors import SnapshotError
from storage.store import ObjectExistsError, ObjectStore

SIGN = re.compile(r"sign-(\d{1,15})\.json")
# How many numbers are tried after a newest sign that has been deleted since it was listed.
TRIED_MAX = 5


def store_sign(store: ObjectStore, sign: SignOfLife, number: int) -> int:
    """Store a sign under the first free number from `number` on, and return that."""
    while True:
        try:
            write_operation_record(store, sign_name(number), sign)
        except ObjectExistsError:
            # That of another process that worked on the operation.
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


def sign_numbers(names: Iterable[str]) -> list[int]:
    """The numbers of the signs among the names in an operation's folder."""
    return [int(found[1]) for name in names if (found := SIGN.fullmatch(name))]


def clear_signs(store: ObjectStore, operation: str) -> None:
    """Delete the signs of an operation that has ended, as far as the store lets us: they mean nothing any more."""
    with suppress(SnapshotError):
        for number in sign_numbers(store.list_children(f"operations/{operation}")):
            store.delete(operation_key(operation, sign_name(number)))


def sign_name(number: int) -> str:
    """The name of a sign's document."""
    return f"sign-{number}"
