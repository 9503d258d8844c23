"""The Dialect of FsspecStore for Amazon S3 and compatible servers, through s3fs.

A create is one PutObject with `If-None-Match: *` (storage/s3_put.py); of a large object, an upload in parts that ends
with the same condition (storage/s3_multipart.py). One policy governs all retries (storage/s3_retries.py).
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from cutline.storage.fsspec_store import Fault, FsspecStore
from cutline.storage.s3_failures import fault_of
from cutline.storage.s3_multipart import MULTIPART_BYTES_MIN, Upload, abort_upload, create_in_parts, unfinished
from cutline.storage.s3_put import Creation
from cutline.storage.s3_session import wait_for
from cutline.storage.s3_versions import delete_versions
from cutline.storage.store import DeletionRefusedError, Leftovers, Unfinished


@dataclass(frozen=True, slots=True)
class S3Dialect:
    """How S3 creates objects exactly once, and what its failures mean."""

    def create(self, store: FsspecStore, key: str, body: bytes) -> None:
        """See ObjectStore."""
        creation = creation_of(store, key)
        large = len(body) >= MULTIPART_BYTES_MIN
        wait_for(store.filesystem, create_in_parts(creation, body) if large else creation.put(body))

    def create_in_parts(self, store: FsspecStore, key: str, body: bytes) -> None:
        """See Dialect."""
        wait_for(store.filesystem, create_in_parts(creation_of(store, key), body))

    def expect_answers(self, store: FsspecStore) -> None:
        """See Dialect."""
        store.filesystem.pace.has_answered = True

    def explain(self, error: Exception) -> Fault:
        """See Dialect."""
        return fault_of(error)

    def delete(self, store: FsspecStore, key: str) -> None:
        """See Dialect."""
        delete_versions(store, key)

    def unfinished(self, store: FsspecStore) -> Leftovers:
        """See Dialect."""
        try:
            return wait_for(store.filesystem, unfinished(store.filesystem, store.root))
        except Exception as error:
            raise fault_of(error).unreachable(store.url) from error

    def abandon(self, store: FsspecStore, leftover: Unfinished) -> None:
        """See Dialect."""
        bucket, name, _ = store.filesystem.split_path(store.path(leftover.key))
        try:
            wait_for(store.filesystem, abort_upload(store.filesystem, Upload(bucket, name, leftover.id)))
        except Exception as error:
            fault = fault_of(error)
            if fault.is_forbidden:
                raise DeletionRefusedError(url=store.url, key=leftover.key, reason=fault.reason) from error
            raise fault.unreachable(store.url) from error


def creation_of(store: FsspecStore, key: str) -> Creation:
    """Return a Creation of `key`, which sends nothing yet."""
    bucket, name, _ = store.filesystem.split_path(store.path(key))
    return Creation(store.filesystem, store.url, key, bucket, name, uuid.uuid4().hex)
