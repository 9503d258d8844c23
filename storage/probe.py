"""Test whether a store keeps the promises that snapshots depend on (docs/architecture.md, invariant 5).

Some S3 servers ignore the condition on a put, or on the completion of a multipart upload, and silently overwrite the
object. Their documentation does not say so; only a test shows it. The probe runs the essential checks of
ObjectStoreContract.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier
from typing import TypeAlias

from cutline.storage.clock import utc_now
from cutline.storage.digest import digest
from cutline.storage.errors import SnapshotError
from cutline.storage.ids import new_operation_id
from cutline.storage.store import (
    AnswerLostError,
    CreatesInParts,
    DeletionRefusedError,
    Keys,
    ObjectExistsError,
    ObjectMissingError,
    ObjectStore,
    StoreUnfitError,
    StoreUnreachableError,
)

PROBES = "probes"
RACERS = 8
RACES = 3  # a store that checks and then writes passes about one race in three
FIRST = b"the first body of the probe"
SECOND = b"another body, which must not be stored"

Create: TypeAlias = Callable[[str, bytes], None]


def probe_store(store: ObjectStore) -> DeletionRefusedError | None:
    """Try every operation on objects below `probes/<id>/` and remove them.

    If a policy or a lock forbids deleting, the probe's objects stay and the error is returned instead of raised,
    because taking snapshots deletes nothing. Raises StoreUnfitError, which names the missing capability, and
    StoreUnreachableError. A store that lets two creators succeed only rarely may pass the probe.
    """
    folder = f"{PROBES}/{new_operation_id(utc_now())}"
    try:
        probe_reading(store, folder)
        keys = probe_creating(store, f"{folder}/put", store.create, "conditional put")
        if isinstance(store, CreatesInParts):
            keys += probe_creating(store, f"{folder}/parts", store.create_in_parts, "conditional upload in parts")
        return probe_deleting(store, folder, [f"{folder}/read", *keys])
    except AnswerLostError as error:
        reason = f"the store's answer to a create was lost ({error.reason}), so the probe gave up"
        raise StoreUnreachableError(url=store.url, reason=reason) from error
    finally:
        # A failed probe leaves objects behind. Its error matters more than any error from this clean-up.
        with suppress(SnapshotError):
            for key in store.list(folder):
                store.delete(key)


def probe_reading(store: ObjectStore, folder: str) -> None:
    """Create an object and read it back through every method."""
    key = f"{folder}/read"
    store.create(key, FIRST)
    try:
        checks = {
            "it was different when read back": store.read(key) == FIRST,
            "its size is wrong": store.size(key) == len(FIRST),
            "its digest is wrong": store.digest(key) == digest(FIRST),
            "a range of it is wrong": store.read_range(key, 4, 5) == FIRST[4:9],
            "a range past its end is wrong": store.read_range(key, len(FIRST) - 2, 5) == FIRST[-2:],
            "it does not exist": store.exists(key),
            "it was not listed": store.list(folder) == [key] and store.list_children(folder) == ["read"],
            "its listed size is wrong": [listed.size for listed in store.inventory(folder)] == [len(FIRST)],
        }
    except ObjectMissingError as error:
        raise StoreUnfitError(url=store.url, lack="an object just created is missing") from error
    for lack, is_right in checks.items():
        if not is_right:
            raise StoreUnfitError(url=store.url, lack=f"an object was created, but {lack}")


def probe_creating(store: ObjectStore, folder: str, create: Create, way: str) -> Keys:
    """Test one way of creating objects, called `way` in messages; return the keys of the created objects."""
    once, raced = f"{folder}-once", [f"{folder}-raced-{number}" for number in range(RACES)]
    probe_create_once(store, once, create, way)
    for key in raced:
        probe_race(store, key, create, way)
    return [once, *raced]


def probe_create_once(store: ObjectStore, key: str, create: Create, way: str) -> None:
    """Create an object, then try again in both ways: the second create must be refused and change nothing."""
    create(key, FIRST)
    for again in (create, store.create):
        try:
            again(key, SECOND)
        except ObjectExistsError:
            if store.read(key) != FIRST:
                raise StoreUnfitError(url=store.url, lack=f"a refused {way} changed the object") from None
            continue
        # Don't read the object: it may have the first body's checksum with the second body.
        raise StoreUnfitError(url=store.url, lack=f"a second {way} was accepted although the object existed")


def probe_race(store: ObjectStore, key: str, create: Create, way: str) -> None:
    """Create one object from several threads at once: exactly one must succeed."""
    barrier = Barrier(RACERS)

    def race(body: bytes) -> bytes | None:
        barrier.wait()
        try:
            create(key, body)
        except ObjectExistsError:
            return None
        return body

    with ThreadPoolExecutor(RACERS) as threads:
        try:
            outcomes = threads.map(race, [b"racer %d" % number for number in range(RACERS)])
        except BaseException:
            # If, for example, a thread could not start, the others must not wait for it.
            barrier.abort()
            raise
        won = [body for body in outcomes if body is not None]
    if len(won) != 1:
        lack = f"{len(won)} of {RACERS} concurrent creates of the same object were accepted ({way})"
        raise StoreUnfitError(url=store.url, lack=lack)
    if store.read(key) != won[0]:
        raise StoreUnfitError(url=store.url, lack=f"a refused {way} replaced the accepted one")


def probe_deleting(store: ObjectStore, folder: str, keys: Keys) -> DeletionRefusedError | None:
    """Delete the objects: each must be gone, or its deletion must be refused and the object unchanged."""
    refused: dict[str, DeletionRefusedError] = {}
    for key in keys:
        try:
            store.delete(key)
        except DeletionRefusedError as error:
            refused[key] = error
    if store.list(folder) != sorted(refused) or any(store.exists(key) != (key in refused) for key in keys):
        lack = "an object whose deletion was refused is gone" if refused else "a deleted object is still there"
        raise StoreUnfitError(url=store.url, lack=lack)
    return next(iter(refused.values()), None)
