"""The endpoint serves what was published last, and waits for nobody."""

from __future__ import annotations

import http.client
import socket
import threading
import time

import pytest

import cutline.snapshots.listing.metrics_endpoint as module
from cutline.fleet.config import ListenAddress
from cutline.snapshots.listing.metrics_endpoint import EndpointTakenError, MetricsEndpoint

HOST, SECONDS_MAX = "127.0.0.1", 30.0


def new_endpoint(fresh_seconds: float = 60.0) -> MetricsEndpoint:
    return MetricsEndpoint(ListenAddress(HOST, 0), fresh_seconds)


def answer(endpoint: MetricsEndpoint, path: str, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(HOST, endpoint.port, timeout=10)
    connection.request(method, path)
    found = connection.getresponse()
    body = found.read()
    assert found.headers["Server"] == "cutline"
    connection.close()
    return found.status, body


def test_what_was_published_last_is_served() -> None:
    with new_endpoint() as endpoint:
        assert answer(endpoint, "/metrics")[0] == 503
        assert answer(endpoint, "/healthz")[0] == 503
        for text in (b"one 1\n", b"two 2\n"):
            endpoint.publish(text)
            assert answer(endpoint, "/metrics") == (200, text)
        assert answer(endpoint, "/metrics?x=1") == (200, b"two 2\n")
        assert answer(endpoint, "/metrics", "HEAD") == (200, b"")
        assert answer(endpoint, "/healthz") == (200, b"ok\n")
        assert answer(endpoint, "/etc/passwd")[0] == 404
        assert answer(endpoint, "/metrics", "POST")[0] == 501


def test_health_ends_when_nothing_is_gathered_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now_seconds = time.monotonic()
    with new_endpoint(fresh_seconds=60.0) as endpoint, monkeypatch.context() as clock:
        clock.setattr(module.time, "monotonic", lambda: now_seconds)
        endpoint.publish(b"one 1\n")
        now_seconds += 60.0
        assert answer(endpoint, "/healthz")[0] == 200
        now_seconds += 0.1
        assert answer(endpoint, "/healthz")[0] == 503
        assert answer(endpoint, "/metrics")[0] == 200


def test_it_listens_where_it_is_told_to_and_nowhere_else() -> None:
    with new_endpoint() as endpoint, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", endpoint.port), timeout=5)


def test_an_address_that_is_taken_is_named() -> None:
    with new_endpoint() as endpoint, pytest.raises(EndpointTakenError) as caught:
        MetricsEndpoint(ListenAddress(HOST, endpoint.port), 60.0)
    assert f"{HOST}:{endpoint.port}" in caught.value.message
    assert "[metrics] listen" in caught.value.hint


def test_silent_clients_starve_nobody_however_many_they_are() -> None:
    with new_endpoint() as endpoint:
        endpoint.publish(b"one 1\n")
        idle = [socket.create_connection((HOST, endpoint.port), timeout=SECONDS_MAX) for _ in range(30)]
        for _ in range(3):
            assert answer(endpoint, "/healthz") == (200, b"ok\n")
            assert answer(endpoint, "/metrics") == (200, b"one 1\n")
        # The oldest were closed, and no more threads are left than connections may be open.
        for one in idle[: -module.REQUESTS_MAX]:
            assert one.recv(1) == b""
        deadline = time.monotonic() + SECONDS_MAX
        while len(threads := [one.name for one in threading.enumerate() if "process_request_thread" in one.name]) > (
            module.REQUESTS_MAX
        ):
            # Threads of closed connections end soon.
            assert time.monotonic() < deadline, threads
            time.sleep(0.01)
        for one in idle:
            one.close()


def test_who_sends_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._Handler, "timeout", 0.2)
    with new_endpoint() as endpoint, socket.create_connection((HOST, endpoint.port), timeout=SECONDS_MAX) as idle:
        assert idle.recv(1) == b""


def test_it_ends_at_once_though_a_client_is_connected() -> None:
    began = time.monotonic()
    with new_endpoint() as endpoint, socket.create_connection((HOST, endpoint.port)):
        pass
    assert time.monotonic() - began < 5
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, endpoint.port), timeout=5)
