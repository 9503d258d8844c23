"""MinIO's S3 server, where it is installed: by `make stores`, or on the PATH.

Its tagged releases have no version that Go's module proxy knows, so that one of its commits is named.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator

from tests.programs.cached import require_program
from tests.programs.go_program import GoProgram
from tests.s3.server import ACCESS_KEY, SECRET_KEY, S3Server, free_port, running_server

PROGRAM = GoProgram("github.com/minio/minio", "v0.0.0-20260212201848-7aac2a2c5b7c")
# It asks nobody for updates, and has no console.
SETTINGS = {
    "MINIO_ROOT_USER": ACCESS_KEY,
    "MINIO_ROOT_PASSWORD": SECRET_KEY,
    "MINIO_UPDATE": "off",
    "MINIO_BROWSER": "off",
}


@contextlib.contextmanager
def minio_server() -> Iterator[S3Server]:
    """Start a server with no buckets, yield it, stop it, and delete what it kept."""
    program = require_program("minio", PROGRAM.path())
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="minio-") as directory:
        command = [str(program), "server", "--quiet", "--address", f"127.0.0.1:{port}", directory]
        with running_server(command, port, settings=SETTINGS) as process:
            yield S3Server(f"http://127.0.0.1:{port}", process)
