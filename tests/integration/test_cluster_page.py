"""docs/cluster.md, "In ten minutes", to the letter: its files and its lines make a cluster on which a command runs.

Only names differ: hosts are loopback addresses, and folders are the test's. Next to nothing of the environment is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest

from tests.commands.snapshot_runs import command_line, configure_fleet, dropping_slots
from tests.run.quick_spark import QUICK
from tests.s3.server import free_port

if TYPE_CHECKING:
    from cutline.embedded.fleet import EmbeddedFleet

PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"
START_SECONDS_MAX, COMMAND_SECONDS_MAX = 120, 240
MASTER_HOST, WORKER_HOST = "127.0.0.2", "127.0.0.3"
SECRET = "the secret of this cluster"
LISTENING = "0A"
pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp6").exists(), reason="needs /proc, and all of 127.0.0.0/8")


def block_with(word: str) -> list[str]:
    """The lines of the page's code block that has this word."""
    blocks = re.findall(r"(?m)(?:^ {8}.*\n|^\n(?= {8}))+", PAGE.read_text(encoding="utf-8"))
    (found,) = (block for block in blocks if word in block)
    return [line.strip() for line in found.splitlines() if line.strip()]


def listening_addresses(pid: int) -> set[tuple[str, int]]:
    """Where a process listens."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets |= set(re.findall(r"socket:\[(\d+)\]", str(descriptor.readlink())))
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENING and rest[5] in sockets:
                address, port = local.split(":")
                # Four bytes at a time in the machine's order; of an IPv4 address in IPv6 the last four.
                packed = struct.pack("=I", int(address[-8:], 16))
                found.add((socket.inet_ntoa(packed), int(port, 16)))
    return found


@contextlib.contextmanager
def running(folder: Path, lines: list[str], ready: str) -> Iterator[int]:
    """Run lines in a shell with next to no environment; yield the process once its log says that it is ready."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "SPARK_DAEMON_MEMORY": "256m"}
    if home := os.environ.get("JAVA_HOME"):
        environment["JAVA_HOME"] = home
    log = folder / f"{ready}.log"
    script = "\n".join([*lines[:-1], f"exec {lines[-1]}"])
    with (
        log.open("wb") as output,
        subprocess.Popen(["bash", "-c", script], stdout=output, stderr=output, cwd=folder, env=environment) as process,
    ):
        try:
            deadline = time.monotonic() + START_SECONDS_MAX
            while ready not in log.read_text(errors="replace"):
                assert process.poll() is None, log.read_text(errors="replace")[-3000:]
                assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
                time.sleep(0.2)
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)


@pytest.mark.rest
def test_the_page_makes_a_cluster_on_which_a_command_runs(shared_fleet: EmbeddedFleet, tmp_path: Path) -> None:
    settings = "\n".join(block_with("spark.authenticate.secret "))
    (tmp_path / "spark.properties").write_text(settings.replace("…", SECRET))
    (tmp_path / "spark.properties").chmod(0o600)
    port, work = free_port(), tmp_path / "work"
    work.mkdir()
    *exports, master, worker = (
        line.replace("python3", sys.executable)
        .replace("m1:7077", f"{MASTER_HOST}:{port}")
        .replace("--host m1 --port 7077", f"--host {MASTER_HOST} --port {port} --webui-port 0")
        .replace("--host w1 --work-dir /var/lib/cutline/work", f"--host {WORKER_HOST} --webui-port 0 --work-dir {work}")
        for line in block_with("master.Master")
    )
    assert worker.split()[-1] == f"spark://{MASTER_HOST}:{port}"
    fleet_lines = [line for line in block_with("master = ") if not line.startswith('"cutline.archive"')]
    fleet_toml = "\n".join(fleet_lines).replace("spark://m1:7077", f"spark://{MASTER_HOST}:{port}")
    # It is installed there, in the driver's own environment.
    fleet_toml = fleet_toml.replace("python3.11", sys.executable)
    quick = f'"driver.extraJavaOptions" = "{QUICK}"\n"executor.extraJavaOptions" = "{QUICK}"\n"executor.cores" = "1"\n'
    fleet = configure_fleet(
        shared_fleet, tmp_path / "fleet.toml", f"file://{tmp_path}/store", more=f"{fleet_toml}\n{quick}"
    )
    (tmp_path / "store").mkdir()
    kept = set((Path(pyspark.__file__).parent / "work").glob("app-*"))
    with (
        running(tmp_path, [*exports, master], "I have been elected leader") as of_master,
        running(tmp_path, [*exports, worker], "Successfully registered") as of_worker,
        dropping_slots(fleet),
    ):
        hosts = {MASTER_HOST: listening_addresses(of_master), WORKER_HOST: listening_addresses(of_worker)}
        for host, addresses in hosts.items():
            # One for what asks for the secret, and the page.
            assert sorted(address for address, _ in addresses) == ["127.0.0.1", host], hosts
        assert (MASTER_HOST, port) in hosts[MASTER_HOST]
        # Neither needs the secret, as neither starts Spark.
        for words, environment in ((["init"], {}), (["list"], {}), (["create", "page"], {"SPARK_SECRET": SECRET})):
            done = subprocess.run(
                [*command_line(fleet, *words), "--json"], capture_output=True, text=True, check=False,
                timeout=COMMAND_SECONDS_MAX, env=os.environ | environment, cwd=tmp_path,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout)["snapshot"] == "page"
    assert list(work.glob("app-*")), "the executors' files are in the worker's folder"
    assert set((Path(pyspark.__file__).parent / "work").glob("app-*")) == kept
