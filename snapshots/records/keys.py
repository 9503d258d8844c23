"""Keys of objects: the kind, snapshot, owner and number that a key gives.

An object whose key has none of these forms is not Cutline's: it is reported, and never touched.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from cutline.storage.ids import OPERATION_ID


class Kind(StrEnum):
    """The kind of an object, as its key says."""

    BASE = "base"
    SCHEMA = "schema"
    LIST = "list"
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
    Kind.SCHEMA: (re.compile(rf"schema/{_NODE}/{_OWNER}/[a-z-]+-[0-9a-f]{{8}}\.(?:dump|sql|json)\.zst"),),
    Kind.LIST: (re.compile(rf"lists/{_NODE}/{_OWNER}/(?:base|large_objects)-\d{{6}}-[0-9a-f]{{8}}\.json"),),
    Kind.SEGMENT: (re.compile(rf"wal/{_NODE}/{_OWNER}/(?P<number>\d{{20}})\.parquet"),),
    Kind.COMMIT: (
        re.compile(r"snapshot(\.\d+)?\.json"),
        re.compile(r"increments/(?P<number>\d{16})(\.\d+)?\.json"),
    ),
    Kind.MARK: (re.compile(r"only-full\.json"), re.compile(rf"lost/{_OWNER}\.json")),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """The parts of a key below a snapshot's folder. `number` is that of a segment or increment."""

    kind: Kind
    snapshot: str
    owner: str = ""
    node: str = ""
    number: int = 0


def base_prefix(snapshot: str, node: str, operation: str) -> str:
    """The folder of the base copy that an operation makes of a node."""
    return f"snapshots/{snapshot}/base/{node}/{operation}"


def ddl_prefix(snapshot: str, node: str, operation: str) -> str:
    """The folder of the DDL that an operation dumps from a shard."""
    return f"snapshots/{snapshot}/schema/{node}/{operation}"


def list_prefix(snapshot: str, node: str, operation: str) -> str:
    """The folder of the object lists that an operation writes of a node's copy."""
    return f"snapshots/{snapshot}/lists/{node}/{operation}"


def parse_key(snapshot: str, key: str) -> ParsedKey | None:
    """Parse the key `snapshots/<snapshot>/…`; return None if it is not one of Cutline's."""
    rest = key.removeprefix(f"snapshots/{snapshot}/")
    for kind, patterns in KEYS.items():
        for pattern in patterns:
            if match := pattern.fullmatch(rest):
                parts = match.groupdict()
                number = int(parts.get("number") or 0)
                return ParsedKey(kind, snapshot, parts.get("owner") or "", parts.get("node") or "", number)
    return None
