"""Deleting from buckets that keep versions, and from those with Object Lock: an object is gone when its versions are.

Where a bucket has versions a plain deletion only puts a marker before them: the object is hidden, and all of its bytes
are kept and paid for. So the versions are deleted themselves, the oldest first and markers last: at every moment the
key shows what it showed before, or nothing, and never an earlier version. A version that a lock keeps ends it, before
anything newer was touched. Source: Amazon S3 User Guide, "Deleting object versions from a versioning-enabled bucket"
and "Locking objects with Object Lock".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from storage.fsspec_store import FsspecStore
from storage.s3_failures import code_and_status
from storage.store import DeletionRefusedError

# The id of what was stored while the bucket kept no versions.
NULL = "null"
# What servers answer that have no versions, or to those who may not list them.
UNLISTED_STATUSES = (400, 403, 405, 501)
# What they answer where a policy or a lock keeps an object; MinIO says InvalidRequest of a lock.
REFUSALS = {"AccessDenied", "InvalidRequest", "MethodNotAllowed", "ObjectLocked"}


@dataclass(frozen=True, slots=True)
class Version:
    """One thing that a bucket keeps under a key; a marker is no object, but hides those before it."""

    id: str
    is_marker: bool


@dataclass(frozen=True, slots=True)
class VersionedDeletion:
    """The deletion of one object."""

    store: FsspecStore
    key: str
    bucket: str
    name: str

    def run(self) -> None:
        """Remove all that the bucket keeps under the key; raises DeletionRefusedError, and s3fs's errors."""
        try:
            found = list(self._versions())
        except Exception as error:
            if code_and_status(error)[1] not in UNLISTED_STATUSES:
                raise
            self._delete_unlisted(error)
            return
        if not found:
            # A listing may be late, what is asked for by key is not.
            found = self._current()
        if found == [Version(NULL, is_marker=False)]:
            marker = self._delete_plainly()
            if marker is None:
                return
            # The bucket has begun, or had begun and ended, to keep versions since the object was stored.
            self._delete_all(list(self._versions()), marker)
        else:
            self._delete_all(found)

    def _delete_all(self, found: list[Version], made: str = "") -> None:
        """Delete `found`; the marker `made` is ours, and goes where the object stays."""
        for version in sorted(found, key=lambda one: one.is_marker):
            try:
                self._call("delete_object", VersionId=version.id)
            except Exception as error:
                if made and self._is_refusal(error):
                    self._call("delete_object", VersionId=made)
                self._raise_refused(error, version.id)
                raise

    def _delete_unlisted(self, why: Exception) -> None:
        """Delete where versions can't be listed; refuse where there are any, for a marker would only hide them."""
        for current in self._current():
            marker = None if current.id != NULL else self._delete_plainly()
            if marker is not None:
                self._call("delete_object", VersionId=marker)
            if current.id != NULL or marker is not None:
                reason = f"its bucket keeps versions, and to list them {self.store.dialect.explain(why).reason}"
                raise DeletionRefusedError(url=self.store.url, key=self.key, reason=reason) from why

    def _delete_plainly(self) -> str | None:
        """Delete as where there are no versions; the id of the marker that was put there, if one was."""
        try:
            answer = self._call("delete_object")
        except Exception as error:
            self._raise_refused(error)
            raise
        return str(answer["VersionId"]) if answer.get("DeleteMarker") and answer.get("VersionId") else None

    def _current(self) -> list[Version]:
        """What the key shows: one version, or none."""
        try:
            return [Version(self._call("head_object").get("VersionId") or NULL, is_marker=False)]
        except Exception as error:
            if self.store.dialect.explain(error).is_missing:
                return []
            raise

    def _versions(self) -> Iterator[Version]:
        """Yield what the bucket keeps under the key: markers, and versions with the oldest first."""
        found: list[Version] = []
        page: dict[str, Any] = {}
        while True:
            # Other keys that begin like this one come after it.
            place = {"Bucket": self.bucket, "Prefix": self.name}
            answer = self.store.filesystem.call_s3("list_object_versions", **place, **page)
            for kind, is_marker in (("Versions", False), ("DeleteMarkers", True)):
                found += [
                    Version(one["VersionId"], is_marker) for one in answer.get(kind, []) if one["Key"] == self.name
                ]
            if not answer.get("IsTruncated") or answer.get("NextKeyMarker") != self.name:
                break
            page = {"KeyMarker": self.name, "VersionIdMarker": answer.get("NextVersionIdMarker", "")}
        return reversed(found)

    def _raise_refused(self, error: Exception, version: str = "") -> None:
        """Raise DeletionRefusedError if that is what the server says, with what it tells about the lock."""
        if not self._is_refusal(error):
            return
        reason, until = self.store.dialect.explain(error).reason, None
        if version:
            # Who may delete need not be allowed to ask.
            with suppress(Exception):
                reason, until = lock_of(self._call("head_object", VersionId=version), reason)
        raise DeletionRefusedError(url=self.store.url, key=self.key, reason=reason, until=until) from error

    def _is_refusal(self, error: Exception) -> bool:
        return code_and_status(error)[0] in REFUSALS

    def _call(self, method: str, **parameters: str) -> Any:
        return self.store.filesystem.call_s3(method, Bucket=self.bucket, Key=self.name, **parameters)


def lock_of(head: dict[str, Any], reason: str) -> tuple[str, datetime | None]:
    """Say what locks a version, by the answer to its HEAD, and until when; `reason` where nothing does."""
    until = head.get("ObjectLockRetainUntilDate")
    if head.get("ObjectLockLegalHoldStatus") == "ON":
        return "a legal hold is on it", None
    if isinstance(until, datetime) and until > datetime.now(UTC):
        return f"it is locked ({head.get('ObjectLockMode', 'Object Lock')}) until {until:%Y-%m-%d %H:%M:%S} UTC", until
    return reason, None


def delete_versions(store: FsspecStore, key: str) -> None:
    """Do what ObjectStore.delete promises."""
    bucket, name, _ = store.filesystem.split_path(store.path(key))
    VersionedDeletion(store, key, bucket, name).run()
