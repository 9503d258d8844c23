from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

import pytest

from cutline.storage.digest import digest
from cutline.storage.errors import SnapshotError
from cutline.storage.open import open_store
from cutline.storage.store import (
    AnswerLostError,
    ObjectExistsError,
    ObjectStore,
    StoreUnfitError,
    StoreUnreachableError,
)
from cutline.storage.storing import create_or_find
from tests.run.soak import first
from tests.s3.kinds import KINDS, PROXIED_KINDS, S3Place
from tests.s3.minio import minio_server
from tests.s3.proxy import ANSWER_LOST, REQUEST_LOST, Fault, S3Proxy, s3_proxy
from tests.s3.server import ACCESS_KEY, SECRET_KEY, S3Server, in_folder, s3_server
from tests.s3.versitygw import versitygw_server

WAIT_SECONDS_MAX = 20
LARGE_BYTES = 8 * 2**20
ATTEMPTS_MAX = 3
FEW = {"config_kwargs": {"retries": {"total_max_attempts": ATTEMPTS_MAX}}}
IMPATIENT = {"config_kwargs": {"retries": {"total_max_attempts": 2}, "read_timeout": 0.5}}
CONFLICT = Fault(arrives=False, status=409, code="ConditionalRequestConflict")
SLOW_DOWN = Fault(arrives=False, status=503, code="SlowDown")
SLOW_DOWN_AFTER = Fault(arrives=True, status=503, code="SlowDown")
TOO_MANY_AFTER = Fault(arrives=True, status=429, code="TooManyRequests")
FORBIDDEN = Fault(arrives=False, status=403, code="AccessDenied")
NOT_IMPLEMENTED = Fault(arrives=False, status=501, code="NotImplemented")
BROKEN_BEFORE = Fault(arrives=False, status=500, code="InternalError")
BROKEN_AFTER = Fault(arrives=True, status=500, code="InternalError")


OwnServer: TypeAlias = Callable[[], AbstractContextManager[S3Server]]
# The servers that a test may stop and kill.
PROGRAMS = {"s3": s3_server, "minio": minio_server, "versitygw": versitygw_server}
OWN_SERVERS = [PROGRAMS[kind] for kind in KINDS if kind != "named_s3"]


@pytest.fixture(scope="module", params=PROXIED_KINDS)
def server(request: pytest.FixtureRequest) -> S3Place:
    place: S3Place = request.getfixturevalue(request.param)
    return place


@dataclass(frozen=True, slots=True)
class Link:
    """A store, reached through a bad network and directly."""

    proxy: S3Proxy
    through: ObjectStore
    direct: ObjectStore


@pytest.fixture(scope="module")
def opened(server: S3Place) -> Iterator[Link]:
    if not server.endpoint_url:
        pytest.skip("AWS answers only under its own host names, so no proxy can stand in front of it")
    url = server.bucket("lines")
    with s3_proxy(server.endpoint_url) as proxy:
        through = open_store(url, server.options | FEW | {"endpoint_url": proxy.endpoint_url})
        yield Link(proxy, through, open_store(url, server.options))


@pytest.fixture
def link(opened: Link) -> Link:
    opened.proxy.reset()
    folder = uuid.uuid4().hex
    return Link(opened.proxy, in_folder(opened.through, folder), in_folder(opened.direct, folder))


@pytest.mark.parametrize(
    "faults",
    [[REQUEST_LOST], [CONFLICT, SLOW_DOWN], [BROKEN_BEFORE, REQUEST_LOST], [SLOW_DOWN, REQUEST_LOST]],
)
def test_a_put_that_did_not_arrive_is_repeated(link: Link, faults: list[Fault]) -> None:
    link.proxy.faults += faults
    link.through.create("object", b"ours")
    assert link.direct.read("object") == b"ours"
    assert link.proxy.puts == len(faults) + 1


@pytest.mark.parametrize(
    "faults",
    [[ANSWER_LOST], [BROKEN_AFTER], [ANSWER_LOST, ANSWER_LOST], [SLOW_DOWN_AFTER], [TOO_MANY_AFTER, SLOW_DOWN]],
)
def test_a_stored_put_whose_answer_was_lost_is_recognised(link: Link, faults: list[Fault]) -> None:
    link.proxy.faults += faults
    link.through.create("object", b"ours")
    assert link.direct.read("object") == b"ours"


@pytest.mark.parametrize("faults", [[ANSWER_LOST], [REQUEST_LOST], [BROKEN_AFTER], [SLOW_DOWN]])
def test_an_object_of_the_same_bytes_is_not_taken_for_ours(link: Link, faults: list[Fault]) -> None:
    link.direct.create("object", b"ours")
    link.proxy.faults += faults
    with pytest.raises(ObjectExistsError):
        link.through.create("object", b"ours")


