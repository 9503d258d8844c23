"""Lost chains: what they stored can be restored, but they get no further increment.

A chain is lost once its mark is in the store, an object that is created once and never changed. Its slots are dropped
after that, so whoever finds a marked chain with a slot drops the slot (docs/architecture.md, invariant 9). The mark
names the chain, because a snapshot that was deleted and taken anew under its name is another chain.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from fleet.hints import NEW_CHAIN
from fleet.record import Count, Record, Time, fields_of
from fleet.sizes import size_text
from snapshots.records.chain import Chain
from snapshots.records.documents import check_about, read_sealed, seal
from storage.errors import RefusedError
from storage.store import ObjectExistsError, ObjectMissingError, ObjectStore
from storage.storing import create_or_find


class ChainLostError(RefusedError):
    """The chain was given up, because a node kept more WAL for it than its limit."""


class Lost(Record, frozen=True, tag_field="schema", tag="cutline/lost/1"):
    """Why and since when a chain can't be continued."""

    snapshot: str
    chain: str
    after_increment: Count
    node: str
    retained_bytes: Count
    limit_bytes: Count
    at: Time

    @property
    def text(self) -> str:
        """From where on the chain can't be continued, and why, as `list` and every message say it."""
        after = f"increment {self.after_increment}" if self.after_increment else "the full snapshot"
        kept, limit = size_text(self.retained_bytes), size_text(self.limit_bytes)
        return f"can't be continued after {after}: node {self.node} kept {kept} of WAL (limit {limit})"

    def shown(self) -> dict[str, Any]:
        """The mark as `list` and errors have it."""
        left_out = ("schema", "snapshot", "chain")
        return {name: value for name, value in fields_of(self).items() if name not in left_out}


def lost_key(snapshot: str, chain: str) -> str:
    """The key of a chain's mark."""
    return f"snapshots/{snapshot}/lost/{chain}.json"


def is_lost(store: ObjectStore, snapshot: str, chain: str) -> bool:
    """Whether the chain is marked."""
    return store.exists(lost_key(snapshot, chain))


def mark_lost(store: ObjectStore, lost: Lost) -> None:
    """Mark the chain; whoever did so first has said why."""
    with suppress(ObjectExistsError):
        create_or_find(store, lost_key(lost.snapshot, lost.chain), seal(lost))


def read_lost(store: ObjectStore, snapshot: str, chain: str) -> Lost | None:
    """The chain's mark, None if it has none; raise ManifestError if it can't be understood."""
    key = lost_key(snapshot, chain)
    try:
        lost: Lost = read_sealed(store, key, Lost)
    except ObjectMissingError:
        return None
    check_about(key, (lost.snapshot, lost.chain), (snapshot, chain))
    return lost


def check_not_lost(store: ObjectStore, chain: Chain) -> None:
    """Raise ChainLostError if the chain is marked."""
    lost = read_lost(store, chain.name, chain.full.chain)
    if lost:
        raise chain_lost_error(lost)


def chain_lost_error(lost: Lost) -> ChainLostError:
    """The refusal to continue the chain."""
    return ChainLostError(
        f"snapshot {lost.snapshot} {lost.text}, at {lost.at}",
        hint=f"{NEW_CHAIN}   (what is stored can be restored)",
        details={"snapshot": lost.snapshot, **lost.shown()},
    )
