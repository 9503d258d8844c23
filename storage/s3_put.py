"""Create an S3 object exactly once: a conditional put, retried until its result is known.

Each put stores an id in the object's metadata, which makes retries safe: if a put whose answer was lost is retried and
the key is taken, the id shows whether that put took it. Source: Amazon S3 User Guide, "Add preconditions to S3
operations".

The way in which the server has to encrypt is sent with every put and with the beginning of every upload in parts
(`s3_additional_kwargs` of s3fs). Some servers ignore it. So the first object that a process creates in each way is
verified once it is stored: by the answer, or if that does not tell, by asking for the object's metadata. The first put
of a process is no commit, but its first upload in parts may be one: then the commit counts, although the server does
not encrypt it (snapshots/operations/committing.py). Source: "Specifying server-side encryption with AWS KMS", ibid.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from cutline.storage.errors import SnapshotError
from cutline.storage.s3_failures import S3Failure, failure_of, fault_of, reason_of
from cutline.storage.s3_session import PatientS3
from cutline.storage.store import (
    AnswerLostError,
    EncryptionIgnoredError,
    ObjectExistsError,
    StoreUnfitError,
    WritingRefusedError,
)

PUT_ID = "cutline-put"
# How the server has to encrypt, and with which key: parameters of a put, and in the answer.
ENCRYPTION, KMS_KEY = "ServerSideEncryption", "SSEKMSKeyId"
T = TypeVar("T")


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
        answer = await self.decide(lambda: self._send(body, metadata), len(body))
        await self.verify_encryption("put", answer)

    async def verify_encryption(self, by: str, answer: Mapping[str, Any] | None) -> None:
        """Raise EncryptionIgnoredError unless the first object created `by` put or parts is encrypted as asked."""
        asked = self.filesystem.s3_additional_kwargs
        if not is_told(asked) or by in self.filesystem.encrypts:
            return
        try:
            told = answer if is_told(answer) else await self.filesystem.request("head_object", **self.address)
        except Exception as error:
            raise AnswerLostError(url=self.url, key=self.key, reason=reason_of(error)) from error
        check_encryption(self.url, self.key, asked, told or {})
        self.filesystem.encrypts.add(by)

    async def decide(self, store: Callable[[], Awaitable[T]], size_bytes: int) -> T | None:
        """Retry `store`, a conditional request that creates the object, until its result is known.

        Returns the server's answer, None if it was lost. Raises ObjectExistsError, AnswerLostError, or, if certainly
        nothing was stored, StoreUnreachableError or StoreUnfitError.
        """
        tries = self.filesystem.tries(size_bytes)
        may_be_stored = False
        while True:
            try:
                answer = await store()
            except Exception as error:  # noqa: BLE001  # every error is classified, an unforeseen one as UNKNOWN
                cause, failure = error, failure_of(error)
            else:
                tries.worked()
                return answer
            # If an answer was lost, a missing upload has been completed or aborted.
            if failure is S3Failure.TAKEN or (failure is S3Failure.MISSING and may_be_stored):
                await self._settle()
                return None
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


def is_told(answer: Mapping[str, Any] | None) -> bool:
    """Whether the server's answer says how the object is encrypted."""
    return bool(answer and answer.get(ENCRYPTION))


def check_encryption(url: str, key: str, asked: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    """Raise EncryptionIgnoredError unless object `key` is encrypted as `asked`, by what the server `told` about it."""
    key_used, key_asked = str(told.get(KMS_KEY) or ""), str(asked.get(KMS_KEY) or "")
    if told.get(ENCRYPTION) == asked[ENCRYPTION] and is_same_key(key_asked, key_used):
        return
    found = (
        f"with {told[ENCRYPTION]}" + (f" and the key {key_used}" if key_used else "")
        if is_told(told)
        else "unencrypted"
    )
    wanted = f"{asked[ENCRYPTION]}" + (f" and the key {key_asked}" if key_asked else "")
    raise EncryptionIgnoredError(url=url, key=key, asked=wanted, found=found)


def is_same_key(asked: str, told: str) -> bool:
    """Whether the key that the server names is the one asked for, as far as that can be seen: not for an alias."""
    is_alias = asked.startswith("alias/") or ":alias/" in asked
    return not asked or not told or is_alias or told.rpartition("/")[2] == asked.rpartition("/")[2]
