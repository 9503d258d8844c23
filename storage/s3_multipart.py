"""Create large S3 objects by multipart upload, which one conditional request completes.

A put is a single request and leaves nothing behind, so it suits objects that can be sent again in a moment. If the put
of a large object breaks near its end, everything must be sent again, over one connection. In an upload in parts only a
part is repeated, and several are sent at once. Completing the upload takes the same `If-None-Match: *` as a put, and a
lost answer is resolved by the same put id. An upload that fails is aborted, so that its parts are not kept and paid
for; `unfinished` finds those that a killed process left. Source: Amazon S3 User Guide, "Uploading and copying objects
using multipart upload".
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

from cutline.storage.errors import SnapshotError
from cutline.storage.s3_failures import S3Failure, code_and_status, failure_of
from cutline.storage.s3_put import PUT_ID, Creation
from cutline.storage.s3_session import CLEAN_UP_SECONDS_MAX, PatientS3, wait_for
from cutline.storage.store import Leftovers, Unfinished

MULTIPART_BYTES_MIN = 64 * 2**20  # half a second at 1 Gbit/s: sending less again costs no more than parts do
PART_BYTES = 16 * 2**20
PARTS_MAX = 10_000
PARTS_AT_ONCE = 4  # a create holds this many parts in memory besides the body
# A part in flight may be stored after the abort was accepted, which revives the upload.
ABORTS_MAX = 3


class Upload(NamedTuple):
    """An upload in parts that has begun."""

    bucket: str
    name: str
    upload_id: str

    @property
    def address(self) -> dict[str, str]:
        """Its address, as parameters of an S3 request."""
        return {"Bucket": self.bucket, "Key": self.name, "UploadId": self.upload_id}


class _Underway:
    """The uploads of this process that are neither completed nor aborted."""

    def __init__(self) -> None:
        self.uploads: dict[Upload, tuple[PatientS3, int]] = {}
        atexit.register(self.abort_all)

    def abort_all(self) -> None:
        """Abort the uploads that daemon threads leave when the process exits, but not a parent process's."""
        for upload, (filesystem, process_id) in list(self.uploads.items()):
            if process_id == os.getpid():
                wait_for(filesystem, try_abort(filesystem, upload))


UNDERWAY = _Underway()


async def create_in_parts(creation: Creation, body: bytes) -> None:
    """Create the object by an upload in parts; raise what ObjectStore.create does."""
    filesystem = creation.filesystem
    metadata = {PUT_ID: creation.put_id}
    try:
        began = await filesystem.request("create_multipart_upload", **creation.address, Metadata=metadata)
    except Exception as error:
        raise creation.not_stored_error(error) from error
    upload = Upload(creation.bucket, creation.name, began["UploadId"])
    UNDERWAY.uploads[upload] = (filesystem, os.getpid())
    try:
        parts = await _send_parts(filesystem, upload, body)
        await creation.decide(lambda: _complete(filesystem, upload, parts), 0)
        await creation.verify_encryption("parts", began)
    except BaseException as error:
        # Also after a lost answer: aborting a completed upload changes nothing.
        await asyncio.shield(try_abort(filesystem, upload))
        if isinstance(error, SnapshotError) or not isinstance(error, Exception):
            raise
        raise creation.not_stored_error(error) from error
    finally:
        del UNDERWAY.uploads[upload]


async def _send_parts(filesystem: PatientS3, upload: Upload, body: bytes) -> list[dict[str, object]]:
    """Send all parts, PARTS_AT_ONCE in parallel, each with its own retries; return the list that completes the upload.

    After a part failed, no other is begun, and those in flight have CLEAN_UP_SECONDS_MAX to arrive: a part that arrives
    after the abort would be kept. On cancellation, don't wait for the parts.
    """
    size = max(PART_BYTES, math.ceil(len(body) / PARTS_MAX))
    starts = iter(range(0, len(body), size)) if body else iter([0])
    view = memoryview(body)
    sent: dict[int, str] = {}

    async def send(starts: Iterator[int]) -> None:
        for start in starts:
            number = start // size + 1
            part = bytes(view[start : start + size])
            answer = await filesystem.request("upload_part", **upload.address, PartNumber=number, Body=part)
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


async def _complete(filesystem: PatientS3, upload: Upload, parts: list[dict[str, object]]) -> None:
    await filesystem.send(
        "complete_multipart_upload", **upload.address, MultipartUpload={"Parts": parts}, IfNoneMatch="*"
    )


async def try_abort(filesystem: PatientS3, upload: Upload) -> None:
    """Abort an upload within CLEAN_UP_SECONDS_MAX, ignoring errors: why the upload failed matters more."""
    with contextlib.suppress(Exception):  # `unfinished` finds it
        await asyncio.wait_for(abort_upload(filesystem, upload), CLEAN_UP_SECONDS_MAX)


async def abort_upload(filesystem: PatientS3, upload: Upload) -> None:
    """Abort an upload until the store no longer has it, at most ABORTS_MAX times; no error if it does not exist."""
    for _ in range(ABORTS_MAX):
        try:
            await filesystem.request("abort_multipart_upload", **upload.address)
        except Exception as error:
            if failure_of(error) is not S3Failure.MISSING or code_and_status(error)[0] == "NoSuchBucket":
                raise
            return


async def unfinished(filesystem: PatientS3, root: str) -> Leftovers:
    """Return the uploads below `root` that are neither completed nor aborted."""
    bucket, folder, _ = filesystem.split_path(root)
    prefix = f"{folder}/" if folder else ""
    leftovers: Leftovers = []
    page: dict[str, Any] = {}
    while True:
        answer = await filesystem.request("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **page)
        for one in answer.get("Uploads", []):
            upload = Upload(bucket, one["Key"], one["UploadId"])
            size, last = await _size_and_last(filesystem, upload)
            began_at = max(utc(one["Initiated"]), last or utc(one["Initiated"]))
            leftovers.append(Unfinished(upload.name.removeprefix(prefix), upload.upload_id, size, began_at))
        if not answer.get("IsTruncated"):
            return sorted(leftovers)
        page = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}


async def _size_and_last(filesystem: PatientS3, upload: Upload) -> tuple[int, datetime | None]:
    """Return the bytes of an upload's parts, and when the last one arrived; stop if the upload no longer exists."""
    size, last = 0, None
    page: dict[str, Any] = {}
    while True:
        try:
            answer = await filesystem.request("list_parts", **upload.address, **page)
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
