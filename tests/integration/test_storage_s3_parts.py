"""Large S3 objects are uploaded in parts: created only once despite faults, and what unfinished uploads leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace

import cutline.storage.s3_create
from cutline.storage.open import open_store
from cutline.storage.s3 import S3Store
from cutline.storage.s3_create import PART_BYTES
from cutline.storage.store import (
    AnswerLostError,
    DeletionRefusedError,
    ObjectExistsError,
    StoreUnreachableError,
    Unfinished,
)
from tests.s3.kinds import PROXIED_KINDS, S3Place
from tests.s3.proxy import Fault, S3Proxy, s3_proxy

WAIT_SECONDS_MAX = 30
SMALL_PART_BYTES = 5 * 2**20  # S3 takes no smaller part but the last
BODY = os.urandom(2 * SMALL_PART_BYTES + 7)
ATTEMPTS_MAX = 3
FEW = {"config_kwargs": {"retries": {"total_max_attempts": ATTEMPTS_MAX}}}
COMPLETE, PART, BEGIN = "CompleteMultipartUpload", "UploadPart", "CreateMultipartUpload"
UPLOADER = """
import sys
from cutline.storage.open import open_store
url, endpoint, key, secret = sys.argv[1:]
open_store(url, {"endpoint_url": endpoint, "key": key, "secret": secret}).create("killed/large", bytes(96 * 2**20))
"""


@dataclass(frozen=True, slots=True)
class Link:
    """A store, reached through a bad network and directly."""

    proxy: S3Proxy
    through: S3Store
    direct: S3Store


@pytest.fixture(scope="module", params=PROXIED_KINDS)
def server(request: pytest.FixtureRequest) -> S3Place:
    place: S3Place = request.getfixturevalue(request.param)
    return place


@pytest.fixture(scope="module")
def opened(server: S3Place) -> Iterator[Link]:
    if not server.endpoint_url:
        pytest.skip("AWS answers only under its own host names, so no proxy can stand in front of it")
    url = server.bucket("parts")
    with s3_proxy(server.endpoint_url) as proxy:
        through = open_store(url, server.options | FEW | {"endpoint_url": proxy.endpoint_url})
        direct = open_store(url, server.options)
        assert isinstance(through, S3Store)
        assert isinstance(direct, S3Store)
        yield Link(proxy, through, direct)


@pytest.fixture
def link(opened: Link, monkeypatch: pytest.MonkeyPatch) -> Link:
    opened.proxy.reset()
    monkeypatch.setattr(cutline.storage.s3_create, "PART_BYTES", SMALL_PART_BYTES)
    folder = uuid.uuid4().hex
    through, direct = (replace(one, root=f"{one.root}/{folder}") for one in (opened.through, opened.direct))
    return Link(opened.proxy, through, direct)


def lists_uploads(request: pytest.FixtureRequest) -> bool:
    """Whether the server lists uploads below a folder: MinIO lists those of a whole key alone."""
    return bool(request.node.callspec.params["server"] != "minio")


def test_only_a_failed_part_is_repeated(link: Link, request: pytest.FixtureRequest) -> None:
    link.proxy.faults += [
        Fault(arrives=False, of=PART),
        Fault(arrives=True, of=PART),
        Fault(arrives=False, status=500, code="InternalError", of=PART),
        Fault(arrives=True, status=503, code="SlowDown", of=BEGIN),
    ]
    link.through.create_in_parts("object", BODY)
    assert link.direct.read("object") == BODY
    assert link.proxy.requests[PART] == 3 + 3
    # The store still has the upload whose CreateMultipartUpload got an error as its answer.
    left = [("object", 0)] if lists_uploads(request) else []
    assert [(one.key, one.size_bytes) for one in link.direct.unfinished()] == left


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(arrives=True, of=COMPLETE)],
        [Fault(arrives=True, status=500, code="InternalError", of=COMPLETE)],
        [Fault(arrives=True, status=503, code="SlowDown", of=COMPLETE)],
        [Fault(arrives=True, of=COMPLETE), Fault(arrives=False, status=412, code="PreconditionFailed", of=COMPLETE)],
        [Fault(arrives=True, of=COMPLETE), Fault(arrives=False, status=404, code="NoSuchUpload", of=COMPLETE)],
        [Fault(arrives=False, of=COMPLETE), Fault(arrives=False, status=409, code="Conflict", of=COMPLETE)],
    ],
)
def test_a_lost_answer_to_the_completion_is_settled(link: Link, faults: list[Fault]) -> None:
    link.proxy.faults += faults
    link.through.create_in_parts("object", BODY)
    assert link.direct.read("object") == BODY
    assert link.direct.unfinished() == []


@pytest.mark.parametrize("fault", [None, Fault(arrives=True, of=COMPLETE), Fault(arrives=False, of=COMPLETE)])
def test_an_object_of_the_same_bytes_is_not_taken_for_ours(link: Link, fault: Fault | None) -> None:
    link.direct.create("object", BODY)
    link.proxy.faults += [fault] if fault else []
    with pytest.raises(ObjectExistsError):
        link.through.create_in_parts("object", BODY)
    assert link.direct.unfinished() == []


def test_a_completion_without_any_answer_is_indeterminate(link: Link) -> None:
    link.proxy.faults += [Fault(arrives=False, of=COMPLETE)] * ATTEMPTS_MAX
    with pytest.raises(AnswerLostError):
        link.through.create_in_parts("object", BODY)
    assert not link.direct.exists("object")
    assert link.direct.unfinished() == []


def test_an_upload_to_a_taken_key_is_indeterminate_if_its_head_is_refused(link: Link) -> None:
    link.direct.create("object", b"another")
    link.proxy.faults += [
        Fault(arrives=False, status=403, code="AccessDenied", of=of) for of in ("HeadObject", "GetObject")
    ]
    with pytest.raises(AnswerLostError, match="403 AccessDenied"):
        link.through.create_in_parts("object", BODY)


@pytest.mark.parametrize(("operation", "parts"), [(BEGIN, 0), (PART, 1), (COMPLETE, 3)])
def test_a_failed_upload_is_aborted(link: Link, operation: str, parts: int) -> None:
    link.proxy.faults.append(Fault(arrives=False, status=403, code="AccessDenied", of=operation))
    with pytest.raises(StoreUnreachableError, match="403 AccessDenied"):
        link.through.create_in_parts("object", BODY)
    assert link.proxy.requests[PART] >= parts
    assert not link.direct.exists("object")
    assert link.direct.unfinished() == []


def test_outstanding_parts_arrive_before_the_upload_is_aborted(link: Link) -> None:
    held = threading.Event()
    link.proxy.faults += [Fault(arrives=True, held=held, of=PART)] * 2
    link.proxy.faults.append(Fault(arrives=False, status=403, code="AccessDenied", of=PART))
    arriving = threading.Timer(0.5, held.set)
    arriving.start()
    with pytest.raises(StoreUnreachableError, match="403 AccessDenied"):
        link.through.create_in_parts("object", BODY)
    assert held.is_set()
    arriving.join()
    assert link.proxy.requests["AbortMultipartUpload"] >= 2
    assert link.direct.unfinished() == []


def test_ctrl_c_aborts_the_upload(link: Link) -> None:
    def interrupt() -> None:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not link.proxy.requests[PART] and time.monotonic() < deadline:
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    main = threading.main_thread().ident
    assert main
    link.proxy.delay_seconds = 0.5
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            link.through.create_in_parts("object", BODY)
    finally:
        link.proxy.delay_seconds = 0
        interrupting.join()
    assert link.proxy.requests[PART] > 0
    assert link.proxy.requests["AbortMultipartUpload"] > 0
    assert link.direct.unfinished() == []
    assert not link.direct.exists("object")


def test_the_upload_of_a_killed_process_is_found_and_abandoned(
    server: S3Place, opened: Link, request: pytest.FixtureRequest
) -> None:
    if not lists_uploads(request):
        pytest.skip("the server does not list the uploads below a folder")
    url = f"{server.bucket('killed')}/folder"
    opened.proxy.reset()
    opened.proxy.delay_seconds = 0.3
    before = datetime.now(UTC) - timedelta(seconds=2)
    command = [sys.executable, "-c", UPLOADER, url, opened.proxy.endpoint_url]
    root = Path(__file__).resolve().parents[2]
    env = os.environ | {"PYTHONPATH": str(root)}
    with subprocess.Popen([*command, str(server.options["key"]), str(server.options["secret"])], env=env) as process:
        try:
            deadline = time.monotonic() + WAIT_SECONDS_MAX
            # Four parts are sent at a time: once the fifth is requested, one has arrived.
            while opened.proxy.requests[PART] < 5 and time.monotonic() < deadline:
                time.sleep(0.02)
        finally:
            process.kill()
    opened.proxy.delay_seconds = 0
    store = open_store(url, server.options)
    time.sleep(0.5)  # a part on its way may still arrive
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


def test_a_refused_abort_is_reported_as_a_refused_deletion(link: Link) -> None:
    link.proxy.faults.append(Fault(arrives=False, status=403, code="AccessDenied", of="AbortMultipartUpload"))
    with pytest.raises(DeletionRefusedError, match="object"):
        link.through.abandon(Unfinished("object", "an-upload", 0, datetime.now(UTC)))
