"""A copy of a clean chain's store, and changes of it after which every digest, seal, size and count fits again.

Documents are edited as JSON, and rows of Parquet objects as dictionaries. `seal` recomputes what depends on them, up to
the newest commit and the outcomes of the operations, and `cut_again` the cuts, from the archived events.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from msgspec import structs

from cutline.check.cuts import StoredEvents, _end_windows, _read_windows, _ShardArchive
from cutline.fleet.record import fields_of, from_json
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.base_copy.large_objects import LARGE_SCHEMA
from cutline.snapshots.ddl.ddl_archive import Contents, read_contents
from cutline.snapshots.records.commit import BASE, DDL, GLOBALS, LARGE_OBJECTS, LARGE_OBJECTS_COUNT
from cutline.snapshots.records.documents import seal
from cutline.snapshots.records.merge_records import merge_key
from cutline.snapshots.records.operation_records import IDLE_OUTCOME
from cutline.snapshots.records.proven_chains import commit_key, read_chain
from cutline.storage.digest import digest
from cutline.storage.local import LocalStore
from cutline.storage.stored_form import stored_form
from cutline.wal.cut.resolve import resolve
from cutline.wal.cut.safe_time import safe_time_of_nodes
from cutline.wal.segments.archive import NO_SEAL, SegmentMetadata
from cutline.wal.segments.segments import (
    CHANGES,
    METADATA_KEY,
    PARTIAL,
    SEGMENT_SCHEMA,
    TRUNCATE,
    _first_changes,
    _read_archived,
    count_changes,
    parquet_options,
    segment_bytes,
)
from tests.stores.history import relink

Document = dict[str, Any]
# A row of BASE_SCHEMA, SEGMENT_SCHEMA or LARGE_SCHEMA.
Row = dict[str, Any]
Rows = list[Row]
DIGEST = slice(-66, -2)
# The beginning of the seal in a segment's metadata.
SEAL_OF_SEGMENT = re.compile(rb'("seal": ")[0-9a-f]{4}')
OPERATIONS = "operations"
CUT_FIELDS = ("position", "undecided", "rolled_back", "in_doubt", "local_transactions", "last_commit_at")
CUT_TOTALS = ("global_transactions", "included_early", "in_flight")


@dataclass(frozen=True, slots=True)
class TableForm:
    """A table's definition in a commit: its number, and how its rows are stored."""

    number: int
    columns: tuple[str, ...]
    key_width: int

    def find(self, rows: Rows, key: bytes | None = None) -> Row:
        """Return the first row or change of the table, or the first with this key (without a key: this line)."""
        return next(row for row in self.of(rows) if key in (None, row["key"], row["row"].rstrip(b"\n")))

    def of(self, rows: Rows) -> Rows:
        """Return the table's rows or changes."""
        return [row for row in rows if row["group"] == self.number]

    def value(self, row: Row, column: str) -> bytes:
        fields: list[bytes] = row["row"].rstrip(b"\n").split(b"\t")
        return fields[self.columns.index(column)]

    def set(self, row: Row, column: str, value: bytes) -> None:
        """Replace a value in the row, and in its key."""
        fields = row["row"].rstrip(b"\n").split(b"\t")
        fields[self.columns.index(column)] = value
        self.fill(row, fields)

    def fill(self, row: Row, fields: list[bytes]) -> None:
        """Give the row these fields, and the key that they make."""
        row["row"] = b"\t".join(fields) + b"\n"
        row["key"] = b"\t".join(fields[: self.key_width])


@dataclass(slots=True)
class OpenSegment:
    """The contents of a segment while it is edited.

    `declared` are fields of its metadata that get other values, in the commit too; `listed` are fields of the commit's
    entry alone. `layout` returns the rows to store as changes and as events. `seals`: whether the seal fits. `counts`:
    whether the ends of transactions say how many changes they have now.
    """

    changes: Rows
    events: Rows
    declared: dict[str, Any] = field(default_factory=dict)
    listed: dict[str, Any] = field(default_factory=dict)
    layout: Callable[[pa.Table, pa.Table], tuple[pa.Table, pa.Table]] = lambda changes, events: (changes, events)
    seals: bool = True
    counts: bool = True

    @property
    def all(self) -> Rows:
        """The changes and the events."""
        return [*self.changes, *self.events]

    def drop(self, is_dropped: Callable[[Row], bool]) -> None:
        """Remove the changes and events for which the condition holds; at least one must."""
        count = len(self.changes) + len(self.events)
        self.changes[:] = [row for row in self.changes if not is_dropped(row)]
        self.events[:] = [row for row in self.events if not is_dropped(row)]
        assert len(self.changes) + len(self.events) < count


