"""The JSON documents in a store: each is written once, in one canonical form, under its key, with a digest.

The canonical form is JSON in UTF-8 without spaces, whose last field is the SHA-256 of the same JSON without that field.
A document of at least COMPRESSED_FROM bytes is compressed with zstd.

A document is trusted only if it is no larger than DOCUMENT_BYTES_MAX, every byte of its JSON is as it was written, no
key occurs twice, and its content matches its type (fleet/record.py). Anything else raises an error that names the
object.

Each kind of document is a Record. Its module also defines its key, the function that reads it and, in one function, the
rules that types can't express.

An object in a snapshot whose key matches no pattern in KEYS is not Cutline's: it is reported and never touched.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import msgspec
import zstandard
from msgspec import Struct, structs

from cutline.fleet.record import Record, from_json, to_json
from cutline.storage.digest import digest
from cutline.storage.errors import RefusedError
from cutline.storage.ids import OPERATION_ID
from cutline.storage.store import ObjectStore
from cutline.storage.stored_form import ENCRYPTED_END, UndecryptableError, stored_form


class Kind(StrEnum):
    """The kind of an object, according to its key."""

    BASE = "base"
    SCHEMA = "schema"
    LIST = "list"
    STEP = "copy-step"
    SEGMENT = "wal"
    COMMIT = "commit"
    REPAIR = "repair"
    MERGE = "merge"
    MARK = "mark"
    PIN = "pin"
    RECORD = "record"
    PROBE = "probe"
    UNFINISHED = "unfinished"


_NODE = r"(?P<node>[^/]+)"
_OWNER = rf"(?P<owner>{OPERATION_ID.pattern})"
KEYS: dict[Kind, tuple[re.Pattern[str], ...]] = {
    Kind.BASE: (re.compile(rf"base/{_NODE}/{_OWNER}/(?:part|dead)-[^/]+\.parquet"),),
    Kind.SCHEMA: (re.compile(rf"schema/{_NODE}/{_OWNER}/[a-z-]+-[0-9a-f]{{8}}\.(?:dump|sql|json)\.zst"),),
    Kind.LIST: (re.compile(rf"lists/{_NODE}/{_OWNER}/(?:base|large_objects)-\d{{6}}-[0-9a-f]{{8}}\.json"),),
    Kind.STEP: (re.compile(rf"copies/{_NODE}/{_OWNER}/[0-9a-f]{{16}}-[0-9a-f]{{8}}\.json"),),
    Kind.SEGMENT: (re.compile(rf"wal/{_NODE}/{_OWNER}/(?P<number>\d{{20}})\.parquet"),),
    Kind.COMMIT: (
        re.compile(r"snapshot(\.\d+)?\.json"),
        re.compile(r"increments/(?P<number>\d{16})(\.\d+)?\.json"),
    ),
    Kind.REPAIR: (re.compile(r"repairs/\d{16}\.json"),),
    Kind.MERGE: (re.compile(r"merges/(?P<number>\d{16})(\.\d+)?\.json"),),
    Kind.MARK: (
        re.compile(r"only-full\.json"),
        re.compile(r"begins/\d{16}\.json"),
        re.compile(rf"ended/{_OWNER}\.json"),
    ),
    Kind.PIN: (re.compile(rf"pins/{_OWNER}(?:\.released)?\.json"),),
}


class ParsedKey(Struct, frozen=True):
    """The parts of a key below a snapshot's folder. `number` is the number of a segment or increment."""

    kind: Kind
    snapshot: str
    owner: str = ""
    node: str = ""
    number: int = 0


def base_prefix(snapshot: str, node: str, operation: str) -> str:
    """Return the folder of the base copy that an operation makes of a node."""
    return f"snapshots/{snapshot}/base/{node}/{operation}"


def ddl_prefix(snapshot: str, node: str, operation: str) -> str:
    """Return the folder of the DDL that an operation dumps from a shard."""
    return f"snapshots/{snapshot}/schema/{node}/{operation}"


def list_prefix(snapshot: str, node: str, operation: str) -> str:
    """Return the folder of the object lists that an operation writes for a node's copy."""
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


