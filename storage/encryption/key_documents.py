"""Key documents: the store's data key, encrypted once with every encryption key that opens the store.

`keys/0000000000000001.json` and the documents with the numbers after it are the only objects that are not encrypted
with the data key. To rotate the key, a document for the new encryption key is added and the one for the old key is
removed; no object is rewritten, because the data key stays the same. Without an encryption key, it is impossible to
create a document that opens; documents can only be removed.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from typing import Annotated, Literal

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from msgspec import Struct

from cutline.storage.clock import utc_now
from cutline.storage.encryption.cipher import KEY_BYTES, derive_key
from cutline.storage.encryption.encrypted_store import StoreKey
from cutline.storage.errors import RefusedError
from cutline.storage.store import ObjectExistsError, ObjectMissingError, ObjectStore
from cutline.storage.storing import create_or_find

KEYS = "keys"
KEY_DOCUMENT = re.compile(rf"{KEYS}/([0-9]{{16}})\.json")
KEY_ID_BYTES, NONCE_BYTES = 8, 12
DOCUMENT_BYTES_MAX = 4096
ATTEMPTS_MAX = 64
FORMAT = "cutline/key/1"
NAMED_FORMAT = re.compile(rb'"schema": ?"(cutline/key/[0-9]{1,9})"')
KeyId = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}$(?!\n)")]
CreatedAt = Annotated[
    str, msgspec.Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3}Z$(?!\n)")
]
Mac = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]


class StoreKeyError(RefusedError):
    """None of the store's key documents opens with the fleet's encryption key."""


class KeyDocument(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="schema", tag=FORMAT
):
    """The data key, encrypted with an encryption key; `key` is a name derived from the encryption key.

    `data_key` is, as base64, a nonce and the data key encrypted by AES-256-GCM, which also authenticates `key` and the
    fleet's name. `mac` authenticates the whole document with the data key, so that the holder of one encryption key can
    verify the documents of other keys. `digests` is `content` in the encrypted copy of an unencrypted store, whose
    commits contain the digests of the plain bytes.
    """

    key: KeyId
    created_at: CreatedAt
    data_key: str
    mac: Mac
    digests: Literal["stored", "content"] = "stored"

    def is_genuine(self, data_key: bytes) -> bool:
        """Whether the document was created by somebody who had the data key."""
        return hmac.compare_digest(self.mac, self.mac_under(data_key))

    def mac_under(self, data_key: bytes) -> str:
        """Return the document's MAC with this data key."""
        named = (self.key, self.created_at, self.data_key)
        return _mac_of(data_key, *named, *(() if self.digests == "stored" else (self.digests,)))


class StoredKey(Struct, frozen=True):
    """A key document and its location in the store.

    If it can't be read, `document` is None and `format` is the format that it declares.
    """

    place: str
    document: KeyDocument | None
    format: str = ""

    @property
    def name(self) -> str:
        """The name of the key, or the location of a document that this version can't read, with the reason."""
        if self.document:
            return self.document.key
        if self.format not in {"", FORMAT}:
            return f"{self.place} (a newer version of Cutline may have written it: its format is {self.format})"
        return f"{self.place} (unreadable)"


@dataclass(frozen=True, slots=True, repr=False)
class EncryptionKey:
    """The operator's key for one fleet."""

    key: bytes
    fleet: str

    @property
    def id(self) -> str:
        """The key's name, which reveals nothing else about it."""
        return derive_key(self.key, b"cutline key id")[:KEY_ID_BYTES].hex()

    def wrap(self, store_key: StoreKey) -> KeyDocument:
        """Encrypt the data key."""
        data_key = store_key.data_key
        nonce = secrets.token_bytes(NONCE_BYTES)
        wrapped = nonce + self._wrapping().encrypt(nonce, data_key, self._authenticated(self.id))
        now = utc_now().isoformat(timespec="milliseconds").replace("+00:00", "Z")
        text = base64.b64encode(wrapped).decode()
        document = KeyDocument(self.id, now, text, "", "content" if store_key.is_of_copy else "stored")
        return msgspec.structs.replace(document, mac=document.mac_under(data_key))

    def unwrap(self, document: KeyDocument) -> StoreKey | None:
        """Return the data key; None if the document does not open."""
        try:
            wrapped = base64.b64decode(document.data_key, validate=True)
            about = self._authenticated(document.key)
            data_key = self._wrapping().decrypt(wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:], about)
        except (InvalidTag, binascii.Error, ValueError):
            return None
        if len(data_key) != KEY_BYTES or not document.is_genuine(data_key):
            return None
        return StoreKey(data_key, document.digests == "content")

    def _authenticated(self, key_id: str) -> bytes:
        return f"{key_id} {self.fleet}".encode()

    def _wrapping(self) -> AESGCM:
        return AESGCM(derive_key(self.key, b"cutline data key"))