@dataclass(slots=True)
class Damaged:
    """A copy, in the folder `root`, of a store with the chain `name`.

    `commits` and `lists` (by key) are the chain's documents. `keys` are the objects that were damaged, and `changed`
    all objects that are not as in the clean store.
    """

    root: Path
    name: str
    commits: list[Document]
    lists: dict[str, Document]
    keys: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, root: Path, name: str) -> Damaged:
        """Read the documents of a chain in the store."""
        commits: list[Document] = []
        while (path := root / commit_key(name, len(commits))).exists():
            commits.append(json.loads(path.read_bytes()))
        lists = {path.relative_to(root).as_posix(): json.loads(path.read_bytes())
                 for path in (root / "snapshots" / name / "lists").rglob("*.json")}  # fmt: skip
        return cls(root, name, commits, lists)

    # Bytes.

    def read(self, key: str) -> bytes:
        """Return the object's bytes."""
        return (self.root / key).read_bytes()

    def write(self, key: str, body: bytes) -> None:
        """Put an object in the place of the one that is there, if any; links to that one keep their contents."""
        path = self.root / key
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
        self.changed.add(key)

    def damage(self, key: str, change: Callable[[bytes], bytes]) -> None:
        """Change the object's bytes, and nothing else."""
        before = self.read(key)
        after = change(before)
        assert after != before, f"{key} is unchanged"
        self.write(key, after)
        self.keys.add(key)

    def remove(self, key: str) -> None:
        """Remove the object."""
        (self.root / key).unlink()
        self.keys.add(key)
        self.changed.add(key)

    def remove_folder(self, folder: str) -> None:
        """Remove all objects in the folder; there must be some."""
        keys = objects_in(self.root, folder)
        assert keys
        for key in keys:
            self.remove(key)

    def exchange(self, key: str, other: str) -> None:
        """Exchange the bytes of two objects."""
        body, instead = self.read(key), self.read(other)
        assert body != instead
        self.write(key, instead)
        self.write(other, body)
        self.keys |= {key, other}

    def undo(self, clean: Path) -> None:
        """Make the store as the one in the folder `clean` again; remove the records of commands that were run on it."""
        self.changed |= set(objects_in(self.root, OPERATIONS)) - set(objects_in(clean, OPERATIONS))
        for key in self.changed:
            path = self.root / key
            path.unlink(missing_ok=True)
            if (clean / key).exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                os.link(clean / key, path)
                continue
            for parent in list(path.relative_to(self.root).parents)[:-1]:
                if not any((self.root / parent).iterdir()):
                    (self.root / parent).rmdir()

    def change_document(self, key: str, change: Callable[[Document], object]) -> None:
        """Change a document that is not a commit of the chain, and seal it."""
        document = json.loads(self.read(key))
        change(document)
        self.damage(key, lambda _: seal(document))

    # The chain's objects.

    @property
    def last(self) -> Document:
        """The newest commit."""
        return self.commits[-1]

    def shard_of(self, node: str) -> str:
        """Return the primary whose rows the node has."""
        parts = {one["node"]: one["backup_of"] for one in self.commits[0]["baseline"]}
        return parts[node] or node

    def object_lists(self, increment: int) -> list[Document]:
        """Return the commit's entries for object lists."""
        commit = self.commits[increment]
        return [*commit.get("lists", ()), *_changes(commit).get("lists", ())]

    def entries(self, increment: int) -> list[Document]:
        """Return the entries of all objects that the commit adds, also in lists; segments excluded."""
        commit = self.commits[increment]
        listed = [one for entry in self.object_lists(increment) for one in self.lists[entry["key"]]["objects"]]
        own = [*commit.get("objects", ()), *_changes(commit).get("objects", ()), *commit.get("extension_rows", ())]
        return [*own, *listed]

    def entry(self, kind: str, node: str, increment: int | None = None) -> Document:
        """Return the entry of the node's largest object of the kind in the commit (None: the newest that has any)."""
        numbers = range(len(self.commits) - 1, -1, -1) if increment is None else (increment,)
        for number in numbers:
            if found := [one for one in self.entries(number) if (one["kind"], one["node"]) == (kind, node)]:
                largest: Document = max(found, key=lambda one: one["size"])
                return largest
        raise LookupError(f"no {kind} of {node} in increment {increment} of {self.name}")

    def segment(self, node: str, increment: int) -> Document:
        """Return the entry of the node's last segment in the commit."""
        found: Document = self.commits[increment]["segments"][node][-1]
        return found

    def list_of(self, kind: str, node: str, increment: int = 0) -> Document:
        """Return the commit's entry of the node's object list of the kind."""
        return next(one for one in self.object_lists(increment) if (one["kind"], one["node"]) == (kind, node))

    def merge(self, increment: int) -> Document:
        """Return the merge at the increment."""
        found: Document = json.loads(self.read(merge_key(self.name, increment)))
        return found

    def merged_bases(self, node: str, increment: int, part: str = "") -> list[Document]:
        """Return the entries of the node's objects in the merge, also in lists, whose keys contain `part`."""
        merge = self.merge(increment)
        listed = [one for entry in merge.get("lists", ()) for one in self.lists[entry["key"]]["objects"]]
        return [one for one in (*merge["objects"], *listed) if one["node"] == node and part in one["key"]]

    def operation_key(self, document: str, increment: int) -> str:
        """Return the key of a document of the operation that committed the increment."""
        return f"operations/{self.commits[increment]['operation']}/{document}.json"

    def group(self, table: str, shard: str, increment: int | None = None) -> Document:
        """Return the definition of the table, by name, that is current at the increment (None: the newest)."""
        last = len(self.commits) - 1 if increment is None else increment
        for number in range(last, -1, -1):
            commit = self.commits[number]
            groups = [*_changes(commit).get("groups", {}).get(shard, ()), *commit.get("groups", {}).get(shard, ())]
            for group in groups:
                if group["table"] == table:
                    found: Document = group
                    return found
        raise LookupError(f"no table {table} on {shard}")

    def table(self, table: str, node: str, increment: int | None = None) -> TableForm:
        """Return the form in which the table's rows are stored at the increment (None: the newest)."""
        group = self.group(table, self.shard_of(node), increment)
        return TableForm(group["number"], tuple(one["name"] for one in group["columns"]), group["key_width"])

    def cut(self, shard: str, increment: int) -> Document:
        """Return the shard's part of the cut."""
        found: Document = next(one for one in self.commits[increment]["cut"]["nodes"] if one["node"] == shard)
        return found

    # Contents.

    def edit_base(self, node: str, change: Callable[[Rows], object], increment: int = 0, table: str = "") -> None:
        """Change the rows of a node's base object: the one with rows of `table`, or the largest."""
        found = [one for one in self.entries(increment) if (one["kind"], one["node"]) == (BASE, node)]
        if table:
            number = str(self.table(table, node, increment).number)
            found = [one for one in found if number in one["rows"]]
        entry = max(found, key=lambda one: one["size"])
        rows = self.rows_of(entry)
        change(rows)
        self.put_base(entry, rows)

    def rows_of(self, entry: Document) -> Rows:
        """Return the rows of an object of a base copy."""
        rows: Rows = pq.read_table(self.root / entry["key"]).cast(BASE_SCHEMA).to_pylist()
        return rows

    def put_base(self, entry: Document, rows: Rows) -> None:
        """Store these rows as the object of a base copy, and describe them in its entry."""
        body = _parquet(rows, BASE_SCHEMA)
        counts = Counter(row["group"] for row in rows)
        self._put(entry, body, {str(number): counts[number] for number in sorted(counts)})

    def large(self, shard: str, oid: int) -> Document:
        """Return the entry of the object that has the large object."""
        found = [one for one in self.entries(0) if (one["kind"], one["node"]) == (LARGE_OBJECTS, shard)]
        return next(one for one in found if oid in pq.read_table(self.root / one["key"])["oid"].to_pylist())

    def edit_large(self, shard: str, oid: int, change: Callable[[Rows], object]) -> None:
        """Change the parts in the object that has the large object."""
        entry = self.large(shard, oid)
        rows: Rows = pq.read_table(self.root / entry["key"]).cast(LARGE_SCHEMA).to_pylist()
        change(rows)
        count = sum(row["definition"] is not None for row in rows)
        self._put(entry, _parquet(rows, LARGE_SCHEMA), {str(LARGE_OBJECTS_COUNT): count})

    def edit_ddl(self, shard: str, change: Callable[[bytes, Contents], bytes], increment: int | None = None) -> None:
        """Change the shard's DDL archive in the commit; None means the newest."""
        entry = self.entry(DDL, shard, increment)
        before = zstandard.decompress(self.read(entry["key"]))
        after = change(before, read_contents(before))
        assert after != before, "the DDL is unchanged"
        self._put(entry, zstandard.compress(after), {})

    def edit_globals(self, shard: str, change: Callable[[Document], object]) -> None:
        """Change the globals of the shard's server."""
        entry = self.entry(GLOBALS, shard)
        document = json.loads(zstandard.decompress(self.read(entry["key"])))
        change(document)
        self._put(entry, zstandard.compress(json.dumps(document).encode()), {})

    def put_object(self, entry: Document, body: bytes) -> None:
        """Store the body as the entry's object, without a look at its rows."""
        self._put(entry, body, entry["rows"])

    def _put(self, entry: Document, body: bytes, rows: Mapping[str, int]) -> None:
        self.write(entry["key"], body)
        self.keys.add(entry["key"])
        entry.update(size=len(body), digest=digest(body), rows=rows)

    def open_segment(self, node: str, increment: int) -> OpenSegment:
        """Return the contents of the node's segment."""
        table = pq.read_table(self.root / self.segment(node, increment)["key"]).cast(SEGMENT_SCHEMA)
        rows: Rows = table.to_pylist()
        changes = [row for row in rows if row["op"] in CHANGES]
        return OpenSegment(changes, [row for row in rows if row["op"] not in CHANGES])

    def edit_segment(self, node: str, increment: int, change: Callable[[OpenSegment], object]) -> None:
        """Change the contents of the node's segment, and its metadata, seal and entry in the commit."""
        entry, opened = self.segment(node, increment), self.open_segment(node, increment)
        change(opened)
        stored = pq.read_metadata(self.root / entry["key"]).metadata[METADATA_KEY]
        metadata: SegmentMetadata = from_json(stored, SegmentMetadata)
        changes, events = (pa.Table.from_pylist(rows, SEGMENT_SCHEMA) for rows in (opened.changes, opened.events))
        if opened.counts:
            events, _ = count_changes(changes, events, None, None)
        ops = Counter(row["op"] for row in opened.changes)
        counts = {"changes": len(changes), "events": len(events), "partials": ops[PARTIAL], "truncates": ops[TRUNCATE]}
        first = _first_changes(changes, metadata.definitions)
        metadata = structs.replace(metadata, **({"first_changes": first, "seal": NO_SEAL, **counts} | opened.declared))
        body = segment_bytes(metadata, *opened.layout(changes, events))
        if not opened.seals:
            body = SEAL_OF_SEGMENT.sub(rb"\g<1>0000", body)
        self.write(entry["key"], body)
        self.keys.add(entry["key"])
        form = stored_form(LocalStore(self.root))
        listed = fields_of(_read_archived(metadata, entry["number"], body, body, form).segment)
        entry.update(listed | {"key": entry["key"]} | opened.listed)
        for commit in self.commits[increment + 1 :]:
            idle = commit.get("idle", {})
            if idle.get(node, {}).get("key") == entry["key"]:
                idle[node] = dict(entry)

    # Seals.

    def seal(self, *, recounts: bool = True) -> None:
        """Store the changed documents: lists, commits with their counts and links, and outcomes."""
        self._seal_lists()
        current: dict[str, set[int]] = {}
        primaries = {one["node"] for one in self.commits[0]["baseline"] if one["backup_of"] is None}
        for number, commit in enumerate(self.commits):
            if recounts:
                commit["counts"] |= self._counts(number, primaries, current)
            if number:
                relink(commit, self.commits[:number])
            body = seal(commit)
            commit["digest"] = body[DIGEST].decode()
            if body != self.read(key := commit_key(self.name, number)):
                self.write(key, body)
                self.keys.add(key)
                self._seal_outcome(number)

    def cut_again(self) -> None:
        """Seal, and compute every cut again from the archived events, as a create would."""
        self.seal()
        store = LocalStore(self.root)
        chain = read_chain(store, self.name)
        archives = [_ShardArchive(shard, chain.full.base[shard]) for shard in chain.full.primaries]
        for commit, document in zip(chain.commits, self.commits, strict=True):
            cut = resolve(_read_windows(archives, commit, StoredEvents(store)))
            for node in cut.nodes:
                fields = fields_of(node)
                part = self.cut(node.node, commit.increment)
                part.update({name: fields[name] for name in CUT_FIELDS if name in fields})
                # A node without a commit has no time of its newest commit.
                for name in part.keys() & set(CUT_FIELDS) - fields.keys():
                    del part[name]
            document["cut"] |= {name: getattr(cut, name) for name in CUT_TOTALS}
            document["cut"]["safe_at"] = str(safe_time_of_nodes(cut.nodes))
            again = structs.replace(commit, cut=structs.replace(commit.cut, nodes=cut.nodes))
            _end_windows(archives, again)
        self.seal()

    def _seal_lists(self) -> None:
        for number in range(len(self.commits)):
            for entry in self.object_lists(number):
                listed = self.lists[entry["key"]]["objects"]
                body = seal(self.lists[entry["key"]])
                if body == self.read(entry["key"]):
                    continue
                self.write(entry["key"], body)
                self.keys.add(entry["key"])
                rows: Counter[str] = Counter()
                for one in listed:
                    rows.update(one["rows"])
                sizes = {"objects": len(listed), "bytes": sum(one["size"] for one in listed)}
                entry.update(size=len(body), digest=digest(body), rows=dict(rows), **sizes)

    def _counts(self, increment: int, primaries: set[str], current: dict[str, set[int]]) -> dict[str, int]:
        commit, lists = self.commits[increment], self.object_lists(increment)
        changes = _changes(commit)
        own = [*commit.get("objects", ()), *changes.get("objects", ()), *commit.get("extension_rows", ())]
        segments = [(node, one) for node, listed in commit["segments"].items() for one in listed]
        copies = [one for one in (*own, *lists) if one["kind"] == BASE and one["node"] in primaries]
        named = [*own, *lists, *(one for _, one in segments)]
        for groups in (commit.get("groups", {}), changes.get("groups", {})):
            for shard, some in groups.items():
                current.setdefault(shard, set()).update(group["number"] for group in some)
        for shard, gone in changes.get("gone", {}).items():
            current[shard] -= set(gone)
        local = sum(one["local_transactions"] for one in commit["cut"]["nodes"])
        found = {
            "rows": sum(sum(one["rows"].values()) for one in copies),
            "changes": sum(one["changes"] for node, one in segments if node in primaries),
            "transactions": local + commit["cut"]["global_transactions"],
            "objects": len(named) + sum(one["objects"] for one in lists),
            "bytes": sum(one["size"] for one in named) + sum(one["bytes"] for one in lists),
            "groups": sum(map(len, current.values())),
            "continued": sum(map(len, changes.get("successions", {}).values())),
        }
        return {name: count for name, count in found.items() if name in commit["counts"]}

    def _seal_outcome(self, increment: int) -> None:
        for name in ("outcome", IDLE_OUTCOME.removesuffix(".json")):
            key = self.operation_key(name, increment)
            if (self.root / key).exists():
                document = json.loads(self.read(key))
                counts = self.commits[increment]["counts"]
                document["volumes"] = {one: counts.get(one, count) for one, count in document["volumes"].items()}
                if causes := self.commits[increment]["cut"]["causes"]:
                    document["causes"] = causes
                if "commit_digest" in document:
                    document["commit_digest"] = self.commits[increment]["digest"]
                self.write(key, seal(document))


def copy_store(store: Path, root: Path) -> None:
    """Copy a store by hard links."""
    shutil.copytree(store, root, copy_function=os.link)


def objects_in(root: Path, folder: str) -> list[str]:
    """Return the keys of the store's objects in a folder."""
    return [path.relative_to(root).as_posix() for path in (root / folder).rglob("*") if path.is_file()]


def _changes(commit: Document) -> Document:
    found: Document = commit.get("schema_changes") or {}
    return found


def _parquet(rows: Rows, schema: pa.Schema) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema), sink, **parquet_options(schema))
    body: bytes = sink.getvalue().to_pybytes()
    return body
