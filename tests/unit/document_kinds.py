"""Every kind of JSON document in a store: what writes one, under which key, what reads it, and what it may lack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fleet.config import Fleet, GroupRules, Node
from fleet.left_out import LeftOut, LeftOutKind
from snapshots.baselines import claim_majority, recorded_baseline
from snapshots.commits import commit_key, find_place, read_chain, read_commit
from snapshots.deciding import decide
from snapshots.leases import open_leases
from snapshots.lost import Lost, lost_key, mark_lost, read_lost
from snapshots.manifest import Previous, Sequence
from snapshots.operations import Operation, begin, read_intent, recorded, recorded_commits, write
from snapshots.publishing import publish
from snapshots.store_identity import FLEET_KEY, ensure_identity, read_identity
from snapshots.tombstones import (
    DELETED_SCHEMA,
    ONLY_FULL_SCHEMA,
    Mark,
    only_full_key,
    put_mark,
    read_mark,
    tombstone_key,
)
from storage.store import ObjectStore
from tests.unit.made_commits import commit, identity

NODES = (Node("a", "postgresql:///shop"),)
FLEET = Fleet(Path("fleet.toml"), "shop", "memory://x", {}, NODES, "exact", GroupRules(), "local[1]", {})
OPERATION = Operation("20261120T000000Z-0000000001", "create", "weekly", 0, "2026-11-20T00:00:00Z", ("a",), "slot")
INTENT, OUTCOME = (f"operations/{OPERATION.id}/{name}.json" for name in ("intent", "outcome"))
FULL = replace(
    commit(0), comment="ärger", sequences={"a": (Sequence("s", "n", 1, is_called=True, increment=1, cycles=False),)},
    left_out=(LeftOut("a", LeftOutKind.UNLOGGED_TABLE, "s.t", "why"),),
)  # fmt: skip
RESTORE = replace(OPERATION, id="20261120T000000Z-0000000009", kind="restore")
LEASE = f"operations/{RESTORE.id}/lease-1.json"
MARK = Mark("daily", "op-9", "2026-11-20T00:00:00Z", "", "op-0", ("slot",), ("a",), ((0, "2026-11-20"),), 1, 2)
LOST = Lost("daily", "op-0", 0, "a", 2, 1, "2026-11-20T00:00:00Z")


def increment_of(store: ObjectStore) -> None:
    publish(store, FULL)
    publish(store, replace(commit(1), previous=Previous("op-0", read_commit(store, "daily", 0).digest)))


def outcome_of(store: ObjectStore) -> None:
    with recorded(store, OPERATION):
        pass


def lease_of(store: ObjectStore) -> None:
    begin(store, RESTORE)
    write(store, RESTORE.id, "lease-1", {"expires_at": "2026-11-20T01:00:00Z"})


# What writes a document of each kind, its key, and what reads it.
Kind = tuple[Callable[[ObjectStore], object], str, Callable[[ObjectStore], object]]
KINDS: dict[str, Kind] = {
    "full": (lambda store: publish(store, FULL), commit_key("daily", 0), lambda store: read_chain(store, "daily")),
    "increment": (increment_of, commit_key("daily", 1), lambda store: read_chain(store, "daily")),
    "void": (
        lambda store: decide(store, replace(OPERATION, snapshot="daily")),
        commit_key("daily", 0),
        lambda store: find_place(store, "daily", 0),
    ),
    "lost": (
        lambda store: mark_lost(store, LOST),
        lost_key("daily", "op-0"),
        lambda store: read_lost(store, "daily", "op-0"),
    ),
    "tombstone": (
        lambda store: put_mark(store, tombstone_key("daily"), DELETED_SCHEMA, MARK),
        tombstone_key("daily"),
        lambda store: read_mark(store, tombstone_key("daily")),
    ),
    "only-full": (
        lambda store: put_mark(store, only_full_key("daily"), ONLY_FULL_SCHEMA, MARK),
        only_full_key("daily"),
        lambda store: read_mark(store, only_full_key("daily")),
    ),
    "fleet": (lambda store: ensure_identity(store, FLEET), FLEET_KEY, lambda store: read_identity(store, FLEET)),
    "baseline": (
        lambda store: claim_majority(store, {"a": identity("a")}),
        "baselines/0000000000000001.json",
        recorded_baseline,
    ),
    "intent": (outcome_of, INTENT, lambda store: read_intent(store, OPERATION.id)),
    "lease": (lease_of, LEASE, lambda store: open_leases(store)),
    "outcome": (outcome_of, OUTCOME, recorded_commits),
}
# What a kind has that its reader does not need, and what may be absent since earlier versions lacked it.
UNREAD = {
    "void": {"voids"},
    "baseline": {"forgotten", "system_identifier"},
    "intent": set[str](),
    "outcome": {"reason", "ended_at"},
}
OPTIONAL = {
    "full": {"left_out", "causes", "events_at", "events_digest", "locale_provider", "locale", "icu_rules"},
    "increment": {"previous", "causes"},
    "fleet": {"format"},
    "intent": {"turn"},
    # Without a kind it is an outcome of before, and the intent says it.
    "outcome": {"kind", "snapshot", "increment"},
}
DEFAULTED = {"count", "rows", "include", "exclude", "append_only"}
OF_THEIR_TYPE = (("seconds", 1.5), ("in_recovery", True), ("is_called", True), ("cycles", True))
