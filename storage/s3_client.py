"""Send requests to S3: one retry policy, bounded waits, renewed credentials.

s3fs opens the connections according to [store_options], which contains s3fs's own options; the requests are botocore's.
The retries of s3fs, botocore and aiohttp are switched off: each has its own policy, and none of them makes an exception
for a conditional put, which must not be retried silently. storage/s3_retries.py decides which requests are retried, and
for how long.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from botocore.exceptions import BotoCoreError, IncompleteReadError, SSLError  # type: ignore[import-untyped]
from s3fs import S3FileSystem  # type: ignore[import-untyped]

from cutline.storage.errors import UsageError
from cutline.storage.process_limits import BEGIN_SECONDS_MAX, TooLittleMemoryError
from cutline.storage.s3_failures import (
    EXPIRED,
    UNKNOWN_CREDENTIALS,
    CredentialsExpired,
    UntrustedServerError,
    code_and_status,
    is_wordless,
    remove_text,
)
from cutline.storage.s3_private import OneSendSession
from cutline.storage.s3_retries import BYTES_PER_SECOND_MIN, Pace, Retries, Tries, retries_of
from cutline.storage.store import check_not_stopped

CONNECT_SECONDS_MAX = 5
ANSWER_SECONDS_MAX = 30
CLEAN_UP_SECONDS_MAX = 10
SIGNAL_SECONDS_MAX = 1

# Cutline's own options, with the parameters of puts that they set: see storage/s3_create.py.
PARAMETERS = {"server_side_encryption": "ServerSideEncryption", "kms_key_id": "SSEKMSKeyId"}

T = TypeVar("T")


class CertificateFileError(UsageError):
    """The file with the authorities for the store's certificate can't be used on this machine."""

    def __init__(self, path: str, problem: str) -> None:
        host = socket.gethostname()
        super().__init__(
            f"the store's ca_file {path} can't be used on {host}: {problem}",
            hint="put the authority's certificates (PEM) at this path on this machine and on every machine that runs"
            " Spark executors, readable by the executors' user",
            details={"file": path, "host": host},
        )


class S3Client:
    """Sends requests to S3: `send` sends a request once, `request` and `ask` retry it by `policy`.

    Requests have the names and parameters of botocore's methods. `options` are s3fs's options.
    """

    def __init__(self, *, policy: Retries, store: str, **options: Any) -> None:
        self.s3fs = S3FileSystem(**options)
        self.policy = policy
        self.pace = Pace(store)
        self.has_worked = False
        # The ways of creating objects (put, parts) for which encryption has been verified.
        self.encrypts: set[str] = set()
        self._renewing = asyncio.Lock()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop in which all requests are sent."""
        loop: asyncio.AbstractEventLoop = self.s3fs.loop
        return loop

    @property
    def endpoint_url(self) -> str:
        """The URL to which requests go, from the options, the environment or the AWS configuration file.

        Contacts nothing, except for sources of credentials if no request has been sent yet.
        """
        return wait_for(self, self._endpoint())

    async def _endpoint(self) -> str:
        return str((await self.s3fs.set_session()).meta.endpoint_url)

    def tries(self, size_bytes: int = 0) -> Tries:
        """Return the Tries for a request that starts now."""
        return Tries(self.policy, self.pace, size_bytes)

    def ask(self, method: str, **parameters: Any) -> Any:
        """Send a request from any thread, retried by the policy, and return the answer; raise the last error."""
        return wait_for(self, self.request(method, **parameters))

    async def request(self, method: str, **parameters: Any) -> Any:
        """Send a request, retried by the policy; raise the last error."""
        body = parameters.get("Body", b"")
        return await self.retry(partial(self.send, method, **parameters), self.tries(len(body)))

    async def read(self, **parameters: str) -> bytes:
        """Read an object, or its `Range`, retried by the policy; raise the last error."""
        tries = self.tries()
        return await self.retry(partial(self._read_body, parameters, tries), tries)

    async def retry(self, ask: Callable[[], Awaitable[T]], tries: Tries) -> T:
        """Call `ask` and return its result; retry it as `tries` allows."""
        while True:
            try:
                answer = await ask()
            except Exception as error:
                if not await tries.again(error):
                    raise
            else:
                tries.worked()
                return answer

    async def send(self, method: str, **parameters: Any) -> Any:
        """Send a request once, and once more with new credentials if it was refused because the old ones expired."""
        await self.pace.turn()
        await self.s3fs.set_session()
        used = await self._credentials()
        try:
            return await self._answer(method, parameters)
        except CredentialsExpired:
            if not await self._renew(used):
                raise
        return await self._answer(method, parameters)

    async def _answer(self, method: str, parameters: Mapping[str, Any]) -> Any:
        try:
            answer = await self._call(method, parameters)
        except Exception as refusal:  # raised again, without the server's text
            wordless = method == "head_object" and is_wordless(refusal)
            error = await self._ask_reason(refusal, parameters) if wordless else refusal
            if isinstance(error, SSLError):
                raise UntrustedServerError(error, self._authorities()) from error
            error = remove_text(error)
            if self._is_expired(error):
                raise CredentialsExpired(await self._source()) from error
            if error is refusal:
                raise
            raise error from None
        self.has_worked = self.pace.has_answered = True
        return answer

    async def _call(self, method: str, parameters: Mapping[str, Any]) -> Any:
        """Call botocore's method within a bounded time, with those of the user's parameters that it accepts.

        aiohttp's read timeout begins only after the body has been sent, so a server that does not read the body would
        block a put forever.
        """
        client = await self.s3fs.get_s3(parameters.get("Bucket"))
        operation = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[method])
        chosen = self.s3fs.s3_additional_kwargs | self.s3fs.req_kw
        given = {name: chosen[name] for name in chosen if name in operation.input_shape.members} | dict(parameters)
        waits = self.s3fs.config_kwargs
        seconds_max = len(parameters.get("Body", b"")) / BYTES_PER_SECOND_MIN
        seconds_max += waits["connect_timeout"] or CONNECT_SECONDS_MAX
        seconds_max += waits["read_timeout"] or ANSWER_SECONDS_MAX
        return await asyncio.wait_for(getattr(client, method)(**given), seconds_max)

    async def _read_body(self, parameters: Mapping[str, str], tries: Tries) -> bytes:
        """Read an object or a range of it; raise IncompleteReadError if the answer ends early."""
        answer = await self.send("get_object", **parameters)
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
        """Return why a HEAD was refused, by a GET for one byte: the reason is the same, but the answer has a body."""
        try:
            answer = await self._call("get_object", {**parameters, "Range": "bytes=0-0"})
        except Exception as error:  # noqa: BLE001  # this error carries the reason
            return error
        answer["Body"].close()
        return refusal

    async def _renew(self, used: object) -> bool:
        """Renew the credentials, unless another request already replaced `used`; return whether they changed."""
        async with self._renewing:
            if await self._credentials() == used:
                try:
                    await self.s3fs.set_session(refresh=True)
                except (BotoCoreError, OSError):
                    return False
            return bool(await self._credentials() != used)

    async def _credentials(self) -> object:
        """Return the credentials that botocore found; None if it found none, or if they are in the options."""
        credentials = None if self._are_in_options() else await self.s3fs.session.get_credentials()
        return credentials and await credentials.get_frozen_credentials()

    async def _source(self) -> str:
        """Return botocore's name for the source of the credentials."""
        if self._are_in_options():
            return "explicit"
        return str(getattr(await self.s3fs.session.get_credentials(), "method", "") or "")

    def _are_in_options(self) -> bool:
        """Whether the options contain the credentials or ask for anonymous access."""
        return bool(self.s3fs.anon or self.s3fs.key or self.s3fs.client_kwargs.get("aws_access_key_id"))

    def _authorities(self) -> str:
        """Return the file of authorities for the server's certificate; "" if botocore's own authorities are used."""
        verify = self.s3fs.client_kwargs.get("verify") or self.s3fs.session.get_config_variable("ca_bundle")
        return str(verify) if isinstance(verify, str) else os.environ.get("REQUESTS_CA_BUNDLE", "")


