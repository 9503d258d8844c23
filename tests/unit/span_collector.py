"""An HTTP server that receives spans as a collector does, and keeps them for a test to look at."""

from __future__ import annotations

import gzip
from http.server import BaseHTTPRequestHandler, HTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector(HTTPServer):
    """Keeps the requests of OTLP over HTTP, or refuses some of them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.received: list[ExportTraceServiceRequest] = []
        # The status with which it refuses the next requests.
        self.refusals: list[int] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        if self.server.refusals:
            self.send_response(self.server.refusals.pop())
            self.end_headers()
            return
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def span_names(collector: Collector) -> list[str]:
    """The names of the spans that it has received so far."""
    resources = [one for request in list(collector.received) for one in request.resource_spans]
    return [span.name for found in resources for scope in found.scope_spans for span in scope.spans]