# The name of a snapshot.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
FORMAT = re.compile(rb'"schema": ?"(cutline/[a-z-]+/([0-9]{1,9}))"')
SEAL = re.compile(rb',"digest":"([0-9a-f]{64})"}\Z')
SEAL_BYTES = len(',"digest":""}') + 64
# The newest format of any kind. Only commits have format 2, and they have no format 1.
FORMAT_MAX = 2
# A commit for 10,000 tables of 8 columns is 13 MB. Larger documents are neither read nor written.
DOCUMENT_BYTES_MAX = 256 << 20
# Definitions repeat the same words: the commit for 10,000 tables is compressed to 0.25 MB.
COMPRESSED_FROM = 256 << 10
# Documents outside the folders of snapshots describe operations and fleets. Compressed, larger ones would be cheap to
# plant, and many are read at once.
RECORD_BYTES_MAX = 64 << 20
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
SNAPSHOTS = "snapshots/"
# The maximum length of a text, which is also the maximum for a command's argument. Only the LONG field, the value that
# existing rows have in a new column (groups.py), may be longer.
TEXT_MAX, LONG = 128 << 10, "missing"
TEXT_SHOWN = 300
NEWER_HINT = "a newer version of Cutline may have written it"


class _Tag(msgspec.Struct):
    """The field that every document must have. msgspec does not require the tag of a type outside a union."""

    schema: str


@runtime_checkable
class StoredOtherwise(Protocol):
    """A document that is stored in another form than it is used in."""

    def for_storing(self) -> Record:
        """Return the form in which this document is stored."""
        ...


@runtime_checkable
class ReadInParts(Protocol):
    """A document of which `from_json` leaves parts undecoded."""

    def joined(self) -> Record:
        """Decode the parts and return the document as it is used; raise ValueError if a part is invalid."""
        ...

    def is_canonical(self) -> bool:
        """Whether the parts have the canonical form; raise ValueError if one is invalid."""
        ...


class ManifestError(RefusedError):
    """A document in the store is damaged, misplaced, or in an unknown format."""


class DocumentTooLargeError(RefusedError):
    """A document would be larger than those that are read."""


class TextTooLongError(RefusedError):
    """A document would have a text that is longer than those that are read."""


class StoreEncryptedError(ManifestError):
    """The document is encrypted, and fleet.toml has no `[encryption]`."""


def seal(document: Record | Mapping[str, Any]) -> bytes:
    """Return the bytes of a document in its canonical form, compressed if it is large.

    Raises DocumentTooLargeError and TextTooLongError if the document would not be read.
    """
    return seal_with_digest(document)[0]


def seal_with_digest(document: Record | Mapping[str, Any]) -> tuple[bytes, str]:
    """Return the bytes of a document as `seal` does, and the document's digest."""
    if isinstance(document, Record):
        text = content_of(document)
    else:
        text = to_json({name: value for name, value in document.items() if name != "digest"})
    own_digest = digest(text)
    body = text[:-1] + f',"digest":"{own_digest}"}}'.encode()
    if len(body) > DOCUMENT_BYTES_MAX:
        raise DocumentTooLargeError(
            f"a document would have {len(body) >> 20} MiB, more than the {DOCUMENT_BYTES_MAX >> 20} MiB that are read",
            hint="divide the fleet, or exclude tables: exclude under [groups] in fleet.toml",
        )
    if not _is_text_short(text):
        try:
            _check_keys(text)
        except ValueError as error:
            raise TextTooLongError(str(error), hint="shorten this text") from error
    return body if len(body) < COMPRESSED_FROM else zstandard.compress(body), own_digest


def content_of(document: Record) -> bytes:
    """Return the JSON of a document without its digest, as `unseal` does.

    If the type has a `digest`, it must omit defaults.
    """
    if getattr(document, "digest", ""):
        document = structs.replace(document, digest="")
    return to_json(document.for_storing() if isinstance(document, StoredOtherwise) else document)


