"""An object store on Amazon S3 and compatible servers.

A create is conditional (storage/s3_create.py), a deletion removes all versions (storage/s3_versions.py), and one policy
governs the retries of all requests (storage/s3_retries.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC
from typing import Any

from msgspec import Struct

from cutline.storage.digest import digest_of, read_pieces
from cutline.storage.errors import SnapshotError
from cutline.storage.s3_client import S3Client, wait_for
from cutline.storage.s3_create import (
    MULTIPART_BYTES_MIN,
    Creation,
    Upload,
    abort_upload,
    create_in_parts,
    unfinished,
)
from cutline.storage.s3_failures import fault_of
from cutline.storage.s3_versions import VersionedDeletion
from cutline.storage.store import (
    DeletionRefusedError,
    Inventory,
    Keys,
    Leftovers,
    Listed,
    ObjectMissingError,
    Unfinished,
    check_key,
    check_prefix,
    check_range,
    has_size,
    is_key,
    store_errors,
)


class S3Store(Struct, frozen=True):
    """An ObjectStore in `root`, which is a bucket or a folder in a bucket: `bucket/folder`."""

    url: str
    root: str
    client: S3Client

    def expect_answers(self) -> None:
        self.client.pace.has_answered = True

    def create(self, key: str, body: bytes) -> None:
        creation = self._creation(key)
        is_large = len(body) >= MULTIPART_BYTES_MIN
        wait_for(self.client, create_in_parts(creation, body) if is_large else creation.put(body))

    def create_in_parts(self, key: str, body: bytes) -> None:
        wait_for(self.client, create_in_parts(self._creation(key), body))

    def read(self, key: str) -> bytes:
        address = self._address(check_key(key))
        with store_errors(self.url, key, fault_of):
            return wait_for(self.client, self.client.read(**address))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        address = self._address(check_key(key))
        with store_errors(self.url, key, fault_of):
            try:
                return wait_for(self.client, self.client.read(**address, Range=f"bytes={start}-{start + length - 1}"))
            except Exception as error:
                if fault_of(error).is_beyond_end:
                    return b""
                raise

    def size(self, key: str) -> int:
        address = self._address(check_key(key))
        with store_errors(self.url, key, fault_of):
            return int(self.client.ask("head_object", **address)["ContentLength"])

    def digest(self, key: str) -> str:
        return digest_of(read_pieces(self, key))

    def exists(self, key: str) -> bool:
        return has_size(self, key)

    def list(self, prefix: str) -> Keys:
        return [listed.key for listed in self.inventory(prefix)]

    def inventory(self, prefix: str, after: str = "") -> Inventory:
        skip = len(self._prefix(""))
        start = {"StartAfter": self._prefix("") + after} if after else {}
        # Consoles create placeholders for empty folders: their names end with a slash, so they are not keys.
        return sorted(
            Listed(
                stored_object["Key"][skip:], int(stored_object["Size"]), stored_object["LastModified"].astimezone(UTC)
            )
            for page in self._pages(check_prefix(prefix), **start)
            for stored_object in page.get("Contents", [])
            if is_key(stored_object["Key"][skip:]) and stored_object["Key"][skip:] > after
        )

    def list_children(self, prefix: str) -> Keys:
        folder = check_prefix(prefix)
        skip = len(self._prefix(folder))
        pages = list(self._pages(folder, Delimiter="/"))
        paths = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        paths += [entry["Prefix"] for page in pages for entry in page.get("CommonPrefixes", [])]
        names = {path[skip:].rstrip("/") for path in paths}
        return sorted(name for name in names if is_key(name))

    def delete(self, key: str) -> None:
        deletion = VersionedDeletion(self.client, self.url, key, self._address(check_key(key)))
        with suppress(ObjectMissingError), store_errors(self.url, key, fault_of), self._refusing_deletion(key):
            deletion.run()

    def unfinished(self) -> Leftovers:
        bucket, prefix = self._address("")["Bucket"], self._prefix("")
        try:
            return wait_for(self.client, unfinished(self.client, bucket, prefix))
        except Exception as error:
            raise fault_of(error).unreachable(self.url) from error

    def abandon(self, leftover: Unfinished) -> None:
        address = self._address(leftover.key)
        upload = Upload(address["Bucket"], address["Key"], leftover.id)
        with store_errors(self.url, leftover.key, fault_of), self._refusing_deletion(leftover.key):
            wait_for(self.client, abort_upload(self.client, upload))

    def _address(self, key: str) -> dict[str, str]:
        """Return the address of an object, or of the root for "", as S3 parameters."""
        bucket, name, _ = self.client.s3fs.split_path(f"{self.root}/{key}" if key else self.root)
        return {"Bucket": bucket, "Key": name}

    def _prefix(self, folder: str) -> str:
        """Return the prefix that the names of all objects in a folder have in the bucket."""
        name = self._address(folder)["Key"]
        return f"{name}/" if name else ""

    def _creation(self, key: str) -> Creation:
        return Creation(self.client, self.url, key, self._address(check_key(key)))

    def _pages(self, folder: str, **parameters: str) -> Iterator[Mapping[str, Any]]:
        """Yield the pages of a listing; nothing if the folder does not exist."""
        asked = {"Bucket": self._address(folder)["Bucket"], "Prefix": self._prefix(folder), **parameters}
        while True:
            try:
                with store_errors(self.url, folder, fault_of):
                    page = self.client.ask("list_objects_v2", **asked)
            except ObjectMissingError:
                return
            yield page
            if not page.get("IsTruncated"):
                return
            asked["ContinuationToken"] = page["NextContinuationToken"]

    @contextmanager
    def _refusing_deletion(self, key: str) -> Iterator[None]:
        """Raise DeletionRefusedError if the store forbids the block's request."""
        try:
            yield
        except SnapshotError:
            raise
        except Exception as error:
            fault = fault_of(error)
            if fault.is_forbidden:
                raise DeletionRefusedError(url=self.url, key=key, reason=fault.reason) from error
            raise
