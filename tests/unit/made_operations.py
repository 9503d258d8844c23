"""Operations in a store, begun at times that are chosen, and their signs of life."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from msgspec import structs

from cutline.fleet.record import Time
from cutline.snapshots.operations.operation import begin, new_operation
from cutline.snapshots.operations.signs import store_sign
from cutline.snapshots.records.operation_records import Intent
from cutline.storage.ids import new_operation_id
from cutline.storage.memory import InMemoryStore
from tests.unit.document_kinds import FLEET, SIGN

NOW = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC)
LABEL = "cutline check daily ops@db7:4711"


def begun(store: InMemoryStore, kind: str = "create", *, ago: float = 0.0, now: datetime = NOW) -> Intent:
    """An operation that began so many seconds ago."""
    at = now - timedelta(seconds=ago)
    intent = structs.replace(
        new_operation(kind, "daily", 3, ("a",)), operation=new_operation_id(at), began_at=Time.of(at)
    )
    begin(store, intent)
    return intent


def new_restore(increment: int = 0) -> Intent:
    """A restore that has recorded nothing yet."""
    return new_operation("restore", "daily", increment, ("a",))


def sign(store: InMemoryStore, intent: Intent, *, ago: float, number: int = 1, now: datetime = NOW) -> None:
    seen_at = Time.of(now - timedelta(seconds=ago))
    store_sign(store, structs.replace(SIGN, operation=intent.id, seen_at=seen_at, snapshot="daily"), number)


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a store of this process."""

    store: InMemoryStore

    def open(self) -> InMemoryStore:
        return self.store


def fleet_of(store: InMemoryStore) -> Any:
    """A fleet whose nodes nobody can reach."""
    return replace(FLEET, store=cast("Any", Place(store)))
