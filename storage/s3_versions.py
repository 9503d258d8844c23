"""Delete objects from buckets with versioning or Object Lock: all versions of the object are deleted.

In a bucket with versioning, a simple DELETE only adds a delete marker: the object is hidden, but all of its bytes are
kept and billed. So the versions themselves are deleted, the oldest first and markers last: at any moment the key shows
its latest version or nothing, never an earlier version. If a lock protects a version, the deletion stops before
anything newer is touched. Source: Amazon S3 User Guide, "Deleting object versions from a versioning-enabled bucket" and
"Locking objects with Object Lock".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

from msgspec import Struct

from cutline.storage.clock import utc_now
from cutline.storage.s3_client import S3Client
from cutline.storage.s3_failures import code_and_status, fault_of
from cutline.storage.store import DeletionRefusedError

# The version id of an object that was stored without versioning.
NULL = "null"
# The statuses returned by servers without versioning, and for credentials that may not list versions.
UNLISTED_STATUSES = (400, 403, 405, 501)
# The error codes for an object that a policy or a lock protects; MinIO's code for a lock is InvalidRequest.
REFUSALS = {"AccessDenied", "InvalidRequest", "MethodNotAllowed", "ObjectLocked"}


class Version(Struct, frozen=True):
    """One version of a key; a delete marker has no content, but hides the versions before it."""

    id: str
    is_marker: bool


class VersionedDeletion(Struct, frozen=True):
    """The deletion of an object; `address` is the object's address as S3 parameters."""

    client: S3Client
    url: str
    key: str
    address: Mapping[str, str]

    def run(self) -> None:
        """Remove all versions of the key; raise DeletionRefusedError, or a botocore error."""
        try:
            versions = list(self._versions())
        except Exception as error:
            if code_and_status(error)[1] not in UNLISTED_STATUSES:
                raise
            self._delete_unlisted(error)
            return
        if not versions:
            # A listing may be out of date, but a lookup by key is not.
            versions = self._current()
        if versions == [Version(NULL, is_marker=False)]:
            marker = self._delete_key()
            if marker is None:
                return
            # Versioning was enabled, and perhaps suspended again, after the object was stored.
            self._delete_all(list(self._versions()), marker)
        else:
            self._delete_all(versions)

    def _delete_all(self, versions: list[Version], own_marker: str = "") -> None:
        """Delete `versions`; if that is refused, also remove `own_marker`, so that the object is not hidden."""
        for version in sorted(versions, key=lambda version: version.is_marker):
            try:
                self._call("delete_object", VersionId=version.id)
            except Exception as error:
                if own_marker and self._is_refusal(error):
                    self._call("delete_object", VersionId=own_marker)
                self._raise_refused(error, version.id)
                raise

    def _delete_unlisted(self, why: Exception) -> None:
        """Delete without listing versions; raise if the bucket keeps versions: a marker would only hide them."""
        for current in self._current():
            marker = None if current.id != NULL else self._delete_key()
            if marker is not None:
                self._call("delete_object", VersionId=marker)
            if current.id != NULL or marker is not None:
                reason = f"its bucket keeps object versions, which can't be listed: {fault_of(why).reason}"
                raise DeletionRefusedError(url=self.url, key=self.key, reason=reason) from why

    def _delete_key(self) -> str | None:
        """Delete without a version id; return the id of the delete marker, if one was added."""
        try:
            answer = self._call("delete_object")
        except Exception as error:
            self._raise_refused(error)
            raise
        return str(answer["VersionId"]) if answer.get("DeleteMarker") and answer.get("VersionId") else None

    def _current(self) -> list[Version]:
        """Return the current version of the key, if any."""
        try:
            return [Version(self._call("head_object").get("VersionId") or NULL, is_marker=False)]
        except Exception as error:
            if fault_of(error).is_missing:
                return []
            raise

    def _versions(self) -> Iterator[Version]:
        """Yield all versions and delete markers of the key, oldest first."""
        name = self.address["Key"]
        versions: list[Version] = []
        page: dict[str, Any] = {}
        while True:
            # Longer keys that begin with this key are listed after it.
            address = {"Bucket": self.address["Bucket"], "Prefix": name}
            answer = self.client.ask("list_object_versions", **address, **page)
            for kind, is_marker in (("Versions", False), ("DeleteMarkers", True)):
                versions += [
                    Version(entry["VersionId"], is_marker) for entry in answer.get(kind, []) if entry["Key"] == name
                ]
            if not answer.get("IsTruncated") or answer.get("NextKeyMarker") != name:
                break
            page = {"KeyMarker": name, "VersionIdMarker": answer.get("NextVersionIdMarker", "")}
        return reversed(versions)

    def _raise_refused(self, error: Exception, version: str = "") -> None:
        """Raise DeletionRefusedError if the error is a refusal; it names the version's lock if that can be read."""
        if not self._is_refusal(error):
            return
        reason, until = fault_of(error).reason, None
        if version:
            # Credentials that are allowed to delete are not always allowed to read.
            with suppress(Exception):
                reason, until = find_lock(self._call("head_object", VersionId=version), reason)
        raise DeletionRefusedError(url=self.url, key=self.key, reason=reason, until=until) from error

    def _is_refusal(self, error: Exception) -> bool:
        return code_and_status(error)[0] in REFUSALS

    def _call(self, method: str, **parameters: str) -> Any:
        return self.client.ask(method, **self.address, **parameters)


class Lock(NamedTuple):
    """Why a version can't be deleted, and until when, if that is known."""

    reason: str
    until: datetime | None


def find_lock(head: dict[str, Any], reason: str) -> Lock:
    """Return the lock that the answer to a version's HEAD shows; if it shows none, a Lock with `reason`."""
    until = head.get("ObjectLockRetainUntilDate")
    if head.get("ObjectLockLegalHoldStatus") == "ON":
        return Lock("it is under a legal hold", None)
    if isinstance(until, datetime) and until > utc_now():
        mode = head.get("ObjectLockMode", "Object Lock")
        return Lock(f"it is locked ({mode}) until {until:%Y-%m-%d %H:%M:%S} UTC", until)
    return Lock(reason, None)
