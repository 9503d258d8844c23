"""A standalone Spark cluster on loopback: a master and a worker, as `java` runs them from pyspark's jars."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyspark

from cutline.spark.java import find_java
from tests.run.quick_spark import QUICK
from tests.s3.server import free_port

START_SECONDS_MAX = 60
STOP_SECONDS_MAX = 20


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker with an environment of its own; `hidden` folders are empty ones of its own, as on another machine.

    Hiding folders takes root, as it is done by a mount namespace, and so does `uid`, another user. `host` is its
    loopback address: Spark runs no task twice on one host.
    """

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    hidden: Sequence[Path] = ()
    cores: int = 1
    host: str = "127.0.0.1"
    uid: int | None = None


@contextlib.contextmanager
def standalone_workers(folder: Path, settings: Mapping[str, str], workers: Sequence[Worker]) -> Iterator[str]:
    """Run a master and these workers with `settings`; yield the master's URL."""
    with standalone_master(folder, settings) as url, contextlib.ExitStack() as stack:
        for one in workers:
            stack.enter_context(running_worker(folder, url, one))
        yield url


@contextlib.contextmanager
def running_worker(folder: Path, url: str, worker: Worker) -> Iterator[None]:
    """Run one more worker of the master at `url`, which runs in `folder`."""
    options = ["--host", worker.host, "--cores", str(worker.cores), "--memory", "1g", "--webui-port", "0"]
    properties = ["--properties-file", str(folder / "spark.properties")]
    command = ["worker.Worker", *options, *properties, url]
    with _daemon(folder, worker.name, command, "Successfully registered", worker):
        yield


@contextlib.contextmanager
def standalone_cluster(folder: Path, settings: Mapping[str, str]) -> Iterator[str]:
    """Run a master and a worker with `settings`; yield the master's URL."""
    worker = ["worker.Worker", "--host", "127.0.0.1", "--cores", "2", "--memory", "1g", "--webui-port", "0"]
    with standalone_master(folder, settings) as url:
        command = [*worker, "--properties-file", str(folder / "spark.properties"), url]
        with _daemon(folder, "worker", command, "Successfully registered"):
            yield url


@contextlib.contextmanager
def standalone_master(folder: Path, settings: Mapping[str, str]) -> Iterator[str]:
    """Run a master without a worker."""
    folder.mkdir()
    port = free_port()
    url = f"spark://127.0.0.1:{port}"
    properties = folder / "spark.properties"
    properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    command = ["master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]
    with _daemon(folder, "master", [*command, "--properties-file", str(properties)], "I have been elected leader"):
        yield url


@contextlib.contextmanager
def _daemon(folder: Path, name: str, command: list[str], ready: str, worker: Worker | None = None) -> Iterator[None]:
    home, java = Path(pyspark.__file__).parent, find_java(folder)
    environment = os.environ | {
        "SPARK_HOME": str(home),
        "SPARK_SCALA_VERSION": "2.13",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_WORKER_DIR": str(folder / "work" / name),
    }
    environment |= {"SPARK_LOCAL_IP": worker.host, **worker.environment} if worker else {}
    log = folder / f"{name}.log"
    java_command = [str(java.launch_home / "bin" / "java"), "-cp", f"{home}/jars/*", "-Xmx256m", QUICK]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*_hiding(worker), *java_command, f"org.apache.spark.deploy.{command[0]}", *command[1:]],
            stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment, cwd=folder,
            user=worker and worker.uid, group=worker and worker.uid, extra_groups=[] if worker and worker.uid else None,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_SECONDS_MAX
        while ready not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the {name} did not start: {log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _hiding(worker: Worker | None) -> list[str]:
    if worker is None or not worker.hidden:
        return []
    mounts = " && ".join(f"mount -t tmpfs none '{folder}'" for folder in worker.hidden)
    return ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "worker"]
