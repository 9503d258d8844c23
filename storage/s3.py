"""Amazon S3 and what speaks its protocol, through s3fs: the conditional put and the meaning of failures.

A create is one PutObject with `If-None-Match: *`, never a multipart upload: its answer is one answer, and
a process that dies leaves no parts behind to be paid for. Each put carries an id in the object's metadata.
That makes repeating it safe: when a put whose answer was lost is repeated and finds the key taken, the id
says whether by itself. Source: Amazon S3 User Guide, "Add preconditions to S3 operations".
"""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from aiobotocore.httpsession import AIOHTTPSession  # type: ignore[import-untyped]
from aiohttp import ClientConnectorError
from botocore.exceptions import (  # type: ignore[import-untyped]
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    NoCredentialsError,
    ProxyConnectionError,
    ReadTimeoutError,
    SSLError,
)

from storage.errors import RefusedError
from storage.fsspec_store import Fault, FsspecStore
from storage.store import AnswerLostError, ObjectExistsError, StoreUnfitError, StoreUnreachableError

PUT_BYTES_MAX = 5 * 2**30 - 1  # from 5 GiB on s3fs goes over to a multipart upload
PUT_ID = "cutline-put"
PUT_ATTEMPTS = 3
PUT_PAUSE_SECONDS = 0.3
READ_ATTEMPTS = 3
CONNECT_SECONDS_MAX = 5
ANSWER_SECONDS_MAX = 30
SENT_BYTES_PER_SECOND_MIN = 256 * 2**10  # a put slower than that is given up

NOTHING_SENT = (ConnectTimeoutError, EndpointConnectionError, ProxyConnectionError, SSLError)
STATUS_MISSING, STATUS_CONFLICT, STATUS_TAKEN, STATUS_BEYOND_END, STATUS_NOT_IMPLEMENTED = (
    404,
    409,
    412,
    416,
    501,
)
# Answers that say no for now: the request was not carried out, and the same request may be later.
NOT_NOW = {"ConditionalRequestConflict", "OperationAborted", "RequestTimeout", "SlowDown", "TooManyRequests"}


class ObjectTooLargeError(RefusedError):
    """The body is larger than what S3 stores in one put."""

    def __init__(self, *, url: str, key: str, size_bytes: int) -> None:
        super().__init__(
            f"store {url}: object {key} has {size_bytes} bytes, more than one put can hold ({PUT_BYTES_MAX})",
            hint="this is a bug: objects are cut into pieces long before; please report it",
            details={"store": url, "object": key, "bytes": size_bytes},
        )


class OneSendSession(AIOHTTPSession):  # type: ignore[misc]  # aiobotocore has no types
    """An HTTP session that sends a request once, in bounded time, and tells a broken connection from none.

    aiohttp silently repeats a PUT whose connection broke, and a repeated conditional put would be told that
    the key is taken: by the first. It has no public switch for that. Its read time-out begins only when the
    body is sent, so a server that takes no body would hold a put for ever. And aiobotocore has one error for
    a connection that was reset and one that was never made, but only after the latter nothing is stored.
    """

    async def send(self, request: Any) -> Any:
        """Send the request; see aiobotocore."""
        size = request.headers.get("Content-Length") or request.headers.get("X-Amz-Decoded-Content-Length")
        seconds_max = int(size or 0) / SENT_BYTES_PER_SECOND_MIN
        seconds_max += self._timeout.sock_connect or CONNECT_SECONDS_MAX
        seconds_max += self._timeout.sock_read or ANSWER_SECONDS_MAX
        try:
            return await asyncio.wait_for(super().send(request), seconds_max)
        except TimeoutError as error:
            raise ReadTimeoutError(endpoint_url=request.url, error=error) from error
        except EndpointConnectionError as error:
            if isinstance(error.__context__, (ClientConnectorError, socket.gaierror)):
                raise
            url = request.url
            raise ConnectionClosedError(error=error, request=request, endpoint_url=url) from error

    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)
        session._retry_connection = False
        return session


