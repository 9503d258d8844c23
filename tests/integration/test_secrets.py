"""No secret of the store or of a node is stored or shown by real commands, which succeed and fail in several ways.

The create that fails runs as a process, which also starts Spark; the other commands run in this one.

The secrets are searched for, byte by byte, in everything that the commands print and leave: their output
with `--verbose`, Spark's too, temporary files, the file of a bug's traceback, every object in the store, the nodes'
logs, and the command lines of running processes.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from botocore.exceptions import ClientError

import cutline.cli.main
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, load_fleet
from cutline.storage.s3 import S3Store
from tests.commands.in_process import shared_session
from tests.commands.snapshot_runs import configure_fleet
from tests.integration.conftest import FleetFactory
from tests.run.command_lines import recording, seen_programs
from tests.s3.proxy import Fault, S3Proxy, s3_proxy
from tests.s3.server import S3Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COMMAND_SECONDS_MAX = 600
ROOT = Path(__file__).resolve().parents[2]
ACCESS_KEY, SECRET, TOKEN = (f"UNMISTAKABLE{part}{uuid.uuid4().hex}" for part in ("KEY", "SECRET", "TOKEN"))
# Its first part is also found where the rest is escaped.
PASSWORD_PART = f"UNMISTAKABLEPASSWORD{uuid.uuid4().hex}"
PASSWORD = f"{PASSWORD_PART} '%40"
SECRETS = [text.encode() for text in (ACCESS_KEY, SECRET, TOKEN, PASSWORD_PART)]
OPTIONS = {"key": "${STORE_KEY}", "secret": "${STORE_SECRET}", "token": "${STORE_TOKEN}"}
# With Spark, whose command lines are looked at, too.
MAIN = "from tests.run.by_spark import work_by_spark; work_by_spark(); from cutline.cli.main import main; main()"


def raise_bug(store: S3Store, *_: object) -> None:
    """Raise a bug that follows from a server's error, deep in the store, where the options are in scope."""
    try:
        store.client.ask("get_object", Bucket="no-such-bucket", Key="object")
    except ClientError:
        raise ZeroDivisionError("a bug")  # noqa: B904  # as in a real bug, the server's error is its context


@dataclass(slots=True)
class CommandRunner:
    """Runs the commands, and keeps everything that they print."""

    servers: EmbeddedFleet
    fleet: Fleet
    proxy: S3Proxy
    folder: Path
    environment: dict[str, str]
    spark: SparkSession
    outputs: dict[str, bytes] = field(default_factory=dict)
    lines: set[bytes] = field(default_factory=set)

    def run(self, *words: str) -> int:
        """Run `snapshot …` with --verbose as a process; return its exit code."""
        command = [sys.executable, "-c", MAIN, "--fleet", str(self.fleet.path), "--verbose", *words]
        with recording(self.lines):
            done = subprocess.run(
                command, capture_output=True, timeout=COMMAND_SECONDS_MAX, env=self.environment,
                check=False, cwd=self.folder / "cwd",
            )  # fmt: skip
        self.outputs[f"{len(self.outputs)} {' '.join(words)}"] = done.stdout + done.stderr
        return done.returncode

    def run_here(self, *words: str, fleet: Fleet | None = None) -> int:
        """Do the same in this process."""
        out = io.StringIO()
        with (
            shared_session(self.spark), recording(self.lines), contextlib.chdir(self.folder / "cwd"),
            redirect_stdout(out), redirect_stderr(out),
        ):  # fmt: skip
            code = cutline.cli.main.run(["--fleet", str((fleet or self.fleet).path), "--verbose", *words])
        self.outputs[f"{len(self.outputs)} {' '.join(words)}"] = out.getvalue().encode()
        return code

    def last_output(self) -> str:
        return list(self.outputs.values())[-1].decode()


