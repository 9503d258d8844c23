"""Every kind of JSON document in a store: its key and its type. docs/format/ contains the JSON Schemas."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from cutline.fleet.record import Count, Record, json_schema
from cutline.snapshots.records.background_records import CopyStep
from cutline.snapshots.records.commit import Increment, ListedObjects, StoredFull, Void
from cutline.snapshots.records.end_marks import EndMark
from cutline.snapshots.records.merge_records import Begin, Merge, MergePart
from cutline.snapshots.records.operation_records import (
    CancelRequest,
    Decision,
    Failure,
    Intent,
    LeaseRenewal,
    Outcome,
    SignOfLife,
)
from cutline.snapshots.records.pins import Pin, PinRelease
from cutline.snapshots.records.repair_records import Repair, RepairVoid
from cutline.snapshots.records.server_globals import ServerGlobals
from cutline.snapshots.records.store_identity import BaselineRecord, StoreIdentity
from cutline.snapshots.records.tombstones import Mark
from cutline.snapshots.records.unfinished_records import CopiedRanges, Resumption, UnfinishedBase
from cutline.storage.encryption.key_documents import KeyDocument
from cutline.wal.segments.archive import SegmentMetadata

EXTENSION_ROWS_FORMAT = "cutline/extension-rows/1"


class ExtensionTable(Record, frozen=True, kw_only=True):
    """A table that `extension` has marked as its configuration; `size` is the size of its statements in bytes."""

    extension: str
    schema: str
    name: str
    rows: Count
    size: Count


class ExtensionSequence(Record, frozen=True, kw_only=True):
    """A sequence that `extension` has marked as its configuration. The commit's sequences include its value."""

    extension: str
    schema: str
    name: str


class ExtensionRows(Record, frozen=True, kw_only=True, tag_field="schema", tag=EXTENSION_ROWS_FORMAT):
    """The header of the object with the rows of extension configuration tables.

    It lists the tables with rows, referenced tables first, and the marked sequences. The object is a compressed psql
    script. Its first line is a comment that contains this document. The statements of the tables follow, in the
    encoding of the shard's database, for a server with standard_conforming_strings on.
    """

    tables: tuple[ExtensionTable, ...]
    sequences: tuple[ExtensionSequence, ...] = ()


DIGEST_SCHEMA = {
    "type": "string",
    "pattern": "^[0-9a-f]{64}$",
    "description": "SHA-256 of the document's bytes without this field (docs/store-format.md)",
}


class DocumentKind(Struct, frozen=True):
    """A kind of document: its types, and whether a digest is allowed and required."""

    name: str
    types: tuple[type[msgspec.Struct], ...]
    is_always_sealed: bool = True
    is_sealed: bool = True


KINDS = (
    DocumentKind("fleet", (StoreIdentity,), is_always_sealed=False),
    DocumentKind("baseline", (BaselineRecord,), is_always_sealed=False),
    DocumentKind("snapshot", (StoredFull, Void)),
    DocumentKind("increment", (Increment, Void)),
    DocumentKind("objects", (ListedObjects,)),
    DocumentKind("repair", (Repair, RepairVoid)),
    DocumentKind("merge", (Merge, Void)),
    DocumentKind("begin", (Begin,)),
    DocumentKind("merge-part", (MergePart,)),
    DocumentKind("unfinished-base", (UnfinishedBase,)),
    DocumentKind("copied-ranges", (CopiedRanges,)),
    DocumentKind("copy-step", (CopyStep,)),
    DocumentKind("resumption", (Resumption,)),
    DocumentKind("ended", (EndMark,)),
    DocumentKind("deleted", (Mark,)),
    DocumentKind("pin", (Pin, PinRelease)),
    DocumentKind("intent", (Intent,), is_always_sealed=False),
    DocumentKind("outcome", (Outcome,), is_always_sealed=False),
    DocumentKind("failure", (Failure,)),
    DocumentKind("decision", (Decision,)),
    DocumentKind("sign", (SignOfLife,)),
    DocumentKind("cancel", (CancelRequest,)),
    DocumentKind("key", (KeyDocument,), is_sealed=False),
    DocumentKind("lease", (LeaseRenewal,), is_always_sealed=False),
)
# Stored in the metadata of a Parquet file, under METADATA_KEY of wal.segments.segments.
SEGMENT_METADATA = "segment-metadata"
# These documents are stored compressed, below schema/; the second is the first line of a script.
GLOBALS_DOCUMENT, EXTENSION_ROWS_DOCUMENT = "globals", "extension-rows"


def json_schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON Schema of every kind, keyed by its name."""
    schemas = {
        kind.name: _schema(kind.types, is_sealed=kind.is_sealed, is_always=kind.is_always_sealed) for kind in KINDS
    }
    return schemas | {
        SEGMENT_METADATA: _schema((SegmentMetadata,), is_sealed=False, is_always=False),
        GLOBALS_DOCUMENT: _schema((ServerGlobals,), is_sealed=False, is_always=False),
        EXTENSION_ROWS_DOCUMENT: _schema((ExtensionRows,), is_sealed=False, is_always=False),
    }


def _schema(types: Iterable[type[msgspec.Struct]], *, is_sealed: bool, is_always: bool) -> dict[str, Any]:
    types = list(types)
    references, definitions = json_schema(types)
    for definition in definitions.values():
        definition["description"] = inspect.cleandoc(definition.get("description", ""))
    for kind in types if is_sealed else ():
        definition = definitions[kind.__name__]
        definition["properties"]["digest"] = DIGEST_SCHEMA
        if is_always:
            definition["required"].append("digest")
    root = references[0] if len(references) == 1 else {"anyOf": list(references)}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": dict(definitions)}


def write_schemas(folder: Path) -> None:
    """Write each schema to a file in `folder`, and remove the files of kinds that no longer exist."""
    folder.mkdir(parents=True, exist_ok=True)
    schemas = json_schemas()
    for old in folder.glob("*.json"):
        if old.stem not in schemas:
            old.unlink()
    for name, schema in schemas.items():
        (folder / f"{name}.json").write_text(json.dumps(schema, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]))
