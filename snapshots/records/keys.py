"""What the key of an object says of it: what kind it is, of which snapshot, whose, and which number it has.

A key of no such form is none of this program's: it is named, and left alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from storage.ids import OPERATION_ID


class Kind(StrEnum):
    """What an object is, as its key says."""

    BASE = "base"
    SCHEMA = "schema"
    SEGMENT = "wal"
    COMMIT = "commit"
    MARK = "mark"
    RECORD = "record"
    PROBE = "probe"
    UNFINISHED = "unfinished"


_NODE = r"(?P<node>[^/]+)"
_OWNER = rf"(?P<owner>{OPERATION_ID.pattern})"
KEYS: dict[Kind, tuple[re.Pattern[str], ...]] = {
    Kind.BASE: (re.compile(rf"base/{_NODE}/{_OWNER}/part-[^/]+\.parquet"),),
    Kind.SCHEMA: (re.compile(rf"schema/{_NODE}/{_OWNER}/[a-z-]+-[0-9a-f]{{8}}\.sql\.zst"),),
    Kind.SEGMENT: (re.compile(rf"wal/{_NODE}/{_OWNER}/(?P<number>\d{{20}})\.parquet"),),
    Kind.COMMIT: (
        re.compile(r"snapshot(\.\d+)?\.json"),
        re.compile(r"increments/(?P<number>\d{16})(\.\d+)?\.json"),
    ),
    Kind.MARK: (re.compile(r"only-full\.json"), re.compile(rf"lost/{_OWNER}\.json")),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """What the key of an object of a snapshot says. `number` is a segment's or increment's."""

    kind: Kind
    snapshot: str
    owner: str = ""
    node: str = ""
    number: int = 0


def base_prefix(snapshot: str, node: str, operation: str) -> str:
    """The folder of one node's base copy, as one operation makes it."""
    return f"snapshots/{snapshot}/base/{node}/{operation}"


def ddl_prefix(snapshot: str, node: str, operation: str) -> str:
    """The folder of one shard's DDL, as one operation dumps it."""
    return f"snapshots/{snapshot}/schema/{node}/{operation}"


def place_of(snapshot: str, key: str) -> Place | None:
    """What the key `snapshots/<snapshot>/…` says; None where it is none of this program's."""
    rest = key.removeprefix(f"snapshots/{snapshot}/")
    for kind, patterns in KEYS.items():
        for pattern in patterns:
            if found := pattern.fullmatch(rest):
                said = found.groupdict()
                number = int(said.get("number") or 0)
                return Place(kind, snapshot, said.get("owner") or "", said.get("node") or "", number)
    return None
