"""Run the product's code with the clock, the randomness and the nodes of the model. Here is all that is patched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from cutline.snapshots.operations import leases, settling
from cutline.snapshots.operations import operation as operations
from cutline.snapshots.records import documents, proven_chains
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.removal import deletion, garbage_rules, gc, pinning, pruning
from cutline.storage import ids, storing
from tests.simulation.calls_in_order import calls_in_order
from tests.simulation.repository_model import RepositoryWorld
from tests.simulation.store_processes import Process

_unsealed: dict[bytes, tuple[bytes, str]] = {}
_parsed: dict[tuple[bytes, Any, bool], Any] = {}
_checked: dict[int, Commit] = {}
CACHED_MAX = 2000


def unseal_once(key: str, body: bytes) -> tuple[bytes, str]:
    """Verify the same bytes once: verifying takes most of the time (`documents.unseal`)."""
    if body not in _unsealed:
        if len(_unsealed) > CACHED_MAX:
            _unsealed.clear()
        _unsealed[body] = _REAL_UNSEAL(key, body)
    return _unsealed[body]


def parse_once(key: str, content: bytes, kind: Any, *, is_proven: bool = False) -> Any:
    """Parse the same bytes once, as the value is immutable (`documents.parse_document`)."""
    known = (content, kind, is_proven)
    if known not in _parsed:
        if len(_parsed) > CACHED_MAX:
            _parsed.clear()
        _parsed[known] = _REAL_PARSE(key, content, kind, is_proven=is_proven)
    return _parsed[known]


def check_once(commit: Commit) -> None:
    """Check the same commit once: `parse_once` gives the same one for the same bytes (`commits.check_commit`)."""
    if id(commit) not in _checked:
        if len(_checked) > CACHED_MAX:
            _checked.clear()
        _REAL_CHECK(commit)
        # While it is kept, no other commit has its id.
        _checked[id(commit)] = commit


_REAL_UNSEAL, _REAL_PARSE, _REAL_CHECK = documents.unseal, documents.parse_document, proven_chains.check_commit


@contextmanager
def without_renewals(*_lease: object) -> Iterator[None]:
    """Renew no lease: a thread would do it, and a simulated restore takes no time in which a lease could expire."""
    yield


@contextmanager
def simulated(world: RepositoryWorld) -> Iterator[None]:
    """Run the product's code in this world."""

    def now() -> datetime:
        return world.clock().astimezone(UTC)

    def sleep(seconds: float) -> None:
        world.skip(seconds)
        world.schedule.step()

    def drop_slots(_nodes: object, slot: str) -> list[str]:
        assert isinstance(world.running, Process)
        return world.running.drop_slots(slot)

    with ExitStack() as stack:
        stack.enter_context(calls_in_order())
        for module, name, value in (
            (operations, "utc_now", now),
            (leases, "utc_now", now),
            (garbage_rules, "utc_now", now),
            (gc, "utc_now", now),
            (gc, "machine_now", now),
            (deletion, "utc_now", now),
            (pruning, "utc_now", now),
            (pinning, "utc_now", now),
            (leases, "_renewing", without_renewals),
            (leases, "own_label", lambda kind, name: f"cutline {kind} {name} ops@db7:1"),
            (ids, "secrets", SimpleNamespace(token_hex=world.token)),
            (storing, "time", SimpleNamespace(sleep=sleep)),
            (settling, "drop_slots", drop_slots),
            (documents, "unseal", unseal_once),
            (proven_chains, "unseal", unseal_once),
            (documents, "parse_document", parse_once),
            (proven_chains, "parse_document", parse_once),
            (proven_chains, "check_commit", check_once),
            # The small commits are read as large ones, which the outcomes of their creates name.
            (proven_chains, "LARGE_BYTES", 0),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield
