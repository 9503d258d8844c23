"""Large S3 objects in parts: create-once under faults, and what is left where an upload does not come to its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import storage.s3_multipart
from storage.fsspec_store import FsspecStore
from storage.open import open_store
from storage.s3_multipart import PART_BYTES
from storage.store import AnswerLostError, DeletionRefusedError, ObjectExistsError, StoreUnreachableError, Unfinished
from tests.s3_kinds import DRAWN_KINDS, S3Place
from tests.s3_proxy import Fault, S3Proxy, s3_proxy

WAIT_SECONDS_MAX = 30
SMALL_PART_BYTES = 5 * 2**20  # S3 takes no smaller part but the last
BODY = os.urandom(2 * SMALL_PART_BYTES + 7)
ATTEMPTS_MAX = 3
FEW = {"config_kwargs": {"retries": {"total_max_attempts": ATTEMPTS_MAX}}}
COMPLETE, PART, BEGIN = "CompleteMultipartUpload", "UploadPart", "CreateMultipartUpload"
UPLOADER = """
import sys
from storage.open import open_store
url, endpoint, key, secret = sys.argv[1:]
open_store(url, {"endpoint_url": endpoint, "key": key, "secret": secret}).create("killed/large", bytes(96 * 2**20))
"""


@dataclass(frozen=True, slots=True)
class Line:
    """A store as seen through a bad network, and directly."""

    proxy: S3Proxy
    through: FsspecStore
    direct: FsspecStore


@pytest.fixture(scope="module", params=DRAWN_KINDS)
def server(request: pytest.FixtureRequest) -> S3Place:
    place: S3Place = request.getfixturevalue(request.param)
    return place


@pytest.fixture(scope="module")
def opened(server: S3Place) -> Iterator[Line]:
    if not server.endpoint_url:
        pytest.skip("AWS answers only under its own names, so no proxy that loses answers can stand before it")
    url = server.bucket("parts")
    with s3_proxy(server.endpoint_url) as proxy:
        through = open_store(url, server.options | FEW | {"endpoint_url": proxy.endpoint_url})
        direct = open_store(url, server.options)
        assert isinstance(through, FsspecStore)
        assert isinstance(direct, FsspecStore)
        yield Line(proxy, through, direct)


@pytest.fixture
def line(opened: Line, monkeypatch: pytest.MonkeyPatch) -> Line:
    opened.proxy.forget()
    monkeypatch.setattr(storage.s3_multipart, "PART_BYTES", SMALL_PART_BYTES)
    folder = uuid.uuid4().hex
    through, direct = (replace(one, root=f"{one.root}/{folder}") for one in (opened.through, opened.direct))
    return Line(opened.proxy, through, direct)


def test_a_part_is_repeated_by_itself(line: Line) -> None:
    line.proxy.faults += [
        Fault(arrives=False, of=PART),
        Fault(arrives=True, of=PART),
        Fault(arrives=False, status=500, code="InternalError", of=PART),
        Fault(arrives=True, status=503, code="SlowDown", of=BEGIN),
    ]
    line.through.create_in_parts("object", BODY)
    assert line.direct.read("object") == BODY
    assert line.proxy.asked[PART] == 3 + 3
    # The upload that was begun without an answer is what the store still has.
    assert [(one.key, one.size_bytes) for one in line.direct.unfinished()] == [("object", 0)]


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(arrives=True, of=COMPLETE)],
        [Fault(arrives=True, status=500, code="InternalError", of=COMPLETE)],
        [Fault(arrives=True, of=COMPLETE), Fault(arrives=False, status=412, code="PreconditionFailed", of=COMPLETE)],
        [Fault(arrives=True, of=COMPLETE), Fault(arrives=False, status=404, code="NoSuchUpload", of=COMPLETE)],
        [Fault(arrives=False, of=COMPLETE), Fault(arrives=False, status=409, code="Conflict", of=COMPLETE)],
    ],
)
def test_a_lost_answer_to_the_completion_is_settled(line: Line, faults: list[Fault]) -> None:
    line.proxy.faults += faults
    line.through.create_in_parts("object", BODY)
    assert line.direct.read("object") == BODY
    assert line.direct.unfinished() == []


@pytest.mark.parametrize("fault", [None, Fault(arrives=True, of=COMPLETE), Fault(arrives=False, of=COMPLETE)])
def test_an_object_of_the_same_bytes_is_not_taken_for_ours(line: Line, fault: Fault | None) -> None:
    line.direct.create("object", BODY)
    line.proxy.faults += [fault] if fault else []
    with pytest.raises(ObjectExistsError):
        line.through.create_in_parts("object", BODY)
    assert line.direct.unfinished() == []


def test_no_answer_to_the_completion_leaves_it_open(line: Line) -> None:
    line.proxy.faults += [Fault(arrives=False, of=COMPLETE)] * ATTEMPTS_MAX
    with pytest.raises(AnswerLostError):
        line.through.create_in_parts("object", BODY)
    assert not line.direct.exists("object")
    assert line.direct.unfinished() == []


def test_a_refused_head_after_a_taken_key_leaves_it_open(line: Line) -> None:
    line.direct.create("object", b"another")
    line.proxy.faults += [
        Fault(arrives=False, status=403, code="AccessDenied", of=of) for of in ("HeadObject", "GetObject")
    ]
    with pytest.raises(AnswerLostError, match="403 AccessDenied"):
        line.through.create_in_parts("object", BODY)


@pytest.mark.parametrize(("operation", "parts"), [(BEGIN, 0), (PART, 1), (COMPLETE, 3)])
def test_an_upload_that_fails_is_ended(line: Line, operation: str, parts: int) -> None:
    line.proxy.faults.append(Fault(arrives=False, status=403, code="AccessDenied", of=operation))
    with pytest.raises(StoreUnreachableError, match="403 AccessDenied"):
        line.through.create_in_parts("object", BODY)
    assert line.proxy.asked[PART] >= parts
    assert not line.direct.exists("object")
    assert line.direct.unfinished() == []


def test_parts_that_are_under_way_arrive_before_the_upload_is_ended(line: Line) -> None:
    held = threading.Event()
    line.proxy.faults += [Fault(arrives=True, held=held, of=PART)] * 2
    line.proxy.faults.append(Fault(arrives=False, status=403, code="AccessDenied", of=PART))
    arriving = threading.Timer(0.5, held.set)
    arriving.start()
    with pytest.raises(StoreUnreachableError, match="403 AccessDenied"):
        line.through.create_in_parts("object", BODY)
    assert held.is_set()
    arriving.join()
    assert line.proxy.asked["AbortMultipartUpload"] >= 2
    assert line.direct.unfinished() == []


def test_ctrl_c_ends_the_upload(line: Line) -> None:
    def interrupt() -> None:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not line.proxy.asked[PART] and time.monotonic() < deadline:
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    main = threading.main_thread().ident
    assert main
    line.proxy.delay_seconds = 0.5
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            line.through.create_in_parts("object", BODY)
    finally:
        line.proxy.delay_seconds = 0
        interrupting.join()
    assert line.proxy.asked[PART] > 0
    assert line.proxy.asked["AbortMultipartUpload"] > 0
    assert line.direct.unfinished() == []
    assert not line.direct.exists("object")


def test_what_a_killed_process_leaves_is_found_and_abandoned(server: S3Place, opened: Line) -> None:
    url = f"{server.bucket('killed')}/folder"
    opened.proxy.forget()
    opened.proxy.delay_seconds = 0.3
    before = datetime.now(UTC) - timedelta(seconds=2)
    command = [sys.executable, "-c", UPLOADER, url, opened.proxy.endpoint_url]
    root = Path(__file__).resolve().parents[2]
    env = os.environ | {"PYTHONPATH": str(root)}
    with subprocess.Popen([*command, str(server.options["key"]), str(server.options["secret"])], env=env) as process:
        try:
            deadline = time.monotonic() + WAIT_SECONDS_MAX
            # Four parts at once: with the fifth asked for, one is there.
            while opened.proxy.asked[PART] < 5 and time.monotonic() < deadline:
                time.sleep(0.02)
        finally:
            process.kill()
    opened.proxy.delay_seconds = 0
    store = open_store(url, server.options)
    time.sleep(0.5)  # a part that was on its way may still come
    (left,) = store.unfinished()
    assert left.key == "killed/large"
    assert left.size_bytes >= PART_BYTES
    assert left.size_bytes % PART_BYTES == 0
    assert before < left.began_at <= datetime.now(UTC)
    assert store.list("") == []
    assert open_store(f"{url}/elsewhere", server.options).unfinished() == []
    store.abandon(left)
    store.abandon(left)
    assert store.unfinished() == []
    store.abandon(Unfinished("never/was", "no-such-upload", 0, before))


def test_a_refused_end_of_an_upload_is_told_as_such(line: Line) -> None:
    line.proxy.faults.append(Fault(arrives=False, status=403, code="AccessDenied", of="AbortMultipartUpload"))
    with pytest.raises(DeletionRefusedError, match="object"):
        line.through.abandon(Unfinished("object", "an-upload", 0, datetime.now(UTC)))
