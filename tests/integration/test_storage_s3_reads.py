"""Reads, listings and deletions over a bad network: what passes is got over, and nothing short is taken for whole."""

from __future__ import annotations

import os
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from storage.errors import SnapshotError
from storage.fsspec_store import FsspecStore
from storage.open import open_store
from storage.store import DeletionRefusedError, ObjectStore, StoreUnreachableError
from tests.s3_kinds import DRAWN_KINDS, S3Place
from tests.s3_proxy import Fault, S3Proxy, s3_proxy
from tests.s3_server import ACCESS_KEY, in_folder

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
class Line:
    """A store as seen through a bad network."""

    proxy: S3Proxy
    store: ObjectStore


@pytest.fixture(scope="module", params=DRAWN_KINDS)
def opened(request: pytest.FixtureRequest) -> Iterator[Line]:
    server: S3Place = request.getfixturevalue(request.param)
    if not server.endpoint_url:
        pytest.skip("AWS answers only under its own names, so no proxy that loses answers can stand before it")
    url = server.bucket("reads")
    with s3_proxy(server.endpoint_url) as proxy:
        yield Line(proxy, open_store(url, server.options | FEW | {"endpoint_url": proxy.endpoint_url}))


@pytest.fixture
def line(opened: Line) -> Line:
    store = in_folder(opened.store, uuid.uuid4().hex)
    store.create("a/object", BODY)
    opened.proxy.forget()
    return Line(opened.proxy, store)


@pytest.mark.parametrize("name", ASKS)
def test_a_request_that_failed_is_repeated(line: Line, name: str) -> None:
    operation, ask, expected = ASKS[name]
    line.proxy.faults += [
        Fault(arrives=False, of=operation),
        Fault(arrives=False, status=500, code="InternalError", of=operation),
    ]
    assert ask(line.store) == expected
    assert line.proxy.asked[operation] >= 3
    assert not line.proxy.faults


@pytest.mark.parametrize("name", ASKS)
def test_requests_are_not_repeated_for_ever(line: Line, name: str) -> None:
    operation, ask, _ = ASKS[name]
    line.proxy.faults += [Fault(arrives=False, status=502, code="BadGateway", of=operation)] * 20
    with pytest.raises(StoreUnreachableError, match="502"):
        ask(line.store)
    assert line.proxy.asked[operation] == ATTEMPTS_MAX


@pytest.mark.parametrize("name", ["read", "range", "list", "unfinished"])
def test_an_answer_that_ends_early_is_asked_for_again(line: Line, name: str) -> None:
    operation, ask, expected = ASKS[name]
    line.proxy.faults += [Fault(arrives=True, ends_early=True, of=operation)] * (ATTEMPTS_MAX - 1)
    assert ask(line.store) == expected
    assert line.proxy.asked[operation] == ATTEMPTS_MAX


@pytest.mark.parametrize("name", ["read", "range", "list", "unfinished"])
def test_an_answer_that_always_ends_early_is_never_short_data(line: Line, name: str) -> None:
    operation, ask, _ = ASKS[name]
    line.proxy.faults += [Fault(arrives=True, ends_early=True, of=operation)] * ATTEMPTS_MAX
    with pytest.raises(StoreUnreachableError, match="the connection broke"):
        ask(line.store)
    assert line.proxy.asked[operation] == ATTEMPTS_MAX


@pytest.mark.parametrize("name", ["read", "list", "delete"])
def test_a_refusal_is_final(line: Line, name: str) -> None:
    operation, ask, _ = ASKS[name]
    line.proxy.faults += [Fault(arrives=False, status=403, code="AccessDenied", of=operation)]
    with pytest.raises(DeletionRefusedError if name == "delete" else StoreUnreachableError, match="403 AccessDenied"):
        ask(line.store)
    assert line.proxy.asked[operation] == 1


def test_a_refused_head_is_told_in_the_words_of_the_same_get(line: Line) -> None:
    line.proxy.faults += [Fault(arrives=False, status=403, of=of) for of in ("HeadObject", "GetObject")]
    line.proxy.faults[1] = Fault(arrives=False, status=403, code="InvalidObjectState", of="GetObject")
    with pytest.raises(StoreUnreachableError, match="403 InvalidObjectState"):
        line.store.size("a/object")


def test_a_store_that_is_asked_too_much_is_asked_later_by_all(line: Line) -> None:
    line.proxy.faults.append(
        Fault(arrives=False, status=503, code="SlowDown", of="GetObject", headers={"Retry-After": "2"})
    )
    began = time.monotonic()

    def reading() -> float:
        assert line.store.read("a/object") == BODY
        return time.monotonic() - began

    assert isinstance(line.store, FsspecStore)
    pace = line.store.filesystem.pace

    def listing() -> float:
        while pace.free_at < began:  # until the refusal has come
            time.sleep(0.01)
        assert line.store.list("") == ["a/object"]
        return time.monotonic() - began

    with ThreadPoolExecutor(2) as threads:
        read, listed = threads.submit(reading), threads.submit(listing)
        assert read.result() >= 2
        assert listed.result() >= 2
    assert line.proxy.asked["GetObject"] == 2


@pytest.mark.parametrize("name", ASKS)
def test_what_a_server_says_is_in_no_traceback(line: Line, name: str) -> None:
    operation, ask, _ = ASKS[name]
    # The proxy's answers quote the request's credentials.
    line.proxy.faults += [Fault(arrives=False, status=403, code="Strange", of=of) for of in (operation, "GetObject")]
    with pytest.raises(SnapshotError) as raised:
        ask(line.store)
    shown = "".join(traceback.format_exception(raised.value))
    assert "Strange" in shown
    assert "not for" not in shown
    assert ACCESS_KEY not in shown
