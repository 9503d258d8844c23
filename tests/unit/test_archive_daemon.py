"""An archive of `snapshot cluster pack` is fetched and unpacked once on a machine, and never used in part."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cutline.spark import archive_daemon
from cutline.spark.archive_daemon import DIGEST, PROBLEM, URL, archives_folder, unpack_archive, use_archive
from cutline.spark.served_archive import (
    ARCHIVE,
    BIND_ADDRESS,
    FILES,
    PORT,
    PYTHON_PATH,
    PackedArchiveError,
    ServedArchive,
)
from tests.other_user import OTHER_UID, needs_root

MODULES = {"fleet_of_archive.py": b"NAME = 'packed'\n", "folder/inner.py": b"x = 1\n" * 100_000}


def packed(folder: Path, more: bytes = b"") -> tuple[Path, str]:
    """An archive with the MODULES, and its digest."""
    file = folder / "cutline.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        for name, body in {**MODULES, "more": more}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(body)
            archive.addfile(entry, io.BytesIO(body))
    return file, hashlib.sha256(file.read_bytes()).hexdigest()


@contextmanager
def answering(
    pieces: list[bytes], length: int, requests: list[str], pause: threading.Event | None = None
) -> Iterator[str]:
    """A server that says `length` and sends these pieces, after the first of which it waits for `pause`."""

    class Request(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            for piece in pieces:
                self.wfile.write(piece)
                self.wfile.flush()
                if pause is not None:
                    pause.wait(10)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Request)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    folder = tmp_path / "archives"
    folder.mkdir(0o700)
    return folder


def assert_whole(folder: Path) -> None:
    assert {name: (folder / name).read_bytes() for name in MODULES} == MODULES
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_driver_serves_it_and_what_is_unpacked_is_not_fetched_again(tmp_path: Path, archives: Path) -> None:
    file, digest = packed(tmp_path)
    settings = {ARCHIVE: str(file), FILES: "other.txt", PYTHON_PATH: "here"}
    served = ServedArchive(settings, "127.0.0.1")
    url = served.settings[f"spark.executorEnv.{URL}"]
    try:
        assert served.settings[f"spark.executorEnv.{DIGEST}"] == digest
        assert served.settings[FILES] == f"other.txt,file://{archive_daemon.__file__}"
        assert served.settings[PYTHON_PATH] == ".:here"
        # What is packed in its place during the command is another archive, which nobody has asked for.
        file.unlink()
        assert_whole(unpack_archive(digest, url, archives))
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(url.replace(digest, "../etc/passwd"))
    finally:
        served.close()
    before = (archives / digest).stat().st_ino
    assert_whole(unpack_archive(digest, url, archives))
    assert [(one.name, one.stat().st_ino) for one in archives.iterdir()] == [(digest, before)]


def test_of_two_executors_of_a_machine_one_fetches_and_the_other_waits(tmp_path: Path, archives: Path) -> None:
    file, digest = packed(tmp_path)
    body, pause = file.read_bytes(), threading.Event()
    requests: list[str] = []
    with (
        answering([body[:1000], body[1000:]], len(body), requests, pause) as url,
        ThreadPoolExecutor(2) as both,
    ):
        found = [both.submit(unpack_archive, digest, url, archives) for _ in range(2)]
        time.sleep(0.2)
        assert not any(one.done() for one in found)
        pause.set()
        for one in found:
            assert_whole(one.result(30))
    assert requests == ["/"]


@pytest.mark.parametrize("damage", ["cut off", "changed"])
def test_other_bytes_than_the_driver_has_are_never_unpacked(tmp_path: Path, archives: Path, damage: str) -> None:
    file, digest = packed(tmp_path)
    body = file.read_bytes()
    wrong = body[:-100] if damage == "cut off" else body[:500] + b"?" + body[501:]
    with answering([wrong], len(body), []) as url, pytest.raises(Exception, match=r"truncated or changed|Incomplete"):
        unpack_archive(digest, url, archives)
    assert list(archives.iterdir()) == []


def test_what_a_killed_executor_has_left_is_not_taken_for_the_archive(tmp_path: Path, archives: Path) -> None:
    file, digest = packed(tmp_path)
    body = file.read_bytes()
    requests: list[str] = []
    with answering([body[: len(body) // 2]], len(body), requests, threading.Event()) as url:
        child = os.fork()
        if child == 0:
            try:
                unpack_archive(digest, url, archives)
            finally:
                os._exit(1)
        deadline = time.monotonic() + 30
        while not any(archives.glob("*/archive")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert [one.name == digest for one in archives.iterdir()] == [False]
    with answering([body], len(body), requests) as url:
        assert_whole(unpack_archive(digest, url, archives))
    assert [one.name for one in archives.iterdir()] == [digest]
    assert len(requests) == 2


def test_archives_that_nobody_has_used_for_a_month_are_removed_but_not_under_their_users(
    tmp_path: Path, archives: Path
) -> None:
    month = 31 * 24 * 3600
    old, young = "0" * 64, "1" * 64
    for name in (old, young):
        (archives / name / "folder").mkdir(parents=True)
        (archives / name / "folder" / "inner.py").write_bytes(b"")
    file, used = packed(tmp_path, b"used until this process ends")
    body = file.read_bytes()
    with answering([body], len(body), []) as url:
        unpack_archive(used, url, archives)
    for name, age in ((old, month), (used, month), (young, month - 2 * 24 * 3600)):
        os.utime(archives / name, (time.time() - age,) * 2)
    file, digest = packed(tmp_path)
    body = file.read_bytes()
    with answering([body], len(body), []) as url:
        unpack_archive(digest, url, archives)
    assert {one.name for one in archives.iterdir()} == {used, young, digest}


def test_a_folder_that_others_can_change_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "executor"
    own.mkdir()
    monkeypatch.chdir(own)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    usual = tmp_path / "cache" / "cutline" / "archives"
    assert archives_folder() == usual
    usual.chmod(0o770)
    assert archives_folder() == own / "archives"
    usual.chmod(0o700)
    (tmp_path / "cache").chmod(0o777)
    assert archives_folder() == own / "archives"
    (tmp_path / "cache").chmod(0o1777)
    assert archives_folder() == usual
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert archives_folder() == own / "archives"


@needs_root
def test_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    usual = archives_folder()
    os.chown(usual, OTHER_UID, OTHER_UID)
    assert archives_folder() == tmp_path / "archives"


def test_why_there_is_no_archive_is_kept_for_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(DIGEST, "0" * 64)
    monkeypatch.setenv(URL, "http://127.0.0.1:1/")
    monkeypatch.setenv(PROBLEM, "")
    use_archive()
    assert os.environ[PROBLEM] == "http://127.0.0.1:1/: <urlopen error [Errno 111] Connection refused>"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({ARCHIVE: "/none.tar.gz"}, "the archive /none.tar.gz can't be read: No such file or directory"),
        ({PORT: "none"}, "can't be served at 127.0.0.1, port none"),
        ({PORT: "99999"}, "can't be served at 127.0.0.1, port 99999"),
        ({BIND_ADDRESS: "192.0.2.1"}, "can't be served at 192.0.2.1, port 0"),
    ],
)
def test_an_archive_that_cannot_be_served_is_named(tmp_path: Path, settings: dict[str, str], said: str) -> None:
    file, _ = packed(tmp_path)
    with pytest.raises(PackedArchiveError, match=said):
        ServedArchive({ARCHIVE: str(file)} | settings, "127.0.0.1")
