"""Reads, listings and deletes over a bad network: transient faults are retried, and short data is never accepted."""

from __future__ import annotations

import os
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from cutline.storage.errors import SnapshotError
from cutline.storage.open import open_store
from cutline.storage.s3 import S3Store
from cutline.storage.s3_client import ANSWER_SECONDS_MAX
from cutline.storage.store import (
    DeletionRefusedError,
    ObjectStore,
    RequestStoppedError,
    StoreUnreachableError,
    stoppable_requests,
)
from tests.s3.kinds import PROXIED_KINDS, S3Place
from tests.s3.proxy import Fault, S3Proxy, s3_proxy
from tests.s3.server import ACCESS_KEY, in_folder

ATTEMPTS_MAX = 3
FEW = {"config_kwargs": {"retries": {"total_max_attempts": ATTEMPTS_MAX}}}
BODY = os.urandom(300_000)
ASKS: dict[str, tuple[str, Callable[[ObjectStore], object], object]] = {
    "read": ("GetObject", lambda store: store.read("a/object"), BODY),
    "range": ("GetObject", lambda store: store.read_range("a/object", 1000, 200_000), BODY[1000:201_000]),
    "size": ("HeadObject", lambda store: store.size("a/object"), len(BODY)),
    "list": ("ListObjectsV2", lambda store: store.list(""), ["a/object"]),
    "children": ("ListObjectsV2", lambda store: store.list_children(""), ["a"]),
    "delete": ("DeleteObject", lambda store: store.delete("a/object"), None),
    "unfinished": ("ListMultipartUploads", lambda store: store.unfinished(), []),
}


@dataclass(frozen=True, slots=True)
class Link:
    """A store, reached through a bad network."""

    proxy: S3Proxy
    store: ObjectStore


@pytest.fixture(scope="module", params=PROXIED_KINDS)
def opened(request: pytest.FixtureRequest) -> Iterator[Link]:
    server: S3Place = request.getfixturevalue(request.param)
    if not server.endpoint_url:
        pytest.skip("AWS answers only under its own host names, so no proxy can stand in front of it")
    url = server.bucket("reads")
    with s3_proxy(server.endpoint_url) as proxy:
        yield Link(proxy, open_store(url, server.options | FEW | {"endpoint_url": proxy.endpoint_url}))


@pytest.fixture
def link(opened: Link) -> Link:
    store = in_folder(opened.store, uuid.uuid4().hex)
    store.create("a/object", BODY)
    opened.proxy.reset()
    return Link(opened.proxy, store)


@pytest.mark.parametrize("name", ASKS)
def test_a_failed_request_is_repeated(link: Link, name: str) -> None:
    operation, ask, expected = ASKS[name]
    link.proxy.faults += [
        Fault(arrives=False, of=operation),
        Fault(arrives=False, status=500, code="InternalError", of=operation),
    ]
    assert ask(link.store) == expected
    assert link.proxy.requests[operation] >= 3
    assert not link.proxy.faults


@pytest.mark.parametrize("name", ASKS)
def test_requests_are_not_repeated_for_ever(link: Link, name: str) -> None:
    operation, ask, _ = ASKS[name]
    link.proxy.faults += [Fault(arrives=False, status=502, code="BadGateway", of=operation)] * 20
    with pytest.raises(StoreUnreachableError, match="502"):
        ask(link.store)
    assert link.proxy.requests[operation] == ATTEMPTS_MAX


@pytest.mark.parametrize("name", ["read", "range", "list", "unfinished"])
def test_a_truncated_answer_is_requested_again(link: Link, name: str) -> None:
    operation, ask, expected = ASKS[name]
    link.proxy.faults += [Fault(arrives=True, ends_early=True, of=operation)] * (ATTEMPTS_MAX - 1)
    assert ask(link.store) == expected
    assert link.proxy.requests[operation] == ATTEMPTS_MAX


@pytest.mark.parametrize("name", ["read", "range", "list", "unfinished"])
def test_an_answer_that_is_always_truncated_is_an_error(link: Link, name: str) -> None:
    operation, ask, _ = ASKS[name]
    link.proxy.faults += [Fault(arrives=True, ends_early=True, of=operation)] * ATTEMPTS_MAX
    with pytest.raises(StoreUnreachableError, match=r"its answer was cut short|the connection broke"):
        ask(link.store)
    assert link.proxy.requests[operation] == ATTEMPTS_MAX


@pytest.mark.parametrize("name", ["read", "range", "size", "list"])
def test_a_request_that_nobody_waits_for_any_more_ends(link: Link, name: str) -> None:
    operation, ask, _ = ASKS[name]
    silence, began = threading.Event(), time.monotonic()
    link.proxy.faults.append(Fault(arrives=True, of=operation, held=silence))
    try:
        with stoppable_requests() as stop:
            threading.Timer(0.1, stop).start()
            with pytest.raises(RequestStoppedError):
                ask(link.store)
    finally:
        silence.set()
    assert time.monotonic() - began < ANSWER_SECONDS_MAX / 2


@pytest.mark.parametrize("name", ["read", "list", "delete"])
def test_a_refusal_is_final(link: Link, name: str) -> None:
    operation, ask, _ = ASKS[name]
    link.proxy.faults += [Fault(arrives=False, status=403, code="AccessDenied", of=operation)]
    with pytest.raises(DeletionRefusedError if name == "delete" else StoreUnreachableError, match="403 AccessDenied"):
        ask(link.store)
    assert link.proxy.requests[operation] == 1


def test_a_refused_head_is_reported_with_the_error_of_the_same_get(link: Link) -> None:
    link.proxy.faults += [Fault(arrives=False, status=403, of=of) for of in ("HeadObject", "GetObject")]
    link.proxy.faults[1] = Fault(arrives=False, status=403, code="InvalidObjectState", of="GetObject")
    with pytest.raises(StoreUnreachableError, match="403 InvalidObjectState"):
        link.store.size("a/object")


def test_one_throttled_request_delays_all_requests(link: Link) -> None:
    link.proxy.faults.append(
        Fault(arrives=False, status=503, code="SlowDown", of="GetObject", headers={"Retry-After": "2"})
    )
    began = time.monotonic()

    def read_timed() -> float:
        assert link.store.read("a/object") == BODY
        return time.monotonic() - began

    assert isinstance(link.store, S3Store)
    pace = link.store.client.pace

    def list_timed() -> float:
        while pace.free_at < began:  # until the refusal has arrived
            time.sleep(0.01)
        assert link.store.list("") == ["a/object"]
        return time.monotonic() - began

    with ThreadPoolExecutor(2) as threads:
        read, listed = threads.submit(read_timed), threads.submit(list_timed)
        assert read.result() >= 2
        assert listed.result() >= 2
    assert link.proxy.requests["GetObject"] == 2


@pytest.mark.parametrize("name", ASKS)
def test_the_message_of_a_server_is_in_no_traceback(link: Link, name: str) -> None:
    operation, ask, _ = ASKS[name]
    # The proxy's answers quote the request's credentials.
    link.proxy.faults += [Fault(arrives=False, status=403, code="Strange", of=of) for of in (operation, "GetObject")]
    with pytest.raises(SnapshotError) as raised:
        ask(link.store)
    shown = "".join(traceback.format_exception(raised.value))
    assert "Strange" in shown
    assert "not for" not in shown
    assert ACCESS_KEY not in shown
