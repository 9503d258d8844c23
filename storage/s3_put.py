"""Creating an S3 object once: the conditional put, repeated until it is known what became of it.

Each put carries an id in the object's metadata. That makes repeating it safe: when a put whose answer was lost is
repeated and finds the key taken, the id says whether by itself. Source: Amazon S3 User Guide, "Add preconditions to
S3 operations".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from storage.errors import SnapshotError
from storage.s3_failures import S3Failure, failure_of, fault_of, reason_of
from storage.s3_session import PatientS3
from storage.store import AnswerLostError, ObjectExistsError, StoreUnfitError, WritingRefusedError

PUT_ID = "cutline-put"


@dataclass(frozen=True, slots=True)
class Creation:
    """One create of one key; `put_id` is its own, and never used again."""

    filesystem: PatientS3
    url: str
    key: str
    bucket: str
    name: str
    put_id: str

    @property
    def place(self) -> dict[str, str]:
        """The object's address in S3's terms."""
        return {"Bucket": self.bucket, "Key": self.name}

    async def put(self, body: bytes) -> None:
        """Create the object by one put; raises what ObjectStore.create does."""
        metadata = {PUT_ID: self.put_id}
        await self.decide(lambda: self._send(body, metadata), len(body))

    async def decide(self, store: Callable[[], Awaitable[object]], size_bytes: int) -> None:
        """Repeat `store`, a conditional request that makes the object, until what became of it is known.

        Raises ObjectExistsError, AnswerLostError, and StoreUnreachableError or StoreUnfitError where it is certain
        that nothing was stored.
        """
        tries = self.filesystem.tries(size_bytes)
        may_be_stored = False
        while True:
            try:
                await store()
            except Exception as error:  # noqa: BLE001  # each becomes a failure, an unforeseen one UNKNOWN
                cause, failure = error, failure_of(error)
            else:
                return
            # An upload whose completion got no answer is gone because it was completed, or because it was ended.
            if failure is S3Failure.TAKEN or (failure is S3Failure.MISSING and may_be_stored):
                await self._settle()
                return
            may_be_stored = may_be_stored or failure is S3Failure.UNKNOWN
            if not await tries.again(cause):
                break
        if may_be_stored:
            raise AnswerLostError(url=self.url, key=self.key, reason=reason_of(cause)) from cause
        raise self.nothing_stored(cause) from cause

    def nothing_stored(self, cause: Exception) -> SnapshotError:
        """Return the error for a failure after which it is certain that nothing was stored."""
        if failure_of(cause) is S3Failure.NOT_IMPLEMENTED:
            return StoreUnfitError(url=self.url, lack="conditional puts are not implemented")
        fault = fault_of(cause)
        if fault.is_forbidden:
            return WritingRefusedError(url=self.url, reason=fault.reason)
        return fault.unreachable(self.url)

    async def _send(self, body: bytes, metadata: dict[str, str]) -> Any:
        return await self.filesystem.send("put_object", **self.place, Body=body, IfNoneMatch="*", Metadata=metadata)

    async def _settle(self) -> None:
        """Return if the key was taken by an earlier attempt of this very create, else raise."""
        try:
            head = await self.filesystem.request("head_object", **self.place)
        except Exception as error:
            raise AnswerLostError(url=self.url, key=self.key, reason=reason_of(error)) from error
        if head.get("Metadata", {}).get(PUT_ID) != self.put_id:
            raise ObjectExistsError(url=self.url, key=self.key)