class PutOutcome(Enum):
    """What one put's answer, or the lack of it, says about the object."""

    STORED = auto()
    TAKEN = auto()
    NOT_SENT = auto()
    NOT_NOW = auto()
    REFUSED = auto()
    NOT_IMPLEMENTED = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class S3Dialect:
    """How S3 puts conditionally. `writer` is an s3fs file system that never repeats a request by itself."""

    writer: Any

    def create(self, store: FsspecStore, key: str, body: bytes) -> None:
        """See ObjectStore."""
        if len(body) > PUT_BYTES_MAX:
            raise ObjectTooLargeError(url=store.url, key=key, size_bytes=len(body))
        put_id = uuid.uuid4().hex
        may_be_stored = False
        for attempt in range(PUT_ATTEMPTS):
            time.sleep(PUT_PAUSE_SECONDS * attempt)
            outcome, reason, cause = self._put(store.path(key), body, put_id)
            if outcome is PutOutcome.STORED:
                return
            if outcome is PutOutcome.TAKEN:
                self._settle_taken(store, key, put_id)
                return
            may_be_stored = may_be_stored or outcome is PutOutcome.UNKNOWN
            if outcome in (PutOutcome.REFUSED, PutOutcome.NOT_IMPLEMENTED):
                break
        if may_be_stored:
            raise AnswerLostError(url=store.url, key=key, reason=reason) from cause
        if outcome is PutOutcome.NOT_IMPLEMENTED:
            lack = "conditional puts are not implemented"
            raise StoreUnfitError(url=store.url, lack=lack) from cause
        raise StoreUnreachableError(url=store.url, reason=reason) from cause

    def explain(self, error: Exception) -> Fault:
        """See Dialect."""
        code, status = code_and_status(error)
        if code == "NoSuchBucket":
            return Fault("the bucket does not exist")
        missing = status == STATUS_MISSING or (not status and isinstance(error, FileNotFoundError))
        return Fault(reason(error), is_missing=missing, is_beyond_end=status == STATUS_BEYOND_END)

    def _put(self, path: str, body: bytes, put_id: str) -> tuple[PutOutcome, str, Exception | None]:
        """Send one conditional put and return its outcome, the reason in words, and what was raised."""
        try:
            # And from twice the chunk size on.
            self.writer.pipe_file(path, body, mode="create", chunksize=PUT_BYTES_MAX, Metadata={PUT_ID: put_id})
        except Exception as error:  # noqa: BLE001  # each kind becomes an outcome, the unknown ones UNKNOWN
            return outcome_of(error), self.explain(error).reason, error
        return PutOutcome.STORED, "", None

    def _settle_taken(self, store: FsspecStore, key: str, put_id: str) -> None:
        """Return if the key was taken by an earlier attempt of this very create, else raise."""
        bucket, name, _ = store.filesystem.split_path(store.path(key))
        try:
            head = store.filesystem.call_s3("head_object", Bucket=bucket, Key=name)
        except (OSError, BotoCoreError, ClientError) as error:
            raise AnswerLostError(url=store.url, key=key, reason=self.explain(error).reason) from error
        if head.get("Metadata", {}).get(PUT_ID) != put_id:
            raise ObjectExistsError(url=store.url, key=key)


def outcome_of(error: Exception) -> PutOutcome:
    """Say what a failed put means. Nothing but a definite answer counts as one."""
    code, status = code_and_status(error)
    if status == STATUS_TAKEN:
        return PutOutcome.TAKEN
    if status == STATUS_NOT_IMPLEMENTED:
        return PutOutcome.NOT_IMPLEMENTED
    if code in NOT_NOW or status == STATUS_CONFLICT:
        return PutOutcome.NOT_NOW
    if isinstance(error, NOTHING_SENT):
        return PutOutcome.NOT_SENT
    if 400 <= status < 500 or isinstance(error, NoCredentialsError):
        return PutOutcome.REFUSED
    return PutOutcome.UNKNOWN


def code_and_status(error: BaseException) -> tuple[str, int]:
    """Return S3's error code and HTTP status, or ("", 0) if the server did not answer.

    s3fs raises OSErrors and keeps the answer as their cause. It takes a 412 for FileExistsError only where
    the server also names the condition, which not all servers do; hence the status.
    """
    cause = error if isinstance(error, ClientError) else error.__cause__
    if not isinstance(cause, ClientError):
        return "", 0
    status = cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(cause.response.get("Error", {}).get("Code", "")), int(status)


def reason(error: Exception) -> str:
    """Return why a request failed. Texts of server and library are left out: they may quote credentials."""
    code, status = code_and_status(error)
    if status:
        return f"the server answered {status} {code}".rstrip()
    if isinstance(error, EndpointConnectionError):
        return "can't connect"
    if isinstance(error, HTTPClientError):
        return f"the connection broke: {type(error).__name__}"
    return type(error).__name__


def s3_filesystems(options: Mapping[str, object]) -> tuple[Any, Any]:
    """Return two s3fs file systems, to read and to write, with the user's `options` and bounded waits.

    Reading repeats a failed request a few times; writing never does, S3Dialect.create decides about that.
    """
    import s3fs  # type: ignore[import-untyped]

    given = dict(options)
    config = given.pop("config_kwargs", {})
    waits = {"connect_timeout": CONNECT_SECONDS_MAX, "read_timeout": ANSWER_SECONDS_MAX}
    config = waits | (dict(config) if isinstance(config, Mapping) else {})
    # One read is one request; without this s3fs asks for the size first.
    given = {"max_concurrency": 1} | given | {"use_listings_cache": False, "skip_instance_cache": True}
    # Some servers send the checksum of the whole object with a range of it. Commits hold digests of our own.
    reading = {
        "retries": {"total_max_attempts": READ_ATTEMPTS},
        "response_checksum_validation": "when_required",
    }
    reader = s3fs.S3FileSystem(config_kwargs=reading | config, **given)
    writer = s3fs.S3FileSystem(
        config_kwargs=config | {"retries": {"total_max_attempts": 1}, "http_session_cls": OneSendSession},
        **given,
    )
    # s3fs repeats on top of botocore, but not after a 5xx; botocore does not when a body breaks off.
    reader.retries, writer.retries = 2, 1
    return reader, writer