def read_sealed(store: ObjectStore, key: str, kind: Any) -> Any:
    """Read a document of `kind`; raise ObjectMissingError, and ManifestError unless every byte is as it was sealed."""
    content, _ = unseal(key, read_body(store, key))
    return parse_document(key, content, kind)


def read_body(store: ObjectStore, key: str) -> bytes:
    """Read a document's bytes; raise ObjectMissingError, and ManifestError if the object can't be a document.

    Reads no more than a document of DOCUMENT_BYTES_MAX takes up. Raises StoreEncryptedError, a ManifestError, if the
    object is encrypted and fleet.toml names no key.
    """
    form = stored_form(store)
    size_max = form.stored_size(DOCUMENT_BYTES_MAX)
    stored = form.raw.read_range(key, 0, size_max + 1)
    if len(stored) > size_max:
        raise ManifestError(
            f"object {key} is too large to be a document: more than {DOCUMENT_BYTES_MAX >> 20} MiB",
            hint="Cutline did not write it: put it back from a copy of the store",
            details={"object": key},
        )
    try:
        body = form.decode(key, stored)
    except UndecryptableError as error:
        raise ManifestError(error.message, hint=error.hint, details=error.details) from None
    if body.endswith(ENCRYPTED_END):
        raise StoreEncryptedError(
            f"object {key} of store {store.url} is encrypted, but fleet.toml does not name a key",
            hint="name the fleet's encryption key under [encryption] in fleet.toml: docs/encryption.md",
            details={"object": key, "store": store.url},
        )
    return body


def unseal(key: str, body: bytes) -> tuple[bytes, str]:
    """Return a document's content and its digest; raise ManifestError unless every byte is as it was sealed."""
    if body.startswith(ZSTD_MAGIC):
        body = b"".join(_decompress_document(key, body))
    seal = SEAL.search(body, max(len(body) - SEAL_BYTES, 0))
    if seal is not None:
        # Compare the bytes: encoding thousands of tables again would take too long.
        content = b"".join((memoryview(body)[: seal.start()], b"}"))
        if digest(content) == seal[1].decode():
            return content, seal[1].decode()
    match = FORMAT.search(body)
    is_newer = match is not None and int(match[2]) > FORMAT_MAX
    hint = f"{NEWER_HINT}: its format is {match[1].decode()}" if match and is_newer else ""
    raise _damaged_error(key, "is damaged: its contents have changed since it was written", hint)


def has_digest(key: str, body: bytes, named: str) -> bool:
    """Whether a document has this digest, and every byte is as it was sealed. Its content is not held in memory.

    Raises ManifestError if it can't be decompressed.
    """
    hashed, end = hashlib.sha256(), b""
    for piece in _decompress_document(key, body) if body.startswith(ZSTD_MAGIC) else [body]:
        held = end + piece
        hashed.update(memoryview(held)[:-SEAL_BYTES])
        end = held[-SEAL_BYTES:]
    hashed.update(b"}")
    return end == f',"digest":"{named}"}}'.encode() and hashed.hexdigest() == named


def _decompress_document(key: str, body: bytes) -> Iterator[bytes]:
    """Yield the pieces of a compressed document; raise ManifestError if it is damaged or too large."""
    try:
        yield from decompress_in_pieces(body, DOCUMENT_BYTES_MAX if key.startswith(SNAPSHOTS) else RECORD_BYTES_MAX)
    except ValueError as error:
        raise _damaged_error(key, f"is damaged: {error}") from error


def _damaged_error(key: str, problem: str, hint: str = "") -> ManifestError:
    remedy = (
        "put it back from a copy of the store, or move a commit away and fetch it: snapshot repair NAME --from URL;"
        " until then, nothing that it describes can be trusted"
    )
    return ManifestError(f"object {key} {problem}", hint=hint or remedy, details={"object": key})


