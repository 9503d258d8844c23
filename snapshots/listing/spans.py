"""OpenTelemetry spans for an operation and its steps, sent by the SDK, which only `cutline[otel]` installs.

The SDK's environment variables, such as `OTEL_EXPORTER_OTLP_ENDPOINT`, determine the collector and the headers.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.metadata import version
from types import TracebackType
from typing import TYPE_CHECKING, Self

from cutline.fleet.config import Fleet
from cutline.fleet.progress import Forwarding, Progress, Reading
from cutline.snapshots.operations.activity import Command
from cutline.snapshots.operations.operation import code_of, reason_of
from cutline.storage.errors import RefusedError, redact

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

SERVICE = "cutline"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
EXPORTER, OTLP = "OTEL_TRACES_EXPORTER", "otlp"
MISSING, INSTALL = "OpenTelemetry's SDK is not installed", "pip install 'cutline[otel]'"
# A collector that does not answer must not keep the command from exiting.
SENDING_SECONDS_MAX = 3.0
LOGGER = logging.getLogger("opentelemetry")


class TracesMissingError(RefusedError):
    """fleet.toml asks for spans, but the packages that send them are not installed."""


class Spans(Forwarding):
    """A Progress that forwards all calls to `target`, and makes a span for the operation and one for each step."""

    def __init__(self, target: Progress, tracer: Tracer, name: str, attributes: Mapping[str, str]) -> None:
        from opentelemetry.trace import set_span_in_context

        super().__init__(target)
        self._tracer = tracer
        self._whole = tracer.start_span(name, attributes=dict(attributes))
        self._inside = set_span_in_context(self._whole)
        self._step: Span | None = None
        self._done = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        from opentelemetry.trace import Status, StatusCode

        with self._lock:
            if error is not None:
                status = Status(StatusCode.ERROR, reason_of(error))
                for span in (self._step, self._whole):
                    if span is not None:
                        span.set_status(status)
                self._whole.set_attribute("cutline.exit_code", code_of(error))
            self._end_step()
            self._whole.end()

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        with self._lock:
            self._end_step()
            self._step = self._tracer.start_span(name, context=self._inside)
            if total is not None:
                self._step.set_attributes({"cutline.total": total, "cutline.unit": unit})
        self.target.step(name, total=total, unit=unit)

    def advance(self, done: int) -> None:
        with self._lock:
            self._done += done
        self.target.advance(done)

    def tell(self, reading: Reading) -> None:
        if reading.operation:
            self._whole.set_attribute("cutline.operation", reading.operation)
        self.target.tell(reading)

    def note(self, text: str) -> None:
        with self._lock:
            (self._step or self._whole).add_event("note", {"text": redact(text)})
        self.target.note(text)

    def reached(self, point: str, *, node: str = "") -> None:
        with self._lock:
            (self._step or self._whole).add_event(point, {"cutline.node": node} if node else None)
        self.target.reached(point, node=node)

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.set_attribute("cutline.done", self._done)
            self._step.end()
        self._step, self._done = None, 0


@contextmanager
def traced(fleet: Fleet, target: Progress, command: Command, *, is_one_of_many: bool = False) -> Iterator[Progress]:
    """Yield `target`, wrapped in Spans if spans are wanted; raises TracesMissingError.

    Spans are requested by `[metrics] traces`, or by the environment variables that name a collector. These variables
    may be meant for other programs, so if the packages are missing, a note says so and the command continues.

    At the end, the block waits up to SENDING_SECONDS_MAX for the collector. If the operation `is_one_of_many` in this
    process, spans are sent in the background, and the process waits for them only when it exits.
    """
    if not _are_wanted(fleet.metrics.traces):
        yield target
        return
    try:
        provider = _lasting_provider() if is_one_of_many else _make_provider()
    except ImportError as error:
        if fleet.metrics.traces:
            raise TracesMissingError(f"[metrics] traces: {MISSING}", hint=f"install it: {INSTALL}") from error
        target.note(f"no spans will be sent: {MISSING}; to install it: {INSTALL}")
        yield target
        return
    attributes = {"cutline.fleet": fleet.name, "cutline.kind": command.kind}
    known = {"cutline.snapshot": command.snapshot, "cutline.operation": command.operation}
    attributes |= {name: value for name, value in known.items() if value}
    with (
        nullcontext() if is_one_of_many else _sending(provider, target),
        Spans(target, provider.get_tracer(SERVICE, version(SERVICE)), f"snapshot {command.kind}", attributes) as spans,
    ):
        yield spans


def _are_wanted(traces: bool | None) -> bool:  # noqa: FBT001  # as fleet.toml has it
    if traces is not None:
        return traces
    exporter = os.environ.get(EXPORTER)
    return exporter == OTLP or (exporter is None and any(os.environ.get(name) for name in ENDPOINTS))


def _make_provider() -> TracerProvider:
    """Make a provider that sends spans as configured in the environment; raises ImportError."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # The SDK adds OTEL_RESOURCE_ATTRIBUTES, but the name given here takes precedence over the environment's.
    name = os.environ.get("OTEL_SERVICE_NAME") or SERVICE
    resource = Resource.create({"service.name": name, "service.version": version(SERVICE)})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


@cache
def _lasting_provider() -> TracerProvider:
    """Return the provider that all operations in this process share; raises ImportError."""
    provider = _make_provider()
    kept = _KeptMessage()
    LOGGER.addHandler(kept)
    atexit.register(_send_rest, provider, kept)
    return provider


@contextmanager
def _sending(provider: TracerProvider, target: Progress) -> Iterator[None]:
    """Send the remaining spans at the end, for at most SENDING_SECONDS_MAX, and note any failure."""
    kept = _KeptMessage()
    LOGGER.addHandler(kept)
    try:
        yield
    finally:
        has_ended = _send_rest(provider, kept)
        if not has_ended or kept.has_failed:
            why = kept.first or f"no answer within {SENDING_SECONDS_MAX:.0f} s"
            target.note(f"spans were lost: {redact(why)}")


def _send_rest(provider: TracerProvider, kept: _KeptMessage) -> bool:
    """Send the remaining spans, for at most SENDING_SECONDS_MAX; return whether sending has ended.

    If it has not, its thread continues, and removes the handler `kept` at the end.
    """

    def send() -> None:
        try:
            provider.shutdown()
        finally:
            LOGGER.removeHandler(kept)

    sender = threading.Thread(target=send, name="last spans", daemon=True)
    sender.start()
    sender.join(SENDING_SECONDS_MAX)
    return not sender.is_alive()


class _KeptMessage(logging.Handler):
    """Keeps the first warning from the SDK. `has_failed` is set by errors; after warnings, the SDK tries again.

    Without a handler, Python would write all warnings to stderr, between the lines of progress.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.first = ""
        self.has_failed = False

    def emit(self, record: logging.LogRecord) -> None:
        self.first = self.first or record.getMessage().partition("\n")[0]
        self.has_failed |= record.levelno >= logging.ERROR
