"""What a network does to a store: a proxy before a real S3 server that loses requests or answers, or says no.

Everything that is not a fault is forwarded to the server, which decides.
"""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

ANSWER_SECONDS_MAX = 30


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one put: whether the server gets it, and the answer; status 0 is none at all."""

    arrives: bool
    status: int = 0
    code: str = ""


REQUEST_LOST = Fault(arrives=False)
ANSWER_LOST = Fault(arrives=True)


@dataclass(slots=True)
class S3Proxy:
    """A running proxy. The next puts meet `faults` in turn; `puts` counts all that came.

    Requests of every kind meet `outage` while there is one, take `delay_seconds` longer, and wait while `answering`
    is not set: those that waited are lost.
    """

    endpoint_url: str
    faults: list[Fault] = field(default_factory=list)
    puts: int = 0
    outage: Fault | None = None
    delay_seconds: float = 0
    answering: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_fault(self) -> Fault | None:
        with self.lock:
            self.puts += 1
            return self.faults.pop(0) if self.faults else None


@contextlib.contextmanager
def s3_proxy(server_url: str) -> Iterator[S3Proxy]:
    """Run a proxy before the server at `server_url` for the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            time.sleep(proxy.delay_seconds)
            if not proxy.answering.is_set():
                proxy.answering.wait()
                self.close_connection = True
                return
            fault = proxy.next_fault() if self.command == "PUT" else None
            fault = fault or proxy.outage
            if fault is None:
                self.reply(*self.ask(body))
                return
            if fault.arrives:
                self.ask(body)
            if fault.status:
                self.reply(fault.status, {}, f"<Error><Code>{fault.code}</Code></Error>".encode())
            else:
                self.close_connection = True

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward  # noqa: N815  # the names it looks for

        def ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            address = urlsplit(server_url)
            connection = http.client.HTTPConnection(address.netloc, timeout=ANSWER_SECONDS_MAX)
            try:
                headers = {name: text for name, text in self.headers.items() if name.lower() != "expect"}
                connection.request(self.command, self.path, body=body, headers=headers)
                answer = connection.getresponse()
                return answer.status, dict(answer.getheaders()), answer.read()
            finally:
                connection.close()

        def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response_only(status)
            for name, text in headers.items():
                # The length of a HEAD is that of the object; everything else is sent as it was read.
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, text)
            length = headers.get("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
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