@pytest.fixture
def runner(fleet_factory: FleetFactory, s3: S3Server, spark: SparkSession, tmp_path: Path) -> Iterator[CommandRunner]:
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
        "NODE_PASSWORD": PASSWORD,
    }
    with s3_proxy(s3.endpoint_url) as proxy, pytest.MonkeyPatch.context() as patch:
        for name in ("STORE_KEY", "STORE_SECRET", "STORE_TOKEN", "NODE_PASSWORD"):
            patch.setenv(name, environment[name])
        patch.setattr(tempfile, "tempdir", environment["TMPDIR"])
        few = "[store_options.config_kwargs]\nretries = { total_max_attempts = 2 }"
        options = OPTIONS | {"endpoint_url": proxy.endpoint_url}
        fleet = configure_fleet(servers, tmp_path / "fleet.toml", f"{s3.bucket('secrets')}/folder", options, few)
        text = fleet.path.read_text()
        fleet.path.write_text(re.sub(r'(?m)^(dsn = "\w+://\w+)@', r"\1:${NODE_PASSWORD}@", text))
        yield CommandRunner(servers, load_fleet(fleet.path), proxy, tmp_path, environment, spark)


@pytest.mark.timeout(600)
def test_no_secret_is_printed_or_stored(runner: CommandRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runner.run_here("init") == 0, runner.last_output()
    assert "without a standby: s1; check has no second copy" in runner.last_output()
    assert runner.run_here("create", "daily") == 0, runner.last_output()
    assert runner.run_here("list") == 0
    assert runner.run_here("show", "daily") == 0
    assert runner.run_here("check", "daily") == 4  # nothing to compare with
    assert runner.run_here("restore", "daily", "--replace", "--yes") == 0, runner.last_output()
    fail_in_every_way(runner)
    with monkeypatch.context() as patched:
        for name in ("list", "list_children"):
            patched.setattr(S3Store, name, raise_bug)
        assert runner.run_here("list") == 70, runner.last_output()
    assert list((runner.folder / "tmp").glob("snapshot-bug-*.txt"))
    assert {"pg_dump", "java"} <= seen_programs(runner.lines)
    found = [
        f"{secret[:18]!r} in {where}" for where, text in everything(runner) for secret in SECRETS if secret in text
    ]
    assert not found, found


def fail_in_every_way(runner: CommandRunner) -> None:
    """Run commands that fail and give the reason."""
    runner.proxy.faults += [Fault(arrives=False, status=403, code="AccessDenied", key="/base/")] * 40
    assert runner.run("create", "refused") == 6
    assert "AccessDenied" in runner.last_output()
    runner.proxy.reset()
    runner.proxy.expired.add(ACCESS_KEY)
    assert runner.run_here("list") == 6
    assert "renew the credentials" in runner.last_output()
    runner.proxy.reset()
    runner.proxy.outage = Fault(arrives=False)
    assert runner.run_here("show", "daily") == 6
    runner.proxy.outage = None
    text = runner.fleet.path.read_text()
    for number, (old, new) in enumerate(
        ((runner.proxy.endpoint_url, "http://127.0.0.1:9"), ("s3://", "s3://no-such-"), ("token =", "no_such_option ="))
    ):
        wrong = runner.folder / f"wrong-{number}.toml"
        assert old in text
        wrong.write_text(text.replace(old, new))
        assert runner.run_here("list", fleet=load_fleet(wrong)) in (2, 6), runner.last_output()


def everything(runner: CommandRunner) -> Iterator[tuple[str, bytes]]:
    """Yield everything that could hold a secret, with its place."""
    yield from runner.outputs.items()
    for line in runner.lines:
        yield f"a command line: {line[:60]!r}", line
    data = [node.data_directory for node in runner.servers.nodes]
    for path in runner.folder.rglob("*"):
        if path.is_file() and not any(path.is_relative_to(folder) for folder in data):
            yield str(path), path.read_bytes()
    store = runner.fleet.store.open()
    keys = store.list("")
    assert any(key.endswith("snapshot.json") for key in keys)
    for key in keys:
        yield key, store.read(key)
