"""Create an S3 object exactly once: by a conditional put or, if it is large, by a conditional multipart upload.

Both are retried until the result is known. Each create stores an id in the object's metadata, which makes retries safe:
if an answer was lost and the retry finds the key taken, the id shows whether this create took it. Source: Amazon S3
User Guide, "Add preconditions to S3 operations".

A put is a single request and leaves nothing behind, so it suits objects that can be sent again in a moment. If the put
of a large object breaks off near the end, the whole object must be sent again, over one connection. A multipart upload
repeats only the broken part, and sends several parts in parallel. Completing the upload takes the same
`If-None-Match: *` as a put. A failed upload is aborted, so that its parts are not kept and billed; `unfinished` finds
the uploads of killed processes. Source: "Uploading and copying objects using multipart upload", ibid.

Every put and every request that starts a multipart upload specifies the encryption that the server must use
(`s3_additional_kwargs` of s3fs). Some servers ignore it. So the first object that a process creates in each way is
verified after it is stored: from the server's answer, or else from the object's metadata. A process's first put is
never a commit, but its first multipart upload may be a commit. That commit is valid even if the server did not encrypt
it (snapshots/operations/committing.py). Source: "Specifying server-side encryption with AWS KMS", ibid.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import os
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct, field

from cutline.storage.errors import SnapshotError
from cutline.storage.s3_client import CLEAN_UP_SECONDS_MAX, S3Client, wait_for
from cutline.storage.s3_failures import S3Failure, code_and_status, failure_of, fault_of, reason_of
from cutline.storage.store import (
    AnswerLostError,
    EncryptionIgnoredError,
    Leftovers,
    ObjectExistsError,
    StoreUnfitError,
    Unfinished,
    WritingRefusedError,
)

PUT_ID = "cutline-put"
# The encryption and its key, in the parameters of a put and in its answer.
ENCRYPTION, KMS_KEY = "ServerSideEncryption", "SSEKMSKeyId"
MULTIPART_BYTES_MIN = 64 * 2**20  # half a second at 1 Gbit/s: resending less costs no more than a multipart upload
PART_BYTES = 16 * 2**20
PARTS_MAX = 10_000
PARTS_AT_ONCE = 4  # a create holds copies of this many parts in memory
# A part in flight may be stored after the abort was accepted, which revives the upload.
ABORTS_MAX = 3

T = TypeVar("T")


class Creation(Struct, frozen=True):
    """One create of a key; `address` is the object's address as S3 parameters, `put_id` a unique id."""

    client: S3Client
    url: str
    key: str
    address: Mapping[str, str]
    put_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    async def put(self, body: bytes) -> None:
        """Create the object by a single put; raise the errors of ObjectStore.create."""
        metadata = {PUT_ID: self.put_id}
        answer = await self.decide(lambda: self._send(body, metadata), len(body))
        await self.verify_encryption("put", answer)

    async def verify_encryption(self, by: str, answer: Mapping[str, Any] | None) -> None:
        """Raise EncryptionIgnoredError if the first object created `by` put or parts is not encrypted as requested."""
        asked = self.client.s3fs.s3_additional_kwargs
        if not is_told(asked) or by in self.client.encrypts:
            return
        try:
            told = answer if is_told(answer) else await self.client.request("head_object", **self.address)
        except Exception as error:
            raise AnswerLostError(url=self.url, key=self.key, reason=reason_of(error)) from error
        check_encryption(self.url, self.key, asked, told or {})
        self.client.encrypts.add(by)

    async def decide(self, store: Callable[[], Awaitable[T]], size_bytes: int) -> T | None:
        """Retry `store`, a conditional request that creates the object, until its result is known.

        Returns the server's answer, or None if it was lost. Raises ObjectExistsError or AnswerLostError; if it is
        certain that nothing was stored, StoreUnreachableError or StoreUnfitError.
        """
        tries = self.client.tries(size_bytes)
        may_be_stored = False
        while True:
            try:
                answer = await store()
            except Exception as error:  # noqa: BLE001  # every error is classified, unforeseen errors as UNKNOWN
                cause, failure = error, failure_of(error)
            else:
                tries.worked()
                return answer
            # If an earlier answer was lost, a missing upload was completed or aborted.
            if failure is S3Failure.TAKEN or (failure is S3Failure.MISSING and may_be_stored):
                # The store answers again.
                tries.worked()
                await self._settle()
                return None
            may_be_stored = may_be_stored or failure is S3Failure.UNKNOWN
            if not await tries.again(cause):
                break
        if may_be_stored:
            raise AnswerLostError(url=self.url, key=self.key, reason=reason_of(cause)) from cause
        raise self.not_stored_error(cause) from cause

    def not_stored_error(self, cause: Exception) -> SnapshotError:
        """Return the error for a failure that certainly stored nothing."""
        if failure_of(cause) is S3Failure.NOT_IMPLEMENTED:
            return StoreUnfitError(url=self.url, lack="it does not implement conditional puts")
        fault = fault_of(cause)
        if fault.is_forbidden:
            return WritingRefusedError(url=self.url, reason=fault.reason)
        return fault.unreachable(self.url)

    async def _send(self, body: bytes, metadata: dict[str, str]) -> Any:
        return await self.client.send("put_object", **self.address, Body=body, IfNoneMatch="*", Metadata=metadata)

    async def _settle(self) -> None:
        """Return if an earlier attempt by this create took the key; else raise ObjectExistsError or AnswerLostError."""
        try:
            head = await self.client.request("head_object", **self.address)
        except Exception as error:
            raise AnswerLostError(url=self.url, key=self.key, reason=reason_of(error)) from error
        if head.get("Metadata", {}).get(PUT_ID) != self.put_id:
            raise ObjectExistsError(url=self.url, key=self.key)


