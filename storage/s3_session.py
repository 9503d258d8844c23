"""The s3fs file system for all S3 requests: one retry policy, bounded waits, renewed credentials.

The retries of s3fs, botocore and aiohttp are switched off: each has its own policy, and none knows that a conditional
put must not be retried silently. storage/s3_retries.py decides what is retried, and how often.

Only this module uses private members of these libraries. pyproject.toml bounds their versions, and
tests/unit/test_storage_s3_private.py fails if one of the members changes.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from aiobotocore.httpsession import AIOHTTPSession  # type: ignore[import-untyped]
from aiohttp import ClientConnectorError
from botocore.exceptions import (  # type: ignore[import-untyped]
    BotoCoreError,
    ConnectionClosedError,
    EndpointConnectionError,
    IncompleteReadError,
    ReadTimeoutError,
    SSLError,
)
from fsspec.asyn import sync_wrapper  # type: ignore[import-untyped]
from s3fs import S3FileSystem  # type: ignore[import-untyped]

from cutline.storage.errors import UsageError
from cutline.storage.process_memory import TooLittleMemoryError
from cutline.storage.s3_failures import (
    EXPIRED,
    UNKNOWN_CREDENTIALS,
    CredentialsExpired,
    UntrustedServerError,
    code_and_status,
    is_wordless,
    remove_text,
)
from cutline.storage.s3_retries import BYTES_PER_SECOND_MIN, Pace, Retries, Tries, retries_of
from cutline.storage.store import check_not_stopped
from cutline.storage.thread_starts import BEGIN_SECONDS_MAX

CONNECT_SECONDS_MAX = 5
ANSWER_SECONDS_MAX = 30
CLEAN_UP_SECONDS_MAX = 10
SIGNAL_SECONDS_MAX = 1

# Options of Cutline's own that are parameters of puts: see storage/s3_put.py.
PARAMETERS = {"server_side_encryption": "ServerSideEncryption", "kms_key_id": "SSEKMSKeyId"}

T = TypeVar("T")


class CertificateFileError(UsageError):
    """The file with the authorities of the store's certificate can't be used on this machine."""

    def __init__(self, path: str, problem: str) -> None:
        host = socket.gethostname()
        super().__init__(
            f"the store's ca_file {path} can't be used on {host}: {problem}",
            hint="put the certificates of the authority (PEM) under this name on this machine and on every machine of"
            " Spark's executors, readable for the user there",
            details={"file": path, "host": host},
        )


class OneSendSession(AIOHTTPSession):  # type: ignore[misc]  # aiobotocore has no types
    """An HTTP session that sends a request once, in bounded time, and distinguishes lost from failed connections.

    aiohttp silently retries a PUT whose connection broke; a retried conditional put would find the key taken by the
    first one. There is no public switch for that. aiohttp's read timeout begins only when the body is sent, so a server
    that does not read the body would block a put forever. And aiobotocore has one error for a connection that was reset
    and one that was never made, although only the latter means that nothing was stored.
    """

    async def send(self, request: Any) -> Any:
        """Send the request; see aiobotocore."""
        size = request.headers.get("Content-Length") or request.headers.get("X-Amz-Decoded-Content-Length")
        seconds_max = int(size or 0) / BYTES_PER_SECOND_MIN
        seconds_max += self._timeout.sock_connect or CONNECT_SECONDS_MAX
        seconds_max += self._timeout.sock_read or ANSWER_SECONDS_MAX
        try:
            return await asyncio.wait_for(super().send(request), seconds_max)
        except TimeoutError as error:
            raise ReadTimeoutError(endpoint_url=request.url, error=error) from error
        except SSLError as error:
            raise UntrustedServerError(request.url, error, self._verify) from error
        except EndpointConnectionError as error:
            if isinstance(error.__context__, (ClientConnectorError, socket.gaierror)):
                raise
            url = request.url
            raise ConnectionClosedError(error=error, request=request, endpoint_url=url) from error

    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)
        session._retry_connection = False
        return session


class PatientS3(S3FileSystem):  # type: ignore[misc]  # s3fs has no types
    """An s3fs file system that retries every request by `policy`, except those sent by `send`."""

    def __init__(self, *, policy: Retries, store: str, **options: Any) -> None:
        super().__init__(**options)
        self.retries = 1  # s3fs's own retries have no time limit and don't cover 5xx
        self.policy = policy
        self.pace = Pace(store)
        self.has_worked = False
        # How objects were created whose encryption was verified.
        self.encrypts: set[str] = set()
        self._renewing = asyncio.Lock()

    def tries(self, size_bytes: int = 0) -> Tries:
        """Return the Tries for a request that begins now."""
        return Tries(self.policy, self.pace, size_bytes)

    async def send(self, method: str, *more: Mapping[str, Any], **parameters: Any) -> Any:
        """Send a request once; if the credentials have expired, so that it had no effect, once more with new ones."""
        await self.pace.turn()
        await self.set_session()
        used = await self._credentials()
        try:
            return await self._answer(method, *more, **parameters)
        except CredentialsExpired:
            if not await self._renew(used):
                raise
        return await self._answer(method, *more, **parameters)

    async def _answer(self, method: str, *more: Mapping[str, Any], **parameters: Any) -> Any:
        try:
            answer = await super()._call_s3(method, *more, **parameters)
        except Exception as refusal:  # noqa: BLE001  # raised again, without the server's text
            wordless = method == "head_object" and is_wordless(refusal)
            error = remove_text(await self._ask_reason(refusal, parameters) if wordless else refusal)
            if self._is_expired(error):
                raise CredentialsExpired(self._source()) from error
            raise error from error.__cause__
        self.has_worked = self.pace.has_answered = True
        return answer

    async def retry(self, ask: Callable[[], Awaitable[T]], tries: Tries) -> T:
        """Return what `ask` returns, retried as `tries` allows."""
        while True:
            try:
                answer = await ask()
            except Exception as error:
                if not await tries.again(error):
                    raise
            else:
                tries.worked()
                return answer

    async def request(self, method: str, *more: Mapping[str, Any], **parameters: Any) -> Any:
        """Send a request of botocore's `method`, retried by the policy; raise the last error."""
        body = parameters.get("Body", b"")
        return await self.retry(partial(self.send, method, *more, **parameters), self.tries(len(body)))

    # s3fs's own requests are sent the same way.
    _call_s3 = request
    call_s3 = sync_wrapper(request)

    async def _cat_file(
        self, path: str, version_id: str | None = None, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        bucket, key, _version = self.split_path(path)
        address = {"Bucket": bucket, "Key": key} | ({"VersionId": version_id} if version_id else {})
        if start is not None or end is not None:
            address["Range"] = await self._process_limits(path, start, end)
        tries = self.tries()
        return await self.retry(lambda: self._read_body(address, tries), tries)

    async def _read_body(self, address: Mapping[str, str], tries: Tries) -> bytes:
        """Read an object or a range of it; raise IncompleteReadError if the answer ends early."""
        answer = await self.send("get_object", **address)
        size = int(answer.get("ContentLength") or 0)
        tries.size_bytes = size
        async with answer["Body"] as stream:
            body = await asyncio.wait_for(stream.read(), ANSWER_SECONDS_MAX + size / BYTES_PER_SECOND_MIN)
        if len(body) != answer.get("ContentLength", len(body)):
            raise IncompleteReadError(actual_bytes=len(body), expected_bytes=size)
        return bytes(body)

    def _is_expired(self, error: BaseException) -> bool:
        code, _ = code_and_status(error)
        return code in EXPIRED or (self.has_worked and code in UNKNOWN_CREDENTIALS)

    async def _ask_reason(self, refusal: Exception, parameters: Mapping[str, Any]) -> Exception:
        """Return why a HEAD was refused, by a GET of one byte: it is refused for the same reason, and has a body."""
        try:
            answer = await super()._call_s3("get_object", **parameters, Range="bytes=0-0")
        except Exception as error:  # noqa: BLE001  # of two errors, this one has the reason
            return error
        answer["Body"].close()
        return refusal

    async def _renew(self, used: object) -> bool:
        """Renew the credentials, unless another request already replaced `used`; return whether they changed."""
        async with self._renewing:
            if await self._credentials() == used:
                try:
                    await self.set_session(refresh=True)
                except (BotoCoreError, OSError):
                    return False
            return bool(await self._credentials() != used)

    async def _credentials(self) -> object:
        credentials = self._s3._request_signer._credentials
        return None if credentials is None else await credentials.get_frozen_credentials()

    def _source(self) -> str:
        """Return botocore's name for the source of the credentials."""
        return str(getattr(self._s3._request_signer._credentials, "method", "") or "")


def to_s3fs(options: Mapping[str, object]) -> dict[str, object]:
    """The options as s3fs takes them; raise CertificateFileError if the authorities can't be read."""
    given = dict(options)
    client = dict(chosen) if isinstance(chosen := given.get("client_kwargs"), Mapping) else {}
    if ca_file := given.pop("ca_file", None):
        client["verify"] = str(ca_file)
    endpoint = str(given.get("endpoint_url") or client.get("endpoint_url") or "")
    if isinstance(client.get("verify"), str) and urlsplit(endpoint).scheme != "http":
        _check_authorities(str(client["verify"]))
    if client:
        given["client_kwargs"] = client
    if asked := {PARAMETERS[name]: str(given.pop(name)) for name in PARAMETERS if name in given}:
        more = given.get("s3_additional_kwargs")
        given["s3_additional_kwargs"] = (dict(more) if isinstance(more, Mapping) else {}) | asked
    return given


def _check_authorities(path: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:  # an OSError, too
        raise CertificateFileError(path, "it has no certificates in PEM form") from None
    except OSError as error:
        raise CertificateFileError(path, error.strerror or type(error).__name__) from None


def s3_filesystem(options: Mapping[str, object], url: str) -> PatientS3:
    """Return the file system with bounded waits and the user's `options`: s3fs's, and Cutline's own.

    `url` names the store in what is told.

    Raises CertificateFileError.
    """
    given = to_s3fs(options)
    seconds = given.pop("retry_for", None)
    chosen = given.pop("config_kwargs", {})
    config: dict[str, object] = dict(chosen) if isinstance(chosen, Mapping) else {}
    policy = retries_of(config, float(seconds) if isinstance(seconds, (int, float)) else None)
    waits = {"connect_timeout": CONNECT_SECONDS_MAX, "read_timeout": ANSWER_SECONDS_MAX}
    # Some servers send the whole object's checksum with a range, which would not match. Commits have our own digests.
    checksums = {"response_checksum_validation": "when_required"}
    once = {"retries": {"total_max_attempts": 1}, "http_session_cls": OneSendSession}
    given = given | {"use_listings_cache": False, "skip_instance_cache": True}
    return PatientS3(policy=policy, store=f"store {url}", config_kwargs=waits | checksums | config | once, **given)


def wait_for(filesystem: PatientS3, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in the file system's event loop and return its result.

    Ctrl-C, or whoever stops this thread's requests (stoppable_requests), cancels it there and waits up to
    CLEAN_UP_SECONDS_MAX for it to clean up. fsspec's own wait would leave it running, and perhaps storing an object,
    after the caller has ended.
    """
    ended = threading.Event()

    async def run() -> T:
        try:
            return await work
        finally:
            ended.set()

    future = asyncio.run_coroutine_threadsafe(run(), filesystem.loop)
    try:
        # A signal that another thread received is noticed only between two waits.
        waits = 0
        while not ended.wait(SIGNAL_SECONDS_MAX):
            check_not_stopped()
            waits += 1
            if waits > BEGIN_SECONDS_MAX and not filesystem.loop.is_running():
                raise TooLittleMemoryError("the thread of the store's requests has ended")
        return future.result()
    except BaseException:
        if not ended.is_set():
            future.cancel()
            ended.wait(CLEAN_UP_SECONDS_MAX)
        raise