@pytest.mark.parametrize("fault", [REQUEST_LOST, BROKEN_BEFORE, SLOW_DOWN])
def test_a_put_without_any_answer_is_indeterminate(link: Link, fault: Fault) -> None:
    link.proxy.faults += [fault] * ATTEMPTS_MAX
    with pytest.raises(AnswerLostError, match="object"):
        link.through.create("object", b"ours")
    assert not link.direct.exists("object")


def test_a_put_refused_after_a_lost_answer_is_indeterminate(link: Link) -> None:
    link.proxy.faults += [ANSWER_LOST, FORBIDDEN]
    with pytest.raises(AnswerLostError):
        link.through.create("object", b"ours")
    assert link.direct.read("object") == b"ours"


@pytest.mark.parametrize("fault", first([SLOW_DOWN_AFTER, TOO_MANY_AFTER, BROKEN_AFTER]))
def test_a_put_that_was_refused_after_it_took_effect_is_read_back(link: Link, fault: Fault) -> None:
    # Whoever refuses may stand before the store.
    link.proxy.faults += [fault, *[SLOW_DOWN] * (ATTEMPTS_MAX - 1)]
    with pytest.raises(AnswerLostError, match="503 SlowDown"):
        link.through.create("object", b"ours")
    assert link.direct.read("object") == b"ours"
    link.proxy.faults += [fault, *[SLOW_DOWN] * (ATTEMPTS_MAX - 1)]
    assert create_or_find(link.through, "second", b"ours") == digest(b"ours")
    assert link.direct.list("") == ["object", "second"]


@pytest.mark.parametrize(("fault", "puts"), [(FORBIDDEN, 1), (CONFLICT, ATTEMPTS_MAX)])
def test_a_definite_refusal_means_that_nothing_was_stored(link: Link, fault: Fault, puts: int) -> None:
    link.proxy.faults += [fault] * ATTEMPTS_MAX
    with pytest.raises(StoreUnreachableError, match=f"{fault.status} {fault.code}"):
        link.through.create("object", b"ours")
    assert link.proxy.puts == puts
    assert not link.direct.exists("object")


def test_a_server_without_conditional_puts_is_unfit(link: Link) -> None:
    link.proxy.faults.append(NOT_IMPLEMENTED)
    with pytest.raises(StoreUnfitError, match="does not implement conditional puts"):
        link.through.create("object", b"ours")


def test_a_missing_bucket_is_named_as_the_reason(server: S3Place) -> None:
    store = open_store(f"s3://never-made-{uuid.uuid4().hex}/folder", server.options)
    asks: list[Callable[[], object]] = [
        lambda: store.create("object", b"x"),
        lambda: store.read("object"),
        lambda: store.list(""),
    ]
    for ask in asks:
        with pytest.raises(StoreUnreachableError, match="bucket"):
            ask()


def test_a_refused_connection_is_reported_at_once_and_without_secrets() -> None:
    options = FEW | {"endpoint_url": "http://127.0.0.1:9", "key": ACCESS_KEY, "secret": SECRET_KEY}
    store = open_store("s3://bucket/folder", options)
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


def stop(server: S3Server) -> None:
    """Stop the server's process, and wait until all of its threads have stopped: until then it may answer."""
    server.process.send_signal(signal.SIGSTOP)
    os.waitpid(server.process.pid, os.WUNTRACED)


@pytest.mark.parametrize("own_server", OWN_SERVERS)
def test_a_server_killed_during_a_put_leaves_it_indeterminate_and_then_is_unreachable(own_server: OwnServer) -> None:
    with own_server() as dying:
        store = open_store(dying.bucket("bucket"), dying.options | FEW)
        store.create("before", b"x")
        stop(dying)
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


@pytest.mark.parametrize("own_server", OWN_SERVERS)
def test_a_request_to_a_hanging_server_times_out(own_server: OwnServer) -> None:
    with own_server() as hanging:
        url = hanging.bucket("bucket")
        patient, store = (open_store(url, hanging.options | options) for options in (FEW, IMPATIENT))
        # On a busy machine, a put may take longer than the impatient store waits.
        patient.create("before", b"x")
        stop(hanging)
        began = time.monotonic()
        # aiohttp starts no time-out before the body is sent, and a hanging server never asks for it.
        with pytest.raises(AnswerLostError):
            store.create("object", b"x")
        assert time.monotonic() - began < WAIT_SECONDS_MAX
        hanging.process.send_signal(signal.SIGCONT)
        assert patient.read("before") == b"x"


def assert_no_secret_in(error: SnapshotError) -> None:
    assert SECRET_KEY not in f"{error.message} {error.hint} {error.details}"
