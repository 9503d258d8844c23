"""The kept stores: where they are, which fleet they belong to, and which rows each of their restore points has."""

from __future__ import annotations

import json
from pathlib import Path

KEPT = Path(__file__).parent
FLEET = "kept"
CHAIN, RESTORE_POINT, DELETED = "daily", "point", "gone"
INCREMENTS = 2
STORES = ("plain", "encrypted")
SHARDS = ("s1", "s2")
# Of a fleet that exists in tests alone.
KEY = KEPT / "kept.key"
ROWS = KEPT / "rows.json"


def expected_rows(store: str, increment: int) -> dict[str, dict[str, str]]:
    """The rows of each table of each shard at an increment, as COPY prints them in order; by shard and table."""
    rows: dict[str, dict[str, str]] = json.loads(ROWS.read_text(encoding="utf-8"))[store][increment]
    return rows


def encryption_of(store: str, key: Path) -> str:
    """The table [encryption] of the store's fleet.toml, if it has one."""
    return f"[encryption]\nkey_file = {json.dumps(str(key))}\n" if store == "encrypted" else ""
