"""versitygw, an S3 server that is not a test double: built from source, once per user, if there is a Go toolchain.

It keeps its buckets in a folder, has versions, Object Lock, users and bucket policies, and checks signatures.
`python -m tests.s3.versitygw` builds it; several processes may do so at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from cli.folders.cache_folder import cache_folder
from tests.s3.server import ACCESS_KEY, LOG_CHARACTERS_MAX, SECRET_KEY, S3Server, free_port, running_server

VERSION = "v1.8.0"
MODULE = "github.com/versity/versitygw/cmd/versitygw"
BUILD_SECONDS_MAX = 900
ADMIN_SECONDS_MAX = 30
NICENESS = 10
# What Go reports if it can't download: such a machine can't build the server, as if it had no toolchain.
NO_NETWORK = ("dial tcp", "no such host", "i/o timeout", "connection refused", "TLS handshake", "proxyconnect")


class NoGoError(Exception):
    """The server can't be built on this machine; the message says why."""


class Building:
    """A build in a separate process, begun before it is needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Begin to build, at low priority, unless the program exists or can't be built."""
        if self._process is None and shutil.which("go") and not program_path().exists():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.s3.versitygw"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=Path(__file__).resolve().parents[2],
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait for the build that was begun, however it ends."""
        if self._process is not None:
            self._process.wait(BUILD_SECONDS_MAX)

    def program(self) -> Path:
        """Return the program; skip the calling test if it can't be built."""
        self.wait()
        try:
            return build()  # after a failed build, this one raises its error
        except NoGoError as error:
            pytest.skip(f"versitygw {VERSION} can't be built: {error}")

    def end(self) -> None:
        """Give up a build that nobody has waited for."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait()


BUILDING = Building()


@cache
def own_folder() -> Path:
    """Make a folder for the programs of this run."""
    return Path(tempfile.mkdtemp(prefix="versitygw-"))


def program_path() -> Path:
    """The path of the program once it is built."""
    # A name in a folder that others share could be planted, and would be run.
    folder = cache_folder() or own_folder()
    return folder / f"versitygw-{VERSION}-{sysconfig.get_platform()}"


def build() -> Path:
    """Build the program unless it exists, and return it; raises NoGoError."""
    target = program_path()
    if target.exists():
        return target
    go = shutil.which("go")
    if go is None:
        raise NoGoError("there is no Go toolchain on the PATH (go)")
    with locked(target.with_name(f"{target.name}.lock")), tempfile.TemporaryDirectory(dir=target.parent) as folder:
        if not target.exists():
            done = subprocess.run(
                [go, "install", "-ldflags=-s -w", f"{MODULE}@{VERSION}"],
                capture_output=True, text=True, check=False, timeout=BUILD_SECONDS_MAX,
                stdin=subprocess.DEVNULL, env=os.environ | {"GOBIN": folder}, cwd=folder,
            )  # fmt: skip
            if done.returncode and any(words in done.stderr for words in NO_NETWORK):
                raise NoGoError(f"Go can't download it: {done.stderr.strip().splitlines()[-1]}")
            assert done.returncode == 0, done.stderr[-LOG_CHARACTERS_MAX:]
            (Path(folder) / "versitygw").replace(target)
    return target


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file for the block: one process builds, the others wait for it."""
    deadline = time.monotonic() + BUILD_SECONDS_MAX
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has held {path} for {BUILD_SECONDS_MAX} seconds") from None
                time.sleep(0.2)
        yield


@contextlib.contextmanager
def versitygw_server() -> Iterator[S3Server]:
    """Start a server with no buckets, yield it, stop it, and delete what it kept."""
    program = BUILDING.program()
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="versitygw-") as directory:
        buckets, versions, users, attributes = (
            Path(directory) / name for name in ("buckets", "versions", "users", "attributes")
        )
        for folder in (buckets, versions, users, attributes):
            folder.mkdir()
        command = [str(program), "--access", ACCESS_KEY, "--secret", SECRET_KEY, "--port", f"127.0.0.1:{port}"]
        command += ["--quiet", "--iam-dir", str(users), "posix", "--versioning-dir", str(versions)]
        if not has_attributes(buckets):
            command += ["--sidecar", str(attributes)]
        with running_server([*command, str(buckets)], port) as process:
            yield S3Server(f"http://127.0.0.1:{port}", process)


def needs_versitygw(item: pytest.Item) -> bool:
    """Whether a test uses the fixture of the server, or starts a server itself."""
    chosen = getattr(item, "callspec", None)
    fixtures = [*getattr(item, "fixturenames", ()), *(chosen.params.values() if chosen else ())]
    return "versitygw" in fixtures or versitygw_server in fixtures


def has_attributes(folder: Path) -> bool:
    """Whether files in the folder can have extended attributes."""
    try:
        os.setxattr(folder, "user.cutline", b"x")
    except (OSError, AttributeError):
        return False
    return True


def create_user(server: S3Server, access_key: str, secret_key: str) -> None:
    """Create a user of a versitygw server, who may do only what a bucket's policy allows."""
    admin = [str(build()), "admin", "--access", server.access_key, "--secret", server.secret_key]
    admin += ["--endpoint-url", server.endpoint_url]
    user = ["create-user", "--access", access_key, "--secret", secret_key, "--role", "user"]
    subprocess.run([*admin, *user], check=True, capture_output=True, timeout=ADMIN_SECONDS_MAX)


def main() -> None:
    """Build the program at low priority; on SIGTERM, leave nothing half done."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.nice(NICENESS)
    build()


if __name__ == "__main__":
    main()
