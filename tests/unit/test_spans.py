"""Spans of operations: the SDK keeps them in memory, and a collector on this machine receives them."""

from __future__ import annotations

import atexit
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import cutline.snapshots.listing.spans as module
from cutline.fleet.config import Fleet, MetricsRules
from cutline.fleet.progress import Reading, Silent
from cutline.snapshots.listing.spans import ENDPOINTS, EXPORTER, Spans, TracesMissingError, traced
from cutline.snapshots.operations.activity import Command
from cutline.storage.errors import BusyError
from tests.faults.ports import free_ports
from tests.held.retained_wal import Notes
from tests.unit.document_kinds import FLEET
from tests.unit.span_collector import Collector, span_names

COMMAND = Command("create", "nightly", "20261120T000000Z-000000000a")
SECONDS_MAX = 60.0


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENDPOINTS, EXPORTER):
        monkeypatch.delenv(name, raising=False)


def fleet_with(*, traces: bool | None) -> Fleet:
    return replace(FLEET, metrics=MetricsRules(traces=traces))


def new_spans(kept: InMemorySpanExporter) -> Spans:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    return Spans(Silent(), provider.get_tracer("test"), "snapshot create", {"cutline.fleet": "shop"})


def fail_in_a_step(kept: InMemorySpanExporter, error: BaseException) -> None:
    with new_spans(kept) as spans:
        spans.step("slots")
        raise error


def named(spans: tuple[ReadableSpan, ...]) -> dict[str, ReadableSpan]:
    return {one.name: one for one in spans}


def test_an_operation_has_a_span_and_each_step_one_below_it() -> None:
    kept = InMemorySpanExporter()
    with new_spans(kept) as spans:
        spans.tell(Reading(0, operation="20261120T000000Z-000000000a"))
        spans.step("copy", total=7, unit="tasks")
        spans.advance(3)
        spans.advance(4)
        spans.reached("slots-made", node="a")
        spans.step("commit")
        spans.note("a retry")
    found = named(kept.get_finished_spans())
    assert list(found) == ["copy", "commit", "snapshot create"]
    whole, copy, commit = found["snapshot create"], found["copy"], found["commit"]
    assert whole.parent is None
    for one in (copy, commit):
        assert one.parent is not None
        assert one.parent.span_id == whole.context.span_id
    assert whole.attributes == {"cutline.fleet": "shop", "cutline.operation": "20261120T000000Z-000000000a"}
    assert copy.attributes == {"cutline.total": 7, "cutline.unit": "tasks", "cutline.done": 7}
    assert [(one.name, dict(one.attributes or {})) for one in copy.events] == [("slots-made", {"cutline.node": "a"})]
    assert [(one.name, dict(one.attributes or {})) for one in commit.events] == [("note", {"text": "a retry"})]
    assert copy.end_time is not None
    assert commit.start_time is not None
    assert copy.end_time <= commit.start_time
    assert whole.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    ("error", "reason", "code"),
    [
        (BusyError("secret", hint=""), "busy", 7),
        (KeyboardInterrupt(15), "stopped by SIGTERM", 8),
        (KeyboardInterrupt(15, "root@vm"), "cancelled by root@vm", 8),
    ],
)
def test_an_error_has_its_name_and_exit_code_and_no_message(error: BaseException, reason: str, code: int) -> None:
    kept = InMemorySpanExporter()
    with pytest.raises(type(error)):
        fail_in_a_step(kept, error)
    found = named(kept.get_finished_spans())
    for one in found.values():
        assert (one.status.status_code, one.status.description) == (StatusCode.ERROR, reason)
    assert (found["snapshot create"].attributes or {})["cutline.exit_code"] == code


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("traces", [True, None])
def test_a_collector_receives_the_spans(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, *, traces: bool | None
) -> None:
    monkeypatch.setenv(ENDPOINTS[1], collector.url)
    monkeypatch.setattr(module, "SENDING_SECONDS_MAX", SECONDS_MAX)
    target = Notes()
    with traced(fleet_with(traces=traces), target, COMMAND) as progress:
        progress.step("copy")
        progress.note("passed on")
    assert target.texts == ["passed on"]
    resources = [one for request in collector.received for one in request.resource_spans]
    texts = {one.key: one.value.string_value for found in resources for one in found.resource.attributes}
    assert texts["service.name"] == "cutline"
    spans = [span for found in resources for scope in found.scope_spans for span in scope.spans]
    assert {span.name for span in spans} == {"copy", "snapshot create"}
    (whole,) = [span for span in spans if not span.parent_span_id]
    assert {one.key: one.value.string_value for one in whole.attributes} == {
        "cutline.fleet": "shop", "cutline.kind": "create", "cutline.snapshot": "nightly",
        "cutline.operation": COMMAND.operation,
    }  # fmt: skip


@pytest.mark.parametrize(("status", "is_lost"), [(503, False), (400, True)])
def test_only_spans_that_are_given_up_are_said_to_be_lost(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, *, status: int, is_lost: bool
) -> None:
    """After 503 the SDK tries again."""
    monkeypatch.setenv(ENDPOINTS[1], collector.url)
    monkeypatch.setattr(module, "SENDING_SECONDS_MAX", SECONDS_MAX)
    collector.refusals.append(status)
    target = Notes()
    with traced(fleet_with(traces=True), target, COMMAND) as progress:
        progress.step("copy")
    assert bool(collector.received) != is_lost
    assert len(target.texts) == is_lost


