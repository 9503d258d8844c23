"""Operations in a store, their signs of life, and waiting for these."""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec import structs

from cutline.snapshots.operations.operation import begin, current_time, new_operation
from cutline.snapshots.operations.signs import newest_sign, store_request
from cutline.snapshots.records.operation_records import CancelRequest, Intent, SignOfLife
from cutline.snapshots.records.store_identity import ensure_identity
from cutline.storage.memory import InMemoryStore
from tests.unit.document_kinds import FLEET, SIGN

SECONDS_MAX = 20.0


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def names(store: InMemoryStore, intent: Intent) -> list[str]:
    return store.list_children(f"operations/{intent.id}")


def newest(store: InMemoryStore, intent: Intent) -> SignOfLife | None:
    return newest_sign(store, intent.id, names(store, intent))


def never(request: CancelRequest) -> None:
    raise AssertionError(request)


def begun(store: InMemoryStore, kind: str = "create") -> Intent:
    ensure_identity(store, FLEET)
    intent = new_operation(kind, "daily", 3, ("a",))
    begin(store, intent)
    return intent


def replaced(intent: Intent) -> SignOfLife:
    return structs.replace(SIGN, operation=intent.id, phase="old")


def ask(store: InMemoryStore, intent: Intent) -> CancelRequest:
    request = CancelRequest(intent.id, "cutline cancel daily ops@db7:1", current_time())
    store_request(store, request)
    return request
