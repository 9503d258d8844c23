"""Lost chains: what they stored can be restored, but they get no further increment.

A chain is lost once its mark is in the store, an object that is created once and never changed. Its slots are dropped
after that, so whoever finds a marked chain with a slot drops the slot (docs/architecture.md, invariant 9). The mark
names the chain, because a snapshot that was deleted and taken anew under its name is another chain.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from fleet.hints import NEW_CHAIN
from fleet.sizes import size_text
from snapshots.chain import Chain
from snapshots.documents import check_schema, read_sealed, sealed, understood
from snapshots.value_types import check_types
from storage.errors import RefusedError
from storage.store import ObjectExistsError, ObjectMissingError, ObjectStore
from storage.storing import create_or_find

LOST_SCHEMA = "cutline/lost/1"


class ChainLostError(RefusedError):
    """The chain was given up, because a node kept more WAL for it than its limit."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Why and since when a chain can't be continued. `at` is RFC 3339 UTC."""

    snapshot: str
    chain: str
    after_increment: int
    node: str
    retained_bytes: int
    limit_bytes: int
    at: str

    @property
    def text(self) -> str:
        """From where on the chain can't be continued, and why, as `list` and every message say it."""
        after = f"increment {self.after_increment}" if self.after_increment else "the full snapshot"
        kept, limit = size_text(self.retained_bytes), size_text(self.limit_bytes)
        return f"can't be continued after {after}: node {self.node} kept {kept} of WAL (limit {limit})"

    def to_json(self) -> dict[str, Any]:
        """The mark as `list` and errors have it."""
        return {name: value for name, value in asdict(self).items() if name not in ("snapshot", "chain")}


def lost_key(snapshot: str, chain: str) -> str:
    """The key of a chain's mark."""
    return f"snapshots/{snapshot}/lost/{chain}.json"


def is_lost(store: ObjectStore, snapshot: str, chain: str) -> bool:
    """Whether the chain is marked."""
    return store.exists(lost_key(snapshot, chain))


def mark_lost(store: ObjectStore, lost: Lost) -> None:
    """Mark the chain; whoever did so first has said why."""
    with suppress(ObjectExistsError):
        create_or_find(store, lost_key(lost.snapshot, lost.chain), sealed({"schema": LOST_SCHEMA, **asdict(lost)}))


def read_lost(store: ObjectStore, snapshot: str, chain: str) -> Lost | None:
    """The chain's mark, None if it has none; raise ManifestError if it can't be understood."""
    key = lost_key(snapshot, chain)
    try:
        document = read_sealed(store, key)
    except ObjectMissingError:
        return None
    with understood(key, "mark of a lost chain"):
        check_schema(document, LOST_SCHEMA)
        lost = Lost(**{name: value for name, value in document.items() if name not in ("schema", "digest")})
        check_types(lost, Lost, "")
        if (lost.snapshot, lost.chain) != (snapshot, chain):
            raise ValueError(f"it is of chain {lost.chain} of {lost.snapshot}")
    return lost


def check_not_lost(store: ObjectStore, chain: Chain) -> None:
    """Raise ChainLostError if the chain is marked."""
    lost = read_lost(store, chain.name, chain.full.chain)
    if lost:
        raise chain_lost(lost)


def chain_lost(lost: Lost) -> ChainLostError:
    """The refusal to continue the chain."""
    return ChainLostError(
        f"snapshot {lost.snapshot} {lost.text}, at {lost.at}",
        hint=f"{NEW_CHAIN}   (what is stored can be restored)",
        details={"snapshot": lost.snapshot, **lost.to_json()},
    )
