"""Nothing secret is kept or shown: real commands on an S3 store, each in ways that go well and that fail.

Those that take snapshots are processes of their own, the others run in this one.

The secrets of the store are looked for, byte by byte, in all that the commands say and leave: their output with
`--verbose`, Spark's too, temporary files, the file of a bug's traceback, every object in the store, the nodes' logs,
and the command lines of processes while they run.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import cli.main
from embedded.fleet import EmbeddedFleet
from fleet.config import Fleet, load_fleet
from storage.fsspec_store import FsspecStore
from tests.commands.in_process import sessions_given
from tests.integration.conftest import FleetFactory
from tests.s3_proxy import Fault, S3Proxy, s3_proxy
from tests.s3_server import S3Server
from tests.snapshot_runs import described

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COMMAND_SECONDS_MAX = 180
ROOT = Path(__file__).resolve().parents[2]
ACCESS_KEY, SECRET, TOKEN = (f"UNMISTAKABLE{part}{uuid.uuid4().hex}" for part in ("KEY", "SECRET", "TOKEN"))
SECRETS = [text.encode() for text in (ACCESS_KEY, SECRET, TOKEN)]
OPTIONS = {"key": "${STORE_KEY}", "secret": "${STORE_SECRET}", "token": "${STORE_TOKEN}"}
MAIN = "from cli.main import main; main()"


def broken(store: FsspecStore, *_: object) -> None:
    """A bug that follows from what the server said, in the depth of the store, where the options are at hand."""
    try:
        store.filesystem.cat_file("no-such-bucket/object")
    except OSError:
        raise ZeroDivisionError("a bug")  # noqa: B904  # as bugs are: what it follows from is its context


@dataclass(slots=True)
class Place:
    """Where the commands run, and all that they have said."""

    servers: EmbeddedFleet
    fleet: Fleet
    proxy: S3Proxy
    folder: Path
    environment: dict[str, str]
    spark: SparkSession
    said: dict[str, bytes] = field(default_factory=dict)
    lines: set[bytes] = field(default_factory=set)

    def run(self, *words: str) -> int:
        """Run `snapshot …` as a process of its own, with --verbose; its exit code."""
        command = [sys.executable, "-c", MAIN, "--fleet", str(self.fleet.path), "--verbose", *words]
        with watched(self.lines):
            done = subprocess.run(
                command, capture_output=True, timeout=COMMAND_SECONDS_MAX, env=self.environment,
                check=False, cwd=self.folder / "cwd",
            )  # fmt: skip
        self.said[f"{len(self.said)} {' '.join(words)}"] = done.stdout + done.stderr
        return done.returncode

    def run_here(self, *words: str, fleet: Fleet | None = None) -> int:
        """The same in this process."""
        out = io.StringIO()
        with (
            sessions_given(self.spark), watched(self.lines), contextlib.chdir(self.folder / "cwd"),
            redirect_stdout(out), redirect_stderr(out),
        ):  # fmt: skip
            code = cli.main.run(["--fleet", str((fleet or self.fleet).path), "--verbose", *words])
        self.said[f"{len(self.said)} {' '.join(words)}"] = out.getvalue().encode()
        return code

    def last(self) -> str:
        return list(self.said.values())[-1].decode()


@contextmanager
def watched(lines: set[bytes]) -> Iterator[None]:
    """Gather the command lines of all processes that are seen during the block."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            for process in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    lines.add(process.read_bytes())
                except OSError:
                    continue

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture
def place(fleet_factory: FleetFactory, s3: S3Server, spark: SparkSession, tmp_path: Path) -> Iterator[Place]:
    servers = fleet_factory(1)
    for name in ("cwd", "tmp"):
        (tmp_path / name).mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(tmp_path / "tmp"),
        "STORE_KEY": ACCESS_KEY,
        "STORE_SECRET": SECRET,
        "STORE_TOKEN": TOKEN,
    }
    with s3_proxy(s3.endpoint_url) as proxy, pytest.MonkeyPatch.context() as patch:
        for name in ("STORE_KEY", "STORE_SECRET", "STORE_TOKEN"):
            patch.setenv(name, environment[name])
        patch.setattr(tempfile, "tempdir", environment["TMPDIR"])
        few = "[store_options.config_kwargs]\nretries = { total_max_attempts = 2 }"
        options = OPTIONS | {"endpoint_url": proxy.endpoint_url}
        fleet = described(servers, tmp_path / "fleet.toml", f"{s3.bucket('secrets')}/folder", options, few)
        yield Place(servers, fleet, proxy, tmp_path, environment, spark)


@pytest.mark.timeout(600)  # two Spark sessions, one after the other
def test_no_secret_of_the_store_is_said_or_kept(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place.run("init") == 0, place.last()
    assert place.run("create", "daily") == 0, place.last()
    assert place.run_here("list") == 0
    assert place.run_here("show", "daily") == 0
    assert place.run_here("check", "daily") == 4  # nothing to compare with
    assert place.run_here("restore", "daily", "--replace") == 0, place.last()
    fail_in_every_way(place)
    with monkeypatch.context() as patched:
        for name in ("list", "list_children"):
            patched.setattr(FsspecStore, name, broken)
        assert place.run_here("list") == 70, place.last()
    assert list((place.folder / "tmp").glob("snapshot-bug-*.txt"))
    assert place.lines
    found = [f"{secret[:18]!r} in {where}" for where, text in everything(place) for secret in SECRETS if secret in text]
    assert not found, found


def fail_in_every_way(place: Place) -> None:
    """Commands that end badly, and say why."""
    place.proxy.faults += [Fault(arrives=False, status=403, code="AccessDenied", key="/base/")] * 40
    assert place.run("create", "refused") == 6
    assert "AccessDenied" in place.last()
    place.proxy.forget()
    place.proxy.expired.add(ACCESS_KEY)
    assert place.run_here("list") == 6
    assert "renew the credentials" in place.last()
    place.proxy.forget()
    place.proxy.outage = Fault(arrives=False)
    assert place.run_here("show", "daily") == 6
    place.proxy.outage = None
    text = place.fleet.path.read_text()
    for number, (old, new) in enumerate(
        ((place.proxy.endpoint_url, "http://127.0.0.1:9"), ("s3://", "s3://no-such-"), ("token =", "no_such_option ="))
    ):
        wrong = place.folder / f"wrong-{number}.toml"
        assert old in text
        wrong.write_text(text.replace(old, new))
        assert place.run_here("list", fleet=load_fleet(wrong)) in (2, 6), place.last()


def everything(place: Place) -> Iterator[tuple[str, bytes]]:
    """All that could hold a secret, by where it is."""
    yield from place.said.items()
    for line in place.lines:
        yield f"a command line: {line[:60]!r}", line
    data = [node.data_directory for node in place.servers.nodes]
    for path in place.folder.rglob("*"):
        if path.is_file() and not any(path.is_relative_to(folder) for folder in data):
            yield str(path), path.read_bytes()
    store = place.fleet.store.open()
    keys = store.list("")
    assert any(key.endswith("snapshot.json") for key in keys)
    for key in keys:
        yield key, store.read(key)
