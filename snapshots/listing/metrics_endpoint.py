"""The `/metrics` endpoint of a long-running process, and the text that Prometheus reads there."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from msgspec import Struct

from cutline.fleet.config import ListenAddress
from cutline.fleet.timers import calling_after
from cutline.snapshots.listing.metrics import FLEET, Metric, Sample
from cutline.storage.errors import RefusedError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family


class _Collector(Struct, frozen=True):
    """The collector for a fleet's metrics, called by the client library."""

    fleet: str
    samples: tuple[Sample, ...]

    def collect(self) -> Iterator[Family]:
        from prometheus_client.core import GaugeMetricFamily

        by_metric: dict[Metric, list[Sample]] = {}
        for sample in self.samples:
            by_metric.setdefault(sample.metric, []).append(sample)
        for metric, found in by_metric.items():
            family = GaugeMetricFamily(metric.name, metric.help, labels=(FLEET, *metric.labels))
            for sample in found:
                family.add_metric((self.fleet, *sample.labels), sample.value)
            yield family


def render(fleet: str, samples: Iterable[Sample]) -> bytes:
    """Render the samples for a fleet in Prometheus's text format."""
    # Imported here because commands without metrics don't need the library.
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(fleet, tuple(samples)))
    return generate_latest(registry)


# One scraper and one probe are expected. If there are more connections, the oldest are closed, so that requests are
# answered even if other connections stay silent.
REQUESTS_MAX, REQUEST_SECONDS_MAX = 8, 10.0
# Every version of Prometheus reads this version of the text format. Later versions differ only in names that are not
# used here.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PLAIN = "text/plain; charset=utf-8"


class EndpointTakenError(RefusedError):
    """The endpoint can't listen on its address."""


class _HttpAnswer(Struct, frozen=True):
    status: HTTPStatus
    content_type: str
    body: bytes


class MetricsEndpoint:
    """Serves `/metrics` and `/healthz` while the block runs; raises EndpointTakenError.

    `/healthz` returns 200 if metrics were published in the last `fresh_seconds`, otherwise 503, because the process is
    hanging.
    """

    def __init__(self, address: ListenAddress, fresh_seconds: float) -> None:
        self._fresh_seconds = fresh_seconds
        self._published: tuple[bytes, float] | None = None
        try:
            self._server = _Server(address, self)
        except OSError as error:
            raise EndpointTakenError(
                f"the metrics can't be served at {address.host}:{address.port}: {error.strerror or error}",
                hint="set a different address in fleet.toml: [metrics] listen",
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics endpoint", daemon=True)

    @property
    def port(self) -> int:
        """The port on which the endpoint listens."""
        return int(self._server.server_address[1])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, error: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def publish(self, text: bytes) -> None:
        """Serve `text`, the result of `render`, from now on."""
        self._published = text, time.monotonic()

    def answer(self, path: str) -> _HttpAnswer:
        """Return the answer to a request for `path`."""
        published = self._published
        if path == "/healthz":
            is_fresh = published is not None and time.monotonic() - published[1] <= self._fresh_seconds
            status = HTTPStatus.OK if is_fresh else HTTPStatus.SERVICE_UNAVAILABLE
            return _HttpAnswer(status, PLAIN, b"ok\n" if is_fresh else b"no metrics were gathered recently\n")
        if path != "/metrics":
            return _HttpAnswer(HTTPStatus.NOT_FOUND, PLAIN, b"see /metrics and /healthz\n")
        if published is None:
            return _HttpAnswer(HTTPStatus.SERVICE_UNAVAILABLE, PLAIN, b"no metrics have been gathered yet\n")
        return _HttpAnswer(HTTPStatus.OK, CONTENT_TYPE, published[0])


def shut_down(request: socket.socket) -> None:
    """End a connection, even while another thread is using it."""
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Server(ThreadingHTTPServer):
    """Keeps up to REQUESTS_MAX connections open; an additional connection closes the oldest.

    The server in prometheus_client limits neither the number of connections nor their duration, and has no `/healthz`.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: ListenAddress, endpoint: MetricsEndpoint) -> None:
        self.endpoint = endpoint
        self._lock = threading.Lock()
        # The open connections, oldest first.
        self._open: dict[socket.socket, None] = {}
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        super().__init__((address.host, address.port), _Handler)

    def server_bind(self) -> None:
        """Bind like TCPServer; HTTPServer would also look up the host's name, which can be slow."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) == REQUESTS_MAX:
                oldest = next(iter(self._open))
                del self._open[oldest]
                shut_down(oldest)
            self._open[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer; cut off a client that takes too long in total, even if it keeps sending."""
        try:
            with calling_after(REQUEST_SECONDS_MAX, partial(shut_down, request)):
                super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_SECONDS_MAX

    def do_GET(self) -> None:
        self.wfile.write(self._send_head().body)

    def do_HEAD(self) -> None:
        self._send_head()

    def _send_head(self) -> _HttpAnswer:
        answer = self.server.endpoint.answer(self.path.partition("?")[0])
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        return answer

    def version_string(self) -> str:
        """The server's name, without versions."""
        return "cutline"

    def log_message(self, *_arguments: Any) -> None:
        """Log nothing."""
