"""Damage a copy of a folder store as an operator, a disk or a bug would."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cutline.fleet.record import from_json
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.records.commit import LARGE_OBJECTS
from cutline.snapshots.records.documents import seal
from cutline.snapshots.records.proven_chains import commit_key
from cutline.storage.digest import digest
from cutline.wal.segments.archive import Segment, SegmentMetadata
from cutline.wal.segments.segments import (
    SEGMENT_SCHEMA,
    count_changes,
    events_offset,
    parquet_options,
    segment_bytes,
)
from tests.stores.history import relink

Document = dict[str, Any]
EVENT_OPS = tuple(ord(letter) for letter in "CPKRM")


def flip_byte(path: Path, place: float = 0.5) -> None:
    """Flip one bit of the byte at `place`, between 0 and 1, of a file."""
    body = bytearray(path.read_bytes())
    body[int(place * (len(body) - 1))] ^= 0x10
    path.write_bytes(bytes(body))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def change_commit(store: Path, name: str, increment: int, change: Callable[[Document], None]) -> None:
    """Change a commit's document; reseal it and the later commits of the chain with matching digests and counts."""
    path = store / commit_key(name, increment)
    document = json.loads(path.read_bytes())
    change(document)
    _recount(document, json.loads((store / commit_key(name, 0)).read_bytes()))
    path.write_bytes(seal(document))
    before = [json.loads((store / commit_key(name, number)).read_bytes()) for number in range(increment + 1)]
    while (after := store / commit_key(name, len(before))).exists():
        document = json.loads(after.read_bytes())
        relink(document, before)
        after.write_bytes(seal(document))
        before.append(json.loads(after.read_bytes()))


def _recount(document: Document, full: Document) -> None:
    """Recompute those counts of the commit that the changes of these tests affect."""
    primaries = {one["node"] for one in full["baseline"] if one["backup_of"] is None}
    segments = [(node, one) for node, listed in document["segments"].items() for one in listed]
    objects = [*document.get("objects", ()), *(document.get("schema_changes") or {}).get("objects", ())]
    document["counts"] |= {
        "rows": sum(sum(o["rows"].values()) for o in objects if o["kind"] == "base" and o["node"] in primaries),
        "changes": sum(one["changes"] for node, one in segments if node in primaries),
        "objects": len(objects) + len(segments),
        "bytes": sum(one["size"] for one in (*objects, *(one for _, one in segments))),
    }


def change_document(path: Path, change: Callable[[Document], None]) -> None:
    """Change a document that is not a commit, and reseal it."""
    document = json.loads(path.read_bytes())
    change(document)
    path.write_bytes(seal(document))


def as_drained(changes: pa.Table, events: pa.Table) -> tuple[pa.Table, pa.Table]:
    return changes, events


def change_segment(
    store: Path,
    name: str,
    increment: int,
    node: str,
    change: Callable[[pa.Table], pa.Table],
    layout: Callable[[pa.Table, pa.Table], tuple[pa.Table, pa.Table]] = as_drained,
) -> None:
    """Change the rows of a node's first segment that has changes, and its entry in the commit to match.

    `layout` returns the rows to store as changes and as events.
    """

    def change_entry(document: Document) -> None:
        entry = next(one for one in document["segments"][node] if one["changes"])
        path = store / entry["key"]
        table = change(pq.read_table(path).cast(SEGMENT_SCHEMA))
        is_event = pa.array([op in EVENT_OPS for op in table["op"].to_pylist()])
        changes, events = table.filter(pa.compute.invert(is_event)), table.filter(is_event)
        events, _ = count_changes(changes, events, None, None)
        counts = {
            "changes": len(changes),
            "events": len(events),
            "partials": entry["partials"],
            "truncates": entry["truncates"],
        }
        held = from_json(json.dumps(entry), Segment)
        metadata = SegmentMetadata(
            key=held.key, node=held.node, operation=held.operation, after=held.after, through=held.through,
            open=held.open, definitions=(), first_changes={}, **counts,
        )  # fmt: skip
        body = segment_bytes(metadata, *layout(changes, events))
        path.write_bytes(body)
        footer_at = len(body) - 8 - int.from_bytes(body[-8:-4], "little")
        events_at = events_offset(pq.read_metadata(pa.BufferReader(body)), counts["changes"], footer_at)
        place = {"events_at": events_at, "events_digest": digest(body[events_at:])}
        entry.update(counts, size=len(body), digest=digest(body), **place)

    change_commit(store, name, increment, change_entry)


def change_base(store: Path, name: str, node: str, change: Callable[[pa.Table], pa.Table]) -> None:
    """Change the rows of a node's largest base object, and its entry in the commit to match."""

    def change_entry(document: Document) -> None:
        entries = [one for one in document["objects"] if one["kind"] == "base" and one["node"] == node]
        entry = max(entries, key=lambda one: int(one["size"]))
        path = store / entry["key"]
        table = change(pq.read_table(path).cast(BASE_SCHEMA))
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, **parquet_options(table.schema))
        body = sink.getvalue().to_pybytes()
        path.write_bytes(body)
        entry.update(size=len(body), digest=digest(body), rows=_count_rows(table))

    change_commit(store, name, 0, change_entry)


def change_large_objects(store: Path, name: str, change: Callable[[pa.Table], pa.Table]) -> str:
    """Change the parts in the first object that has large objects, and its entry in the commit; return its key."""
    keys: list[str] = []

    def change_entry(document: Document) -> None:
        entry = next(one for one in document["objects"] if one["kind"] == LARGE_OBJECTS)
        keys.append(entry["key"])
        path = store / entry["key"]
        sink = pa.BufferOutputStream()
        changed = change(pq.read_table(path))
        pq.write_table(changed, sink, **parquet_options(changed.schema))
        body = sink.getvalue().to_pybytes()
        path.write_bytes(body)
        entry.update(size=len(body), digest=digest(body))

    change_commit(store, name, 0, change_entry)
    return keys[0]


def _count_rows(table: pa.Table) -> Mapping[str, int]:
    counts = table["group"].value_counts().to_pylist()
    return {str(entry["values"]): entry["counts"] for entry in counts}


def without_row(table: pa.Table, row: int) -> pa.Table:
    """Return the table without its row number `row`."""
    return pa.concat_tables([table.slice(0, row), table.slice(row + 1)])


def with_value(table: pa.Table, row: int, column: str, value: object) -> pa.Table:
    """Return the table with one value replaced."""
    field = table.schema.field(column)
    values = table[column].to_pylist()
    values[row] = value
    return table.set_column(table.schema.get_field_index(column), field, pa.array(values, field.type))
