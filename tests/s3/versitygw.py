"""versitygw, an S3 server that is not a test double: built from source, once per user, if there is a Go toolchain.

It keeps its buckets in a folder, has versions, Object Lock, users and bucket policies, and checks signatures.
`python -m tests.s3.versitygw` builds it; several processes may do so at once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs.cached import INSTALL_SECONDS_MAX, NotInstallableError
from tests.programs.go_program import GoProgram
from tests.programs.lacking import skip_without
from tests.s3.server import ACCESS_KEY, SECRET_KEY, S3Server, free_port, running_server

PROGRAM = GoProgram("github.com/versity/versitygw/cmd/versitygw", "v1.8.0")
ADMIN_SECONDS_MAX = 30
NICENESS = 10


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
            self._process.wait(INSTALL_SECONDS_MAX)

    def program(self) -> Path:
        """Return the program; skip the calling test if it can't be built."""
        self.wait()
        try:
            return build()  # after a failed build, this one raises its error
        except NotInstallableError as error:
            skip_without("versitygw", f"{PROGRAM.version} can't be built: {error}")

    def end(self) -> None:
        """Give up a build that nobody has waited for."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait()


BUILDING = Building()


def program_path() -> Path:
    """The path of the program once it is built."""
    return PROGRAM.path()


def build() -> Path:
    """Build the program unless it exists, and return it; raises NotInstallableError."""
    return PROGRAM.install()


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
