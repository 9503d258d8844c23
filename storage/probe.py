"""Finding out whether a store keeps the promises that snapshots rest on (docs/architecture.md, invariant 5).

Some S3 servers silently overwrite where a conditional put asks them not to. No documentation tells which;
trying does.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from threading import Barrier

from storage.errors import SnapshotError
from storage.ids import new_operation_id
from storage.store import (
    AnswerLostError,
    ObjectExistsError,
    ObjectMissingError,
    ObjectStore,
    StoreUnfitError,
    StoreUnreachableError,
)

RACERS = 8
FIRST = b"the first body of the probe"
SECOND = b"another body, which must not be stored"


def probe_store(store: ObjectStore) -> None:
    """Try every operation on objects below `operations/probe-<id>/` and remove them.

    Raises StoreUnfitError, which names what the store lacks, and StoreUnreachableError. A create-once race
    that a store loses only now and then can get past the probe.
    """
    folder = f"operations/probe-{new_operation_id(datetime.now(UTC))}"
    once, raced = f"{folder}/once", f"{folder}/raced"
    try:
        probe_reading(store, folder, once)
        probe_create_once(store, once)
        probe_race(store, raced)
        probe_deleting(store, folder, [once, raced])
    except AnswerLostError as error:
        raise StoreUnreachableError(url=store.url, reason="answers get lost; the probe gave up") from error
    finally:
        # Only what a failed probe left: what went wrong first matters more than a failing clean-up.
        with suppress(SnapshotError):
            for key in store.list(folder):
                store.delete(key)


def probe_reading(store: ObjectStore, folder: str, key: str) -> None:
    """Create an object and see it in every way there is."""
    store.create(key, FIRST)
    try:
        seen = {
            "it was read back changed": store.read(key) == FIRST,
            "its size is wrong": store.size(key) == len(FIRST),
            "a range of it is wrong": store.read_range(key, 4, 5) == FIRST[4:9],
            "it does not exist": store.exists(key),
            "it was not listed": store.list(folder) == [key] and store.list_children(folder) == ["once"],
        }
    except ObjectMissingError as error:
        raise StoreUnfitError(url=store.url, lack="an object just created is missing") from error
    for lack, is_right in seen.items():
        if not is_right:
            raise StoreUnfitError(url=store.url, lack=f"an object was created, and then {lack}")


def probe_create_once(store: ObjectStore, key: str) -> None:
    """Create the same object again, which must be refused and change nothing."""
    try:
        store.create(key, SECOND)
    except ObjectExistsError:
        if store.read(key) != FIRST:
            raise StoreUnfitError(url=store.url, lack="a refused conditional put changed the object") from None
        return
    # What is there now doesn't matter, and may be unreadable: the first body's checksum with the second body.
    raise StoreUnfitError(url=store.url, lack="a second conditional put was accepted, though the object existed")


def probe_race(store: ObjectStore, key: str) -> None:
    """Create one object from several threads at once: one must win."""
    barrier = Barrier(RACERS)

    def race(body: bytes) -> bytes | None:
        barrier.wait()
        try:
            store.create(key, body)
        except ObjectExistsError:
            return None
        return body

    with ThreadPoolExecutor(RACERS) as threads:
        outcomes = threads.map(race, [b"racer %d" % number for number in range(RACERS)])
        won = [body for body in outcomes if body is not None]
    if len(won) != 1:
        lack = f"of {RACERS} conditional puts at the same time {len(won)} were accepted"
        raise StoreUnfitError(url=store.url, lack=lack)
    if store.read(key) != won[0]:
        raise StoreUnfitError(url=store.url, lack="a refused conditional put replaced the accepted one")


def probe_deleting(store: ObjectStore, folder: str, keys: list[str]) -> None:
    """Delete the objects, which must then be gone."""
    for key in keys:
        store.delete(key)
    if store.list(folder) or any(store.exists(key) for key in keys):
        raise StoreUnfitError(url=store.url, lack="a deleted object is still there")
