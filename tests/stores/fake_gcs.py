"""fake-gcs-server, an emulator of Google Cloud Storage; `make stores` installs it and gcsfs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.programs.cached import require_program
from tests.programs.go_program import GoProgram
from tests.programs.lacking import lacking
from tests.s3.server import free_port, running_server
from tests.stores.place import StorePlace

PROGRAM = GoProgram("github.com/fsouza/fake-gcs-server", "v1.56.1")
PACKAGE = "gcsfs==2026.10.1"


@contextlib.contextmanager
def fake_gcs_server() -> Iterator[StorePlace]:
    """Run a server without buckets that keeps objects in memory."""
    pytest.importorskip("gcsfs", reason=lacking("gcsfs", "to install it: make stores"))
    program = require_program("fake-gcs-server", PROGRAM.path())
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(program), "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
    command += ["-external-url", url, "-public-host", f"127.0.0.1:{port}", "-log-level", "warn"]
    with running_server(command, port):
        yield StorePlace("gs", url, {"endpoint_url": url, "token": "anon", "project": "test"})
