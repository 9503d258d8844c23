"""Network faults before a real server, of S3 or the like: a proxy that loses requests or answers, or refuses requests.

All other requests are forwarded to the server, whose answers are sent back.
"""

from __future__ import annotations

import contextlib
import http.client
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.message import Message
from email.utils import format_datetime
from fnmatch import fnmatch
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

ANSWER_SECONDS_MAX = 30
CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one request: whether it arrives at the server, and the answer; status 0 means no answer.

    It applies to the S3 operation `of`, if the request's path contains `key`. With `ends_early` the server's own answer
    ends in the middle of its body. With `held` the request waits until that is set, and is then like any other. With
    `late` its answer is lost at once, and it arrives when that is set. The answer's date is `minutes_ahead` of this
    machine's. `then` is called last.
    """

    arrives: bool
    status: int = 0
    code: str = ""
    of: str = "PutObject"
    headers: Mapping[str, str] = field(default_factory=dict)
    minutes_ahead: int = 0
    ends_early: bool = False
    key: str = ""
    held: threading.Event | None = None
    late: threading.Event | None = None
    then: Callable[[], None] | None = None


REQUEST_LOST = Fault(arrives=False)
ANSWER_LOST = Fault(arrives=True)


@dataclass(slots=True)
class S3Proxy:
    """A running proxy. `faults` apply to the next matching requests in turn; `requests` counts all requests.

    While there is an `outage`, it applies to all other requests whose path contains its `key`. Each request takes
    `delay_seconds` longer, and waits while `answering` is not set: requests that waited are lost. Access keys in
    `expired` are refused as S3 refuses an expired token, operations in `forbidden` and writes of keys that match one of
    `unwritable` as it refuses what a policy does not allow. The server does not get the headers in `dropped_headers`,
    which are in lower case, nor the parameter `dropped_parameter` of a request.
    `put_headers` has the headers of all puts, `held_paths` the paths of held requests, `late_statuses` the server's
    answers to late ones.
    """

    endpoint_url: str
    faults: list[Fault] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    outage: Fault | None = None
    expired: set[str] = field(default_factory=set)
    forbidden: frozenset[str] = frozenset()
    unwritable: tuple[str, ...] = ()
    dropped_headers: frozenset[str] = frozenset()
    dropped_parameter: str = ""
    put_headers: list[dict[str, str]] = field(default_factory=list)
    held_paths: list[str] = field(default_factory=list)
    late_statuses: list[int] = field(default_factory=list)
    delay_seconds: float = 0
    answering: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def puts(self) -> int:
        """How many puts there were."""
        return self.requests["PutObject"]

    def reset(self) -> None:
        """Clear the faults, the counts and the expired keys."""
        self.faults.clear()
        self.requests.clear()
        self.expired.clear()

    def next_fault(self, operation: str, path: str, headers: Message) -> Fault | None:
        with self.lock:
            self.requests[operation] += 1
            if operation == "PutObject":
                self.put_headers.append(dict(headers.items()))
            if any(f"Credential={key}/" in headers.get("Authorization", "") for key in self.expired):
                return EXPIRED
            is_write = operation in ("PutObject", "CreateMultipartUpload")
            if operation in self.forbidden or (is_write and any(fnmatch(path, f"*/{one}") for one in self.unwritable)):
                return FORBIDDEN
            for fault in self.faults:
                if fault.of == operation and fault.key in path:
                    self.faults.remove(fault)
                    return fault
            return self.outage if self.outage and self.outage.key in path else None

    def passes(self, fault: Fault, path: str) -> bool:
        """Wait while the request is held; return whether the server's own answer is sent."""
        if fault.held:
            self.held_paths.append(path)
            fault.held.wait()
        return fault.ends_early or fault.held is not None

    def carry_out(self, fault: Fault, ask: Callable[[], tuple[int, dict[str, str], bytes]]) -> None:
        """Forward the request now, later or never; the server's answer is lost."""
        if fault.late:
            threading.Thread(target=self.let_arrive, args=(ask, fault.late), daemon=True).start()
        if fault.arrives:
            ask()
        if fault.then:
            fault.then()

    def let_arrive(self, ask: Callable[[], tuple[int, dict[str, str], bytes]], when: threading.Event) -> None:
        """Forward a late request once `when` is set."""
        when.wait()
        self.late_statuses.append(ask()[0])


