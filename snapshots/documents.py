"""The JSON documents of a store: written once in one fixed form, each with the digest of that form in it.

What is read is believed only if every byte is as it was written, if it is a document of the expected kind in a version
that is known here, and if every value has its type. Else the error names the object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from storage.digest import digest
from storage.errors import RefusedError
from storage.store import ObjectStore

DIGEST = re.compile("[0-9a-f]{64}")
VERSION = re.compile(r"cutline/[a-z-]+/([0-9]{1,9})")
SEAL = re.compile(rb',\n "digest": "([0-9a-f]{64})"\n}\Z')
SEAL_BYTES = len(',\n "digest": ""\n}') + 64
# Of no kind of document is there a later version yet.
VERSION_MAX = 1
NEWER_HINT = "a newer version of Cutline may have written it"


class ManifestError(RefusedError):
    """A document of the store can't be understood, or is not what was written."""


def sealed(document: dict[str, Any]) -> bytes:
    """The bytes of a document in its fixed form, with the digest of that form in it."""
    content = {name: value for name, value in document.items() if name != "digest"}
    text = json.dumps(content, indent=1)
    # Spliced in where encoding it again with its digest would put it, which would take twice as long.
    return f'{text[:-2]},\n "digest": "{digest(text.encode())}"\n}}'.encode()


def read_sealed(store: ObjectStore, key: str) -> dict[str, Any]:
    """Read a document; raise ManifestError unless every byte of it is as it was sealed, and ObjectMissingError."""
    body = store.read(key)
    return _as_sealed(key, body, parsed(key, body))


def read_document(store: ObjectStore, key: str) -> dict[str, Any]:
    """Do the same for kinds of documents that earlier versions wrote without a digest."""
    body = store.read(key)
    document = parsed(key, body)
    # Those had no value that looks like one; so a digest whose name was damaged does not pass for none.
    is_sealed = "digest" in document or any(isinstance(one, str) and DIGEST.fullmatch(one) for one in document.values())
    return _as_sealed(key, body, document) if is_sealed else document


@contextmanager
def understood(key: str, what: str) -> Iterator[None]:
    """Make of whatever is wrong with a document's values a ManifestError that names the object."""
    try:
        yield
    except (AttributeError, ArithmeticError, KeyError, RecursionError, TypeError, ValueError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ManifestError(
            f"object {key} is no {what} that this version understands: {why}",
            hint=f"{NEWER_HINT}; else restore the object from a copy",
            details={"object": key},
        ) from error


def check_schema(document: dict[str, Any], *schemas: str) -> str:
    """Return the document's schema; raise ValueError unless it is one of these."""
    found = document["schema"]
    if found not in schemas:
        raise ValueError(f"its schema is {found!r}, not {' or '.join(schemas)}")
    return str(found)


def check_about(key: str, what: str, found: object, expected: object) -> None:
    """Raise ManifestError unless what the document is about is what it must be, where it is."""
    with understood(key, what):
        if found != expected:
            raise ValueError(f"it is one of {found}")


def entries(value: Any) -> Sequence[Any]:
    """A list of JSON; raise TypeError if it is none. A text would pass for the list of its letters."""
    if not isinstance(value, list | tuple):
        raise TypeError(f"a {type(value).__name__} instead of a list")
    return value


def _as_sealed(key: str, body: bytes, document: dict[str, Any]) -> dict[str, Any]:
    if _is_as_sealed(body):
        return document
    version = VERSION.fullmatch(str(document.get("schema")))
    is_newer = version is not None and int(version[1]) > VERSION_MAX
    raise ManifestError(
        f"object {key}: its bytes are not those that were written",
        hint=f"{NEWER_HINT}: its schema is {version[0]}"
        if version and is_newer
        else "restore the object from a copy; without it what it describes can't be trusted",
        details={"object": key},
    )


def _is_as_sealed(body: bytes) -> bool:
    """Whether the digest at the end is of all that is before it: of thousands of tables nothing is encoded again."""
    seal = SEAL.search(body, len(body) - SEAL_BYTES)
    return seal is not None and digest(body[: seal.start()] + b"\n}") == seal[1].decode()


def parsed(key: str, body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; raise ManifestError if there is none."""
    try:
        document = json.loads(body)
        if not isinstance(document, dict):
            raise TypeError(f"a {type(document).__name__} instead of an object")
    except (ValueError, TypeError, RecursionError) as error:
        raise ManifestError(
            f"object {key} is not JSON of ours: {error}", hint="restore the object from a copy", details={"object": key}
        ) from error
    return document