def is_told(answer: Mapping[str, Any] | None) -> bool:
    """Whether the server's answer says how the object is encrypted."""
    return bool(answer and answer.get(ENCRYPTION))


def check_encryption(url: str, key: str, asked: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    """Raise EncryptionIgnoredError unless the server's answer `told` shows object `key` to be encrypted as `asked`."""
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
    """Whether the server used the requested key; also true if that can't be known, as with an alias."""
    is_alias = asked.startswith("alias/") or ":alias/" in asked
    return not asked or not told or is_alias or told.rpartition("/")[2] == asked.rpartition("/")[2]


class Upload(NamedTuple):
    """A multipart upload that has started."""

    bucket: str
    name: str
    upload_id: str

    @property
    def address(self) -> dict[str, str]:
        """The upload's address as S3 parameters."""
        return {"Bucket": self.bucket, "Key": self.name, "UploadId": self.upload_id}


class _Underway:
    """The uploads of this process that are neither completed nor aborted."""

    def __init__(self) -> None:
        self.uploads: dict[Upload, tuple[S3Client, int]] = {}
        atexit.register(self.abort_all)

    def abort_all(self) -> None:
        """At exit, abort the uploads that this process's daemon threads left behind, not those of a parent process."""
        for upload, (client, process_id) in list(self.uploads.items()):
            if process_id == os.getpid():
                wait_for(client, try_abort(client, upload))


UNDERWAY = _Underway()


async def create_in_parts(creation: Creation, body: bytes) -> None:
    """Create the object by a multipart upload; raise the errors of ObjectStore.create."""
    client = creation.client
    metadata = {PUT_ID: creation.put_id}
    try:
        began = await client.request("create_multipart_upload", **creation.address, Metadata=metadata)
    except Exception as error:
        raise creation.not_stored_error(error) from error
    upload = Upload(creation.address["Bucket"], creation.address["Key"], began["UploadId"])
    UNDERWAY.uploads[upload] = (client, os.getpid())
    try:
        parts = await _send_parts(client, upload, body)
        await creation.decide(lambda: _complete(client, upload, parts), 0)
        await creation.verify_encryption("parts", began)
    except BaseException as error:
        # Abort the upload even after a lost answer: aborting a completed upload changes nothing.
        await asyncio.shield(try_abort(client, upload))
        if isinstance(error, SnapshotError) or not isinstance(error, Exception):
            raise
        raise creation.not_stored_error(error) from error
    finally:
        del UNDERWAY.uploads[upload]


async def _send_parts(client: S3Client, upload: Upload, body: bytes) -> list[dict[str, object]]:
    """Send all parts, PARTS_AT_ONCE in parallel, each with its own retries; return the list that completes the upload.

    After a part has failed, no further part is sent, and parts in flight get CLEAN_UP_SECONDS_MAX to arrive: a part
    that arrived after the abort would be kept. On cancellation, this does not wait for the parts.
    """
    size = max(PART_BYTES, math.ceil(len(body) / PARTS_MAX))
    starts = iter(range(0, len(body), size)) if body else iter([0])
    view = memoryview(body)
    sent: dict[int, str] = {}

    async def send(starts: Iterator[int]) -> None:
        for start in starts:
            number = start // size + 1
            part = bytes(view[start : start + size])
            answer = await client.request("upload_part", **upload.address, PartNumber=number, Body=part)
            sent[number] = answer["ETag"]

    senders = [asyncio.create_task(send(starts)) for _ in range(PARTS_AT_ONCE)]
    try:
        await asyncio.gather(*senders)
    except Exception:
        for _ in starts:
            pass
        await asyncio.wait(senders, timeout=CLEAN_UP_SECONDS_MAX)
        raise
    finally:
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
    return [{"PartNumber": number, "ETag": sent[number]} for number in sorted(sent)]


async def _complete(client: S3Client, upload: Upload, parts: list[dict[str, object]]) -> None:
    await client.send("complete_multipart_upload", **upload.address, MultipartUpload={"Parts": parts}, IfNoneMatch="*")


async def try_abort(client: S3Client, upload: Upload) -> None:
    """Abort an upload within CLEAN_UP_SECONDS_MAX, ignoring errors: the upload's own error matters more."""
    with contextlib.suppress(Exception):  # `unfinished` finds the upload
        await asyncio.wait_for(abort_upload(client, upload), CLEAN_UP_SECONDS_MAX)


async def abort_upload(client: S3Client, upload: Upload) -> None:
    """Abort an upload, up to ABORTS_MAX times, until the store no longer has it; ignore a missing upload."""
    for _ in range(ABORTS_MAX):
        try:
            await client.request("abort_multipart_upload", **upload.address)
        except Exception as error:
            if failure_of(error) is not S3Failure.MISSING or code_and_status(error)[0] == "NoSuchBucket":
                raise
            return


async def unfinished(client: S3Client, bucket: str, prefix: str) -> Leftovers:
    """Return the uploads that are neither completed nor aborted and whose keys begin with `prefix`."""
    leftovers: Leftovers = []
    page: dict[str, Any] = {}
    while True:
        answer = await client.request("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **page)
        for entry in answer.get("Uploads", []):
            upload = Upload(bucket, entry["Key"], entry["UploadId"])
            size, last = await _size_and_last(client, upload)
            began_at = max(utc(entry["Initiated"]), last or utc(entry["Initiated"]))
            leftovers.append(Unfinished(upload.name.removeprefix(prefix), upload.upload_id, size, began_at))
        if not answer.get("IsTruncated"):
            return sorted(leftovers)
        page = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}


async def _size_and_last(client: S3Client, upload: Upload) -> tuple[int, datetime | None]:
    """Return the total size of an upload's parts and the time of the last part; stop if the upload no longer exists."""
    size, last = 0, None
    page: dict[str, Any] = {}
    while True:
        try:
            answer = await client.request("list_parts", **upload.address, **page)
        except Exception as error:
            if failure_of(error) is S3Failure.MISSING:
                return size, last
            raise
        for part in answer.get("Parts", []):
            size += int(part["Size"])
            arrived = utc(part["LastModified"])
            last = max(last or arrived, arrived)
        if not answer.get("IsTruncated"):
            return size, last
        page = {"PartNumberMarker": answer["NextPartNumberMarker"]}


def utc(when: datetime) -> datetime:
    """Return the same time in UTC."""
    return when.astimezone(UTC)