EXPIRED = Fault(arrives=False, status=400, code="ExpiredToken")
FORBIDDEN = Fault(arrives=False, status=403, code="AccessDenied")


def operation_of(command: str, path: str) -> str:
    """S3's name for a request; source: Amazon S3 API Reference."""
    query = parse_qs(urlsplit(path).query, keep_blank_values=True)
    if "uploadId" in query:
        return {"PUT": "UploadPart", "POST": "CompleteMultipartUpload", "DELETE": "AbortMultipartUpload"}.get(
            command, "ListParts"
        )
    if "uploads" in query:
        return "CreateMultipartUpload" if command == "POST" else "ListMultipartUploads"
    if "versions" in query:
        return "ListObjectVersions"
    if "list-type" in query:
        return "ListObjectsV2"
    names = {"PUT": "PutObject", "GET": "GetObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}
    return names.get(command, command)


class Listener(ThreadingHTTPServer):
    """A server that ignores lost connections: in these tests clients give up, or are killed."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def forward_request(
    server_url: str, proxy: S3Proxy, request: BaseHTTPRequestHandler, body: bytes
) -> tuple[int, dict[str, str], bytes]:
    """Forward the request without what the proxy drops; return the server's own answer: status, headers, body."""
    unsent, path = {"expect", *proxy.dropped_headers}, request.path
    if proxy.dropped_parameter:
        path = path.replace(proxy.dropped_parameter, "")
    address = urlsplit(server_url)
    connection = CONNECTIONS[address.scheme](address.netloc, timeout=ANSWER_SECONDS_MAX)
    try:
        headers = {name: text for name, text in request.headers.items() if name.lower() not in unsent}
        connection.request(request.command, path, body=body, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


@contextlib.contextmanager
def s3_proxy(server_url: str) -> Iterator[S3Proxy]:
    """Run a proxy before the server at `server_url` for the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Write nothing to stderr, which is the commands' in this process: a connection may be idle for minutes."""

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            ask = partial(forward_request, server_url, proxy, self, body)
            time.sleep(proxy.delay_seconds)
            if not proxy.answering.is_set():
                proxy.answering.wait()
                self.close_connection = True
                return
            operation = operation_of(self.command, self.path)
            fault = proxy.next_fault(operation, self.path, self.headers)
            if fault is None or proxy.passes(fault, self.path):
                self.reply(*ask(), ends_early=fault is not None and fault.ends_early)
                return
            proxy.carry_out(fault, ask)
            if fault.status:
                # Some servers put secrets into their messages.
                secrets = f"{self.headers.get('Authorization')} {self.headers.get('X-Amz-Security-Token')}"
                error = f"<Error><Code>{fault.code}</Code><Message>not for {secrets}</Message></Error>"
                headers = dict(fault.headers)
                if fault.minutes_ahead:
                    date = datetime.now(UTC) + timedelta(minutes=fault.minutes_ahead)
                    headers["Date"] = format_datetime(date, usegmt=True)
                self.reply(fault.status, headers, error.encode())
            else:
                self.close_connection = True

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward  # noqa: N815  # http.server's names

        def reply(self, status: int, headers: dict[str, str], body: bytes, *, ends_early: bool = False) -> None:
            self.send_response_only(status)
            for name, text in headers.items():
                # The length in the answer to a HEAD is the object's; all other bodies have the length that was read.
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, text)
            lengths = [text for name, text in headers.items() if name.lower() == "content-length"]
            length = lengths[0] if lengths and self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[: len(body) // 2] if ends_early else body)
            if ends_early:
                self.close_connection = True

    with Listener(("127.0.0.1", 0), Handler) as listener:
        proxy = S3Proxy(f"http://127.0.0.1:{listener.server_address[1]}")
        proxy.answering.set()
        thread = threading.Thread(target=listener.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield proxy
        finally:
            proxy.answering.set()
            listener.shutdown()
            thread.join()
