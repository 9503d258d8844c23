"""Write objects as another program would, with names that may not be valid keys."""

from __future__ import annotations

import pytest

from cutline.storage.encryption.encrypted_store import EncryptedStore
from cutline.storage.fsspec_store import FsspecStore
from cutline.storage.local import LocalStore
from cutline.storage.memory import InMemoryStore
from cutline.storage.rate import PacedStore
from cutline.storage.s3 import S3Store
from cutline.storage.store import ObjectStore
from tests.simulation.faulty_store import FaultyStore


def plant(store: ObjectStore, name: str) -> None:
    """Write an object, bypassing the store's own checks."""
    while isinstance(store, EncryptedStore | PacedStore):
        store = store.raw
    if isinstance(store, LocalStore):
        path = store.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"planted")
    elif isinstance(store, FsspecStore):
        if "\\" in name and "abfs" in store.filesystem.protocol:
            pytest.skip("Azure stores a backslash as a slash, so that no object has such a name")
        store.filesystem.pipe_file(store.path(name), b"planted")
    elif isinstance(store, S3Store):
        bucket, _, folder = store.root.partition("/")
        store.client.ask("put_object", Bucket=bucket, Key=f"{folder}/{name}".lstrip("/"), Body=b"planted")
    elif isinstance(store, InMemoryStore):
        store._objects[name] = b"planted"
    elif isinstance(store, FaultyStore):
        store._bucket.changes.append((name, True))
    else:
        raise TypeError(f"can't plant an object in {type(store).__name__}")
