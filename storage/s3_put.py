"""Create an S3 object exactly once: a conditional put, retried until its result is known.

Each put stores an id in the object's metadata, which makes retries safe: if a put whose answer was lost is retried and
the key is taken, the id shows whether that put took it. Source: Amazon S3 User Guide, "Add preconditions to S3
operations".
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
    """One create of one key; `put_id` is unique to it."""

    filesystem: PatientS3
    url: str
    key: str
    bucket: str
    name: str
    put_id: str

    @property
    def address(self) -> dict[str, str]:
        """The object's address, as parameters of an S3 request."""
        return {"Bucket": self.bucket, "Key": self.name}

    async def put(self, body: bytes) -> None:
        """Create the object by one put; raise what ObjectStore.create does."""
        metadata = {PUT_ID: self.put_id}
        await self.decide(lambda: self._send(body, metadata), len(body))

    async def decide(self, store: Callable[[], Awaitable[object]], size_bytes: int) -> None:
        """Retry `store`, a conditional request that creates the object, until its result is known.

        Raises ObjectExistsError, AnswerLostError, or, if certainly nothing was stored, StoreUnreachableError or
        StoreUnfitError.
        """
        tries = self.filesystem.tries(size_bytes)
        may_be_stored = False
        while True:
            try:
                await store()
            except Exception as error:  # noqa: BLE001  # every error is classified, an unforeseen one as UNKNOWN
                cause, failure = error, failure_of(error)
            else:
                return
            # If an answer was lost, a missing upload has been completed or aborted.
            if failure is S3Failure.TAKEN or (failure is S3Failure.MISSING and may_be_stored):
                await self._settle()
                return
            may_be_stored = may_be_stored or failure is S3Failure.UNKNOWN
            if not await tries.again(cause):
                break
        if may_be_stored:
            raise AnswerLostError(url=self.url, key=self.key, reason=reason_of(cause)) from cause
        raise self.not_stored_error(cause) from cause

    def not_stored_error(self, cause: Exception) -> SnapshotError:
        """Return the error for a failure after which certainly nothing is stored."""
        if failure_of(cause) is S3Failure.NOT_IMPLEMENTED:
            return StoreUnfitError(url=self.url, lack="it does not implement conditional puts")
        fault = fault_of(cause)
        if fault.is_forbidden:
            return WritingRefusedError(url=self.url, reason=fault.reason)
        return fault.unreachable(self.url)

    async def _send(self, body: bytes, metadata: dict[str, str]) -> Any:
        return await self.filesystem.send("put_object", **self.address, Body=body, IfNoneMatch="*", Metadata=metadata)

    async def _settle(self) -> None:
        """Return if an earlier attempt of this create took the key; else raise ObjectExistsError or AnswerLostError."""
        try:
            head = await self.filesystem.request("head_object", **self.address)
        except Exception as error:
            raise AnswerLostError(url=self.url, key=self.key, reason=reason_of(error)) from error
        if head.get("Metadata", {}).get(PUT_ID) != self.put_id:
            raise ObjectExistsError(url=self.url, key=self.key)
