"""The product's code on the model's clock, chance and nodes: what is put in the place of what, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, tzinfo
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from snapshots.operations import leases
from snapshots.operations import operation as operations
from snapshots.operations import settling as settle
from snapshots.records import commits, documents
from snapshots.removal import deletion, garbage, pruning
from snapshots.removal import gc as collecting
from storage import ids, storing
from tests.simulation.calls_in_order import calls_in_order
from tests.simulation.repository_model import RepositoryWorld
from tests.simulation.store_processes import Process

_verified: dict[bytes, tuple[bytes, str]] = {}
_understood: dict[tuple[bytes, Any], Any] = {}
REMEMBERED_MAX = 2000


def verified_once(key: str, body: bytes) -> tuple[bytes, str]:
    """See documents: bytes that were found to be as they were sealed are not verified again, which takes most time."""
    if body not in _verified:
        if len(_verified) > REMEMBERED_MAX:
            _verified.clear()
        _verified[body] = _UNSEALED(key, body)
    return _verified[body]


def understood_once(key: str, content: bytes, kind: Any) -> Any:
    """Parse the same bytes once: the value is immutable."""
    known = (content, kind)
    if known not in _understood:
        if len(_understood) > REMEMBERED_MAX:
            _understood.clear()
        _understood[known] = _PARSE(key, content, kind)
    return _understood[known]


_UNSEALED, _PARSE = documents.unseal, documents.parse_document


@contextmanager
def not_renewed(*_lease: object, is_held: bool) -> Iterator[None]:
    """See leases: renewals come from a thread, and a restore of the model takes no time in which one could run out."""
    yield


@contextmanager
def simulated(world: RepositoryWorld) -> Iterator[None]:
    """Run the product's code in this world."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return world.clock().astimezone(tz)

    def sleep(seconds: float) -> None:
        world.skip(seconds)
        world.schedule.step()

    def drop_slots(_nodes: object, slot: str) -> list[str]:
        assert isinstance(world.running, Process)
        return world.running.drop_slots(slot)

    with ExitStack() as stack:
        stack.enter_context(calls_in_order())
        for module, name, value in (
            (operations, "datetime", Clock),
            (leases, "datetime", Clock),
            (garbage, "datetime", Clock),
            (collecting, "datetime", Clock),
            (deletion, "datetime", Clock),
            (pruning, "datetime", Clock),
            (leases, "_renewing", not_renewed),
            (leases, "own_label", lambda kind, name: f"cutline {kind} {name} ops@db7:1"),
            (ids, "secrets", SimpleNamespace(token_hex=world.token)),
            (storing, "time", SimpleNamespace(sleep=sleep)),
            (settle, "drop_slots", drop_slots),
            (documents, "unseal", verified_once),
            (commits, "unseal", verified_once),
            (documents, "parse_document", understood_once),
            (commits, "parse_document", understood_once),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield
