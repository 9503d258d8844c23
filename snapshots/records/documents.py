"""The JSON documents of a store: written once in one fixed form, each with the digest of that form in it.

What is read is believed only if every byte is as it was written, and if it is what its type says (fleet/record.py).
Anything else is an error that names the object.

A kind of document is a Record. Beside it stand its key, how it is read and, as one function, the rules that no type
can express.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from fleet.record import Record, fields_of, from_json
from storage.digest import digest
from storage.errors import RefusedError
from storage.store import ObjectStore

FORMAT = re.compile(rb'"schema": "(cutline/[a-z-]+/([0-9]{1,9}))"')
SEAL = re.compile(rb',\n "digest": "([0-9a-f]{64})"\n}\Z')
SEAL_BYTES = len(',\n "digest": ""\n}') + 64
DIGEST = re.compile(rb'"[0-9a-f]{64}"')
# Of no kind of document but commits is there a later version yet, and those have no earlier one.
FORMAT_MAX = 2
NEWER_HINT = "a newer version of Cutline may have written it"


class _Tag(msgspec.Struct):
    """What every document says of itself. msgspec does not ask for the tag of a type that stands alone."""

    schema: str


class ManifestError(RefusedError):
    """A document of the store can't be understood, or is not what was written."""


def sealed(document: Record | Mapping[str, Any]) -> bytes:
    """The bytes of a document in its fixed form, with the digest of that form in it."""
    fields = fields_of(document) if isinstance(document, Record) else document
    content = {name: value for name, value in fields.items() if name != "digest"}
    # msgspec alone would write characters outside ASCII as they are; json, asked to indent, takes four times as long.
    text = msgspec.json.format(json.dumps(content).encode(), indent=1)
    # Spliced in where encoding it again with its digest would put it, which would take twice as long.
    return text[:-2] + f',\n "digest": "{digest(text)}"\n}}'.encode()


def read_sealed(store: ObjectStore, key: str, kind: Any) -> Any:
    """Read a document of `kind`; raise ManifestError unless every byte is as it was sealed, and ObjectMissingError."""
    body = store.read(key)
    content, _ = unsealed(key, body)
    return understood(key, content, kind)


def read_document(store: ObjectStore, key: str, kind: Any) -> Any:
    """Read a document of a `kind` that earlier versions wrote without a digest; raises what `read_sealed` does."""
    body = store.read(key)
    # Those had no value that looks like a digest; so one whose name was damaged does not pass for none.
    content = unsealed(key, body)[0] if b'"digest"' in body or DIGEST.search(body) else body
    return understood(key, content, kind)


def unsealed(key: str, body: bytes) -> tuple[bytes, str]:
    """A document's content and its digest; raise ManifestError unless every byte is as it was sealed."""
    seal = SEAL.search(body, max(len(body) - SEAL_BYTES, 0))
    if seal is not None:
        # Nothing is encoded again, which would take long for thousands of tables.
        content = body[: seal.start()] + b"\n}"
        if digest(content) == seal[1].decode():
            return content, seal[1].decode()
    found = FORMAT.search(body)
    is_newer = found is not None and int(found[2]) > FORMAT_MAX
    raise ManifestError(
        f"object {key}: its bytes are not those that were written",
        hint=f"{NEWER_HINT}: its schema is {found[1].decode()}"
        if found and is_newer
        else "restore the object from a copy; without it what it describes can't be trusted",
        details={"object": key},
    )


def understood(key: str, content: bytes, kind: Any) -> Any:
    """The document in `content`; raise ManifestError if it is none of `kind`."""
    with checked(key):
        from_json(content, _Tag)
        return from_json(content, kind)


@contextmanager
def checked(key: str) -> Iterator[None]:
    """Turn what the block raises about a document's values into a ManifestError that names the object."""
    try:
        yield
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise ManifestError(
            f"object {key} is not a document that this version understands: {error}",
            hint=f"{NEWER_HINT}; else restore the object from a copy",
            details={"object": key},
        ) from error


def check_about(key: str, found: object, expected: object) -> None:
    """Raise ManifestError unless a document is about what its key says."""
    with checked(key):
        if found != expected:
            raise ValueError(f"it is about {found}, not {expected}")
