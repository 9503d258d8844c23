"""Large S3 objects: uploaded in parts, and made an object by one conditional request at the end.

A put is one answer and leaves nothing behind, so it is right for whatever can be sent again in a moment. A large
object that broke off near its end would all be sent again, at the speed of one connection. In parts only a part is
repeated and several are under way. The end of an upload takes the same `If-None-Match: *` as a put, and its lost
answer is settled by the same put id. An upload that fails is ended, so that its parts are not kept and paid for;
what a killed process leaves is found by `unfinished`. Source: Amazon S3 User Guide, "Uploading and copying objects
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

from storage.errors import SnapshotError
from storage.s3_failures import S3Failure, code_and_status, failure_of
from storage.s3_put import PUT_ID, Creation
from storage.s3_session import CLEAN_UP_SECONDS_MAX, PatientS3, wait_for
from storage.store import Leftovers, Unfinished

MULTIPART_BYTES_MIN = 64 * 2**20  # half a second of a gigabit: less is sent again as soon as it is sent in parts
PART_BYTES = 16 * 2**20
PARTS_MAX = 10_000
PARTS_AT_ONCE = 4  # besides the body, a create holds as many parts in memory
# A part that was under way may be stored after the end of its upload was accepted, and that begins it anew.
ENDS_MAX = 3


class Upload(NamedTuple):
    """An upload in parts that has begun."""

    bucket: str
    name: str
    upload_id: str

    @property
    def place(self) -> dict[str, str]:
        """Its address in S3's terms."""
        return {"Bucket": self.bucket, "Key": self.name, "UploadId": self.upload_id}


class _Underway:
    """The uploads of this process that have neither become objects nor been ended."""

    def __init__(self) -> None:
        self.uploads: dict[Upload, tuple[PatientS3, int]] = {}
        atexit.register(self.end_all)

    def end_all(self) -> None:
        """End what daemon threads leave at the process's exit. A forked child leaves alone what is its parent's."""
        for upload, (filesystem, process_id) in list(self.uploads.items()):
            if process_id == os.getpid():
                wait_for(filesystem, end_quietly(filesystem, upload))


UNDERWAY = _Underway()


async def create_in_parts(creation: Creation, body: bytes) -> None:
    """Create the object by an upload in parts; raises what ObjectStore.create does."""
    filesystem = creation.filesystem
    metadata = {PUT_ID: creation.put_id}
    try:
        began = await filesystem.request("create_multipart_upload", **creation.place, Metadata=metadata)
    except Exception as error:
        raise creation.nothing_stored(error) from error
    upload = Upload(creation.bucket, creation.name, began["UploadId"])
    UNDERWAY.uploads[upload] = (filesystem, os.getpid())
    try:
        parts = await _send_parts(filesystem, upload, body)
        await creation.decide(lambda: _complete(filesystem, upload, parts), 0)
    except BaseException as error:
        # Also after a lost answer: ending what has become an object changes nothing.
        await asyncio.shield(end_quietly(filesystem, upload))
        if isinstance(error, SnapshotError) or not isinstance(error, Exception):
            raise
        raise creation.nothing_stored(error) from error
    finally:
        del UNDERWAY.uploads[upload]


async def _send_parts(filesystem: PatientS3, upload: Upload, body: bytes) -> list[dict[str, object]]:
    """Send all parts, a few at once, each repeated by itself; return what completes them.

    After one has failed none is begun, and those under way have a moment to arrive: what comes after the end of the
    upload would be kept. Who is cancelled waits for none.
    """
    size = max(PART_BYTES, math.ceil(len(body) / PARTS_MAX))
    starts = iter(range(0, len(body), size)) if body else iter([0])
    view = memoryview(body)
    sent: dict[int, str] = {}

    async def send(starts: Iterator[int]) -> None:
        for start in starts:
            number = start // size + 1
            part = bytes(view[start : start + size])
            answer = await filesystem.request("upload_part", **upload.place, PartNumber=number, Body=part)
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
        "complete_multipart_upload", **upload.place, MultipartUpload={"Parts": parts}, IfNoneMatch="*"
    )


async def end_quietly(filesystem: PatientS3, upload: Upload) -> None:
    """End an upload if that can be done in a moment: why it has failed matters more."""
    with contextlib.suppress(Exception):  # `unfinished` finds it
        await asyncio.wait_for(end(filesystem, upload), CLEAN_UP_SECONDS_MAX)


async def end(filesystem: PatientS3, upload: Upload) -> None:
    """End an upload until the store knows no such one, ENDS_MAX times at most; no error if it has ended."""
    for _ in range(ENDS_MAX):
        try:
            await filesystem.request("abort_multipart_upload", **upload.place)
        except Exception as error:
            if failure_of(error) is not S3Failure.MISSING or code_and_status(error)[0] == "NoSuchBucket":
                raise
            return


async def unfinished(filesystem: PatientS3, root: str) -> Leftovers:
    """Return the uploads below `root` that have neither become objects nor been ended."""
    bucket, folder, _ = filesystem.split_path(root)
    prefix = f"{folder}/" if folder else ""
    found: Leftovers = []
    page: dict[str, Any] = {}
    while True:
        answer = await filesystem.request("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **page)
        for one in answer.get("Uploads", []):
            upload = Upload(bucket, one["Key"], one["UploadId"])
            size, last = await _size_and_last(filesystem, upload)
            began_at = max(utc(one["Initiated"]), last or utc(one["Initiated"]))
            found.append(Unfinished(upload.name.removeprefix(prefix), upload.upload_id, size, began_at))
        if not answer.get("IsTruncated"):
            return sorted(found)
        page = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}


async def _size_and_last(filesystem: PatientS3, upload: Upload) -> tuple[int, datetime | None]:
    """Return the bytes of an upload's parts, and when the last came; nothing if it has ended since."""
    size, last = 0, None
    page: dict[str, Any] = {}
    while True:
        try:
            answer = await filesystem.request("list_parts", **upload.place, **page)
        except Exception as error:
            if failure_of(error) is S3Failure.MISSING:
                return size, last
            raise
        for part in answer.get("Parts", []):
            size += int(part["Size"])
            came = utc(part["LastModified"])
            last = max(last or came, came)
        if not answer.get("IsTruncated"):
            return size, last
        page = {"PartNumberMarker": answer["NextPartNumberMarker"]}


def utc(when: datetime) -> datetime:
    """Return the same moment in UTC."""
    return when.astimezone(UTC)