def to_s3fs(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options in the form that s3fs expects; raise CertificateFileError if the authorities can't be read."""
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
    except ssl.SSLError:  # a subclass of OSError
        raise CertificateFileError(path, "it contains no certificates in PEM format") from None
    except OSError as error:
        raise CertificateFileError(path, error.strerror or type(error).__name__) from None


def s3_client(options: Mapping[str, object], url: str) -> S3Client:
    """Return a client with bounded waits and the user's `options`, both s3fs's and Cutline's own.

    `url` names the store in reports of waits. Raises CertificateFileError.
    """
    given = to_s3fs(options)
    seconds = given.pop("retry_for", None)
    chosen = given.pop("config_kwargs", {})
    config: dict[str, object] = dict(chosen) if isinstance(chosen, Mapping) else {}
    policy = retries_of(config, float(seconds) if isinstance(seconds, (int, float)) else None)
    waits = {"connect_timeout": CONNECT_SECONDS_MAX, "read_timeout": ANSWER_SECONDS_MAX}
    # Some servers send the whole object's checksum with a range, and it would not match. Commits have Cutline's
    # digests.
    checksums = {"response_checksum_validation": "when_required"}
    once = {"retries": {"total_max_attempts": 1}, "http_session_cls": OneSendSession}
    given = given | {"use_listings_cache": False, "skip_instance_cache": True}
    return S3Client(policy=policy, store=f"store {url}", config_kwargs=waits | checksums | config | once, **given)


def wait_for(client: S3Client, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in the client's event loop and return its result.

    Ctrl-C, or another thread that ends this thread's requests (stoppable_requests), cancels the work, which then has
    CLEAN_UP_SECONDS_MAX to clean up. fsspec's own wait would leave the work running, and perhaps storing an object,
    after the caller has ended.
    """
    ended = threading.Event()

    async def run() -> T:
        try:
            return await work
        finally:
            ended.set()

    future = asyncio.run_coroutine_threadsafe(run(), client.loop)
    try:
        # A signal that another thread received is handled only between two waits.
        waits = 0
        while not ended.wait(SIGNAL_SECONDS_MAX):
            check_not_stopped()
            waits += 1
            if waits > BEGIN_SECONDS_MAX and not client.loop.is_running():
                raise TooLittleMemoryError("the thread that sends the store's requests has ended")
        return future.result()
    except BaseException:
        if not ended.is_set():
            future.cancel()
            ended.wait(CLEAN_UP_SECONDS_MAX)
        raise