@pytest.mark.parametrize(
    ("traces", "environment", "wanted"),
    [
        (None, {}, False),
        (None, {ENDPOINTS[0]: "http://127.0.0.1:1"}, True),
        (None, {ENDPOINTS[1]: "http://127.0.0.1:1", EXPORTER: "none"}, False),
        (None, {EXPORTER: "otlp"}, True),
        (False, {ENDPOINTS[1]: "http://127.0.0.1:1"}, False),
        (True, {}, True),
    ],
)
def test_spans_are_made_only_if_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], *, traces: bool | None, wanted: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "_make_provider", TracerProvider)
    target = Silent()
    with traced(fleet_with(traces=traces), target, COMMAND) as progress:
        assert isinstance(progress, Spans) == wanted
        assert (progress is target) != wanted


def test_without_the_package_an_option_is_refused_and_a_variable_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(TracesMissingError) as caught, traced(fleet_with(traces=True), Silent(), COMMAND):
        pytest.fail("it must be refused")
    assert caught.value.exit_code == 3
    assert "cutline[otel]" in caught.value.hint
    monkeypatch.setenv(ENDPOINTS[1], "http://127.0.0.1:1")
    target = Notes()
    with traced(fleet_with(traces=None), target, COMMAND) as progress:
        assert progress is target
    target.find_one("no spans will be sent", "cutline[otel]")


def test_a_collector_that_is_away_fails_nothing_and_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv(ENDPOINTS[1], f"http://127.0.0.1:{port}")
    target = Notes()
    # The first provider imports the exporter, which takes a while.
    module._make_provider().shutdown()
    began = time.monotonic()
    with traced(fleet_with(traces=None), target, COMMAND) as progress:
        progress.step("copy")
    assert time.monotonic() - began < module.SENDING_SECONDS_MAX + 3
    assert len(target.texts) == 1
    target.find_one("spans were lost")


@pytest.fixture
def silent_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It takes connections, and never answers; the SDK gives up after 2 s."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv(ENDPOINTS[1], f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
        # The first provider imports the exporter, which takes a while.
        module._make_provider().shutdown()
        yield


def kept_messages() -> list[logging.Handler]:
    return [one for one in logging.getLogger("opentelemetry").handlers if type(one).__module__ == module.__name__]


@pytest.mark.usefixtures("silent_collector")
def test_nothing_is_kept_of_the_messages_once_the_last_spans_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SENDING_SECONDS_MAX", 0.2)
    target = Notes()
    for _ in range(2):
        with traced(fleet_with(traces=None), target, COMMAND) as progress:
            progress.step("copy")
    assert len([text for text in target.texts if text.startswith("spans were lost: ")]) == 2
    senders = [one for one in threading.enumerate() if one.name == "last spans"]
    assert len(senders) >= 2
    for one in senders:
        one.join(SECONDS_MAX)
    assert kept_messages() == []


@pytest.fixture
def no_lasting_provider() -> Iterator[None]:
    """No provider that a test has made lives on, nor is one sent from at the end of this process."""
    module._lasting_provider.cache_clear()
    yield
    module._lasting_provider.cache_clear()
    atexit.unregister(module._send_rest)
    for one in kept_messages():
        logging.getLogger("opentelemetry").removeHandler(one)


@pytest.mark.usefixtures("silent_collector", "no_lasting_provider")
def test_operations_of_one_process_share_what_sends_and_wait_for_no_collector() -> None:
    began = time.monotonic()
    for _ in range(20):
        with traced(fleet_with(traces=None), Silent(), COMMAND, is_one_of_many=True) as progress:
            progress.step("copy")
    assert time.monotonic() - began < module.SENDING_SECONDS_MAX
    (kept,) = kept_messages()
    assert isinstance(kept, module._KeptMessage)
    # At the end of the process it is waited for as any other is.
    module._send_rest(module._lasting_provider(), kept)
    assert time.monotonic() - began < 2 * module.SENDING_SECONDS_MAX + 3


@pytest.mark.usefixtures("no_lasting_provider")
def test_the_spans_of_operations_of_one_process_are_sent_while_it_runs(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDPOINTS[1], collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    for kind in ("create", "check"):
        with traced(fleet_with(traces=None), Silent(), Command(kind), is_one_of_many=True):
            pass
        deadline = time.monotonic() + SECONDS_MAX
        while f"snapshot {kind}" not in span_names(collector):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert sorted(span_names(collector)) == ["snapshot check", "snapshot create"]


def test_without_spans_opentelemetry_is_not_imported() -> None:
    import subprocess

    program = (
        "import sys\nfrom pathlib import Path\nimport cutline.cli.commands.create\n"
        "from cutline.snapshots.listing.spans import traced\n"
        "print(*[name for name in sys.modules if name.startswith(('opentelemetry', 'prometheus_client'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""
