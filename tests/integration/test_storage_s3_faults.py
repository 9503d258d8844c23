from __future__ import annotations

import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from storage.errors import SnapshotError
from storage.open import open_store
from storage.s3 import PUT_ATTEMPTS
from storage.store import (
    AnswerLostError,
    ObjectExistsError,
    ObjectStore,
    StoreUnfitError,
    StoreUnreachableError,
)
from tests.s3_proxy import ANSWER_LOST, REQUEST_LOST, Fault, S3Proxy, s3_proxy
from tests.s3_server import SECRET_KEY, S3Server, in_folder, s3_server

WAIT_SECONDS_MAX = 20
LARGE_BYTES = 8 * 2**20
IMPATIENT = {"config_kwargs": {"read_timeout": 0.3, "connect_timeout": 0.3}}
CONFLICT = Fault(arrives=False, status=409, code="ConditionalRequestConflict")
SLOW_DOWN = Fault(arrives=False, status=503, code="SlowDown")
FORBIDDEN = Fault(arrives=False, status=403, code="AccessDenied")
NOT_IMPLEMENTED = Fault(arrives=False, status=501, code="NotImplemented")
BROKEN_BEFORE = Fault(arrives=False, status=500, code="InternalError")
BROKEN_AFTER = Fault(arrives=True, status=500, code="InternalError")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@dataclass(frozen=True, slots=True)
class Line:
    """A store as seen through a bad network, and directly."""

    proxy: S3Proxy
    through: ObjectStore
    direct: ObjectStore


@pytest.fixture(scope="module")
def opened(server: S3Server) -> Iterator[Line]:
    url = server.bucket("lines")
    with s3_proxy(server.endpoint_url) as proxy:
        through = open_store(url, server.options | {"endpoint_url": proxy.endpoint_url})
        yield Line(proxy, through, open_store(url, server.options))


@pytest.fixture
def line(opened: Line) -> Line:
    opened.proxy.faults.clear()
    opened.proxy.puts = 0
    folder = f"lines/{uuid.uuid4().hex}"
    return Line(opened.proxy, in_folder(opened.through, folder), in_folder(opened.direct, folder))


@pytest.mark.parametrize(
    "faults",
    [[REQUEST_LOST], [CONFLICT, SLOW_DOWN], [BROKEN_BEFORE, REQUEST_LOST], [SLOW_DOWN, REQUEST_LOST]],
)
def test_a_put_that_did_not_arrive_is_repeated(line: Line, faults: list[Fault]) -> None:
    line.proxy.faults += faults
    line.through.create("object", b"ours")
    assert line.direct.read("object") == b"ours"
    assert line.proxy.puts == len(faults) + 1


@pytest.mark.parametrize("faults", [[ANSWER_LOST], [BROKEN_AFTER], [ANSWER_LOST, ANSWER_LOST]])
def test_a_stored_put_whose_answer_was_lost_is_recognised(line: Line, faults: list[Fault]) -> None:
    line.proxy.faults += faults
    line.through.create("object", b"ours")
    assert line.direct.read("object") == b"ours"


@pytest.mark.parametrize("faults", [[ANSWER_LOST], [REQUEST_LOST], [BROKEN_AFTER], [SLOW_DOWN]])
def test_an_object_of_the_same_bytes_is_not_taken_for_ours(line: Line, faults: list[Fault]) -> None:
    line.direct.create("object", b"ours")
    line.proxy.faults += faults
    with pytest.raises(ObjectExistsError):
        line.through.create("object", b"ours")


@pytest.mark.parametrize("fault", [REQUEST_LOST, BROKEN_BEFORE])
def test_no_answer_at_all_leaves_it_open_whether_it_was_stored(line: Line, fault: Fault) -> None:
    line.proxy.faults += [fault] * PUT_ATTEMPTS
    with pytest.raises(AnswerLostError, match="object"):
        line.through.create("object", b"ours")
    assert not line.direct.exists("object")


def test_a_refusal_after_a_lost_answer_leaves_it_open_too(line: Line) -> None:
    line.proxy.faults += [ANSWER_LOST, FORBIDDEN]
    with pytest.raises(AnswerLostError):
        line.through.create("object", b"ours")
    assert line.direct.read("object") == b"ours"


@pytest.mark.parametrize(("fault", "puts"), [(FORBIDDEN, 1), (SLOW_DOWN, PUT_ATTEMPTS), (CONFLICT, PUT_ATTEMPTS)])
def test_a_definite_no_means_that_nothing_was_stored(line: Line, fault: Fault, puts: int) -> None:
    line.proxy.faults += [fault] * PUT_ATTEMPTS
    with pytest.raises(StoreUnreachableError, match=f"{fault.status} {fault.code}"):
        line.through.create("object", b"ours")
    assert line.proxy.puts == puts
    assert not line.direct.exists("object")


def test_a_server_without_conditional_puts_is_unfit(line: Line) -> None:
    line.proxy.faults.append(NOT_IMPLEMENTED)
    with pytest.raises(StoreUnfitError, match="not implemented"):
        line.through.create("object", b"ours")


def test_a_missing_bucket_is_named_as_the_reason(server: S3Server) -> None:
    store = open_store("s3://never-made/folder", server.options)
    asks: list[Callable[[], object]] = [
        lambda: store.create("object", b"x"),
        lambda: store.read("object"),
        lambda: store.list(""),
    ]
    for ask in asks:
        with pytest.raises(StoreUnreachableError, match="bucket"):
            ask()


def test_nobody_listening_is_told_at_once_and_without_secrets(server: S3Server) -> None:
    store = open_store("s3://bucket/folder", server.options | {"endpoint_url": "http://127.0.0.1:9"})
    began = time.monotonic()
    asks: list[Callable[[], object]] = [
        lambda: store.create("object", b"x"),
        lambda: store.exists("object"),
        lambda: store.list(""),
    ]
    for ask in asks:
        with pytest.raises(StoreUnreachableError, match="can't connect") as raised:
            ask()
        assert_no_secret_in(raised.value)
    assert time.monotonic() - began < WAIT_SECONDS_MAX


def test_a_server_killed_during_a_put_leaves_it_open_and_then_is_unreachable() -> None:
    with s3_server() as dying:
        store = open_store(dying.bucket("bucket"), dying.options)
        store.create("before", b"x")
        dying.process.send_signal(signal.SIGSTOP)
        killing = threading.Timer(0.5, dying.process.kill)
        killing.start()
        with pytest.raises(AnswerLostError, match="object") as raised:
            store.create("object", b"x" * LARGE_BYTES)
        killing.join()
        assert_no_secret_in(raised.value)
        with pytest.raises(StoreUnreachableError):
            store.read("before")
        with pytest.raises(StoreUnreachableError):
            store.create("object", b"x")


def test_a_server_that_hangs_is_given_up() -> None:
    with s3_server() as hanging:
        store = open_store(hanging.bucket("bucket"), hanging.options | IMPATIENT)
        store.create("before", b"x")
        hanging.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        # aiohttp starts no time-out before the body is sent, and a hanging server never asks for it.
        with pytest.raises(AnswerLostError):
            store.create("object", b"x")
        assert time.monotonic() - began < WAIT_SECONDS_MAX
        hanging.process.send_signal(signal.SIGCONT)
        assert store.read("before") == b"x"


def assert_no_secret_in(error: SnapshotError) -> None:
    assert SECRET_KEY not in f"{error.message} {error.hint} {error.details}"