def stored_keys(raw: ObjectStore) -> list[StoredKey]:
    """Return the store's key documents in order."""
    found = []
    for place in raw.list(KEYS):
        if KEY_DOCUMENT.fullmatch(place):
            try:
                body = raw.read_range(place, 0, DOCUMENT_BYTES_MAX)
                found.append(StoredKey(place, msgspec.json.decode(body, type=KeyDocument)))
            except ObjectMissingError:
                continue
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
                named = NAMED_FORMAT.search(body)
                found.append(StoredKey(place, None, named[1].decode() if named else ""))
    return found


def find_data_key(raw: ObjectStore, key: EncryptionKey) -> StoreKey:
    """Return the store's data key; raise StoreKeyError if no document opens with `key`."""
    stored = stored_keys(raw)
    for stored_key in stored:
        store_key = key.unwrap(stored_key.document) if stored_key.document else None
        if store_key is not None:
            return store_key
    if not stored:
        raise StoreKeyError(
            f"store {raw.url} has no key document: it is new, it is not encrypted, or {KEYS}/ was removed",
            hint=f"run: snapshot init   if it is new; if it was encrypted, put {KEYS}/ back from a copy of the store",
            details={"store": raw.url, "key": key.id},
        )
    others = ", ".join(stored_key.name for stored_key in stored)
    raise StoreKeyError(
        f"store {raw.url} can't be opened with encryption key {key.id} and fleet name {key.fleet!r}; its keys are:"
        f" {others}",
        hint="correct [encryption] or name in fleet.toml; nothing in the store can be read without one of these keys",
        details={"store": raw.url, "key": key.id},
    )


def ensure_data_key(raw: ObjectStore, key: EncryptionKey, given: StoreKey | None = None) -> bool:
    """Create the data key if the store is empty; return whether this call created it.

    The data key is random unless `given`. Raises StoreKeyError if the store is in use and does not open with `key`.
    """
    if not raw.list(KEYS):
        if any(name != "probes" for name in raw.list_children("")):
            raise StoreKeyError(
                f"store {raw.url} is in use, but has no key document: it is not encrypted, or {KEYS}/ was removed",
                hint=f"if it was encrypted, put {KEYS}/ back from a copy of the store; if not, set store in fleet.toml"
                " to a new folder: only an empty store can be encrypted",
                details={"store": raw.url},
            )
        try:
            create_or_find(raw, _place(1), _body(key.wrap(given or new_data_key())))
        except ObjectExistsError:
            pass  # another init got there first
        else:
            return True
    find_data_key(raw, key)
    return False


def new_data_key(*, is_of_copy: bool = False) -> StoreKey:
    """Return a random data key."""
    return StoreKey(secrets.token_bytes(KEY_BYTES), is_of_copy)


def add_key(raw: ObjectStore, key: EncryptionKey, added: EncryptionKey) -> KeyDocument:
    """Store the data key encrypted with `added`; return its document, new or existing. Raises StoreKeyError."""
    data_key = find_data_key(raw, key)
    stored = stored_keys(raw)
    for stored_key in stored:
        if stored_key.document and added.unwrap(stored_key.document) == data_key:
            return stored_key.document
    return _store_document(raw, added.wrap(data_key))


def _store_document(raw: ObjectStore, document: KeyDocument) -> KeyDocument:
    taken = {stored_key.place for stored_key in stored_keys(raw)}
    # Another object may already have this number, or take it first.
    for place in islice((place for place in map(_place, count(1)) if place not in taken), ATTEMPTS_MAX):
        with suppress(ObjectExistsError):
            create_or_find(raw, place, _body(document))
            return document
    raise StoreKeyError(
        f"store {raw.url} has no free number for a key document under {KEYS}/",
        hint=f"remove the objects under {KEYS}/ that are not key documents; to list them: snapshot key list",
        details={"store": raw.url},
    )


def remove_key(raw: ObjectStore, key: EncryptionKey, removed: str) -> list[str]:
    """Delete the documents that name the key `removed`; return their locations. Raises StoreKeyError."""
    data_key = find_data_key(raw, key)
    if removed == key.id:
        raise StoreKeyError(
            f"encryption key {removed} is in use: fleet.toml names it",
            hint="name the new key in [encryption] of fleet.toml, then remove the old one",
            details={"key": removed},
        )
    # This includes planted documents that only carry the key's name.
    places = [
        stored_key.place
        for stored_key in stored_keys(raw)
        if stored_key.document and stored_key.document.key == removed
    ]
    if not places:
        raise StoreKeyError(
            f"store {raw.url} has no encryption key {removed}", hint="see: snapshot key list", details={"key": removed}
        )
    for place in places:
        raw.delete(place)
    # A holder of that key may have removed this key at the same time. Whoever removes last finds that its own document
    # is missing and puts it back.
    if not any(stored_key.document and key.unwrap(stored_key.document) == data_key for stored_key in stored_keys(raw)):
        _store_document(raw, key.wrap(data_key))
    return places


def _mac_of(data_key: bytes, *values: str) -> str:
    return hmac.new(derive_key(data_key, b"cutline key document"), "\n".join(values).encode(), "sha256").hexdigest()


def _place(number: int) -> str:
    return f"{KEYS}/{number:016d}.json"


def _body(document: KeyDocument) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=1)