def parse_document(key: str, content: bytes, kind: Any, *, is_proven: bool = False) -> Any:
    """Parse the document in `content`; raise ManifestError unless its kind is `kind`.

    `is_proven`: another document names exactly these bytes by their digest, and the operation that wrote that document
    has proven them, or written them itself. The values are still checked against their types, but not again that the
    document has the canonical form.
    """
    with checking(key):
        if not is_proven:
            from_json(content, _Tag)
        document = from_json(content, kind)
        # Everything that Cutline writes has the canonical form, in which no key occurs twice. Otherwise each object is
        # examined, which takes ten times as long, and for a malformed document thirty times its size in memory.
        if not (is_proven or (_is_canonical(document, content) and _is_text_short(content))):
            _check_keys(content)
        return document.joined() if isinstance(document, ReadInParts) else document


def _is_canonical(document: Any, content: bytes) -> bool:
    return to_json(document) == content and (not isinstance(document, ReadInParts) or document.is_canonical())


def _is_text_short(content: bytes) -> bool:
    """Whether no text in the JSON is longer than TEXT_MAX.

    Looks at few quotes, and may return False for short texts too.
    """
    quote = 0
    while len(content) - quote > TEXT_MAX:
        quote = content.rfind(b'"', quote + 1, quote + TEXT_MAX)
        if quote < 0 or content[quote - 1 : quote] == b"\\":
            return False
    return True


def _check_keys(content: bytes) -> None:
    """Raise ValueError if a key occurs twice, which readers interpret differently, or a text is too long."""
    json.loads(content, object_pairs_hook=_check_object)


def _check_object(pairs: list[tuple[str, Any]]) -> None:
    # Return nothing, so that the parsed values are not kept.
    for name, value in pairs:
        texts = value if isinstance(value, list) else (value,)
        if name != LONG and any(isinstance(text, str) and len(text) > TEXT_MAX for text in (name, *texts)):
            raise ValueError(f"{name[:100]} is longer than {TEXT_MAX} characters")
    if len(dict(pairs)) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:100]!r} occurs twice")


@contextmanager
def checking(key: str) -> Iterator[None]:
    """Turn errors in the block about a document's values into ManifestErrors that name the object."""
    try:
        yield
    except (msgspec.DecodeError, RecursionError, OverflowError, UnicodeDecodeError, ValueError) as error:
        raise ManifestError(
            f"object {key} is not a valid document for this version: {shortened(str(error))}",
            hint=f"{NEWER_HINT}; otherwise put it back from a copy of the store",
            details={"object": key},
        ) from error


def shortened(text: str) -> str:
    """Return the text, shortened to fit in a message: a document may contain megabytes of text."""
    return text if len(text) <= TEXT_SHOWN else f"{text[:TEXT_SHOWN]}…"


def check_about(key: str, found: object, expected: object) -> None:
    """Raise ManifestError unless a document's subject (`found`) is the one in its key (`expected`)."""
    if found != expected:
        raise ManifestError(
            f"object {key} describes {shortened(str(found))}, not {expected}",
            hint="it was copied there by hand: put the right object back from a copy of the store",
            details={"object": key},
        )


WINDOW_BYTES_MAX = 128 << 20
# A single read up to the limit would allocate that much memory.
PIECE_BYTES = 1 << 20
# Part of zstd's message if it can't allocate its buffers.
NO_MEMORY = "not enough memory"


def decompress(body: bytes, bytes_max: int) -> bytes:
    """Decompress all frames; raise ValueError and MemoryError as `decompress_in_pieces` does.

    The memory needed depends on the actual content, not on the limit or on the size that a frame declares.
    """
    return b"".join(decompress_in_pieces(body, bytes_max))


def decompress_in_pieces(body: bytes, bytes_max: int) -> Iterator[bytes]:
    """Yield the content of all frames in pieces; raise ValueError if it is larger than `bytes_max` or damaged.

    Raises MemoryError if memory is short, which does not mean that the object is damaged. If the last frame is
    truncated, the content is truncated too.
    """
    size = 0
    decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
    try:
        with decompressor.stream_reader(body, read_across_frames=True) as reader:
            while piece := reader.read(PIECE_BYTES):
                size += len(piece)
                if size > bytes_max:
                    raise ValueError(f"it is larger than {bytes_max >> 20} MiB")
                yield piece
    except zstandard.ZstdError as error:
        if NO_MEMORY in str(error):
            raise MemoryError(str(error)) from error
        raise ValueError(str(error)) from error
