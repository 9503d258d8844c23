"""The first task of every Python worker: executors may come after the others were asked."""

from __future__ import annotations

import os
import socket

from snapshots.executors.build import build_digest
from snapshots.executors.failures import ExecutorTaskError
from snapshots.executors.needs import ExecutorNeeds, ExecutorUnfitError, check_shared
from storage.errors import SnapshotError

INSTALL = "give every executor the same build of Cutline, and its dependencies: docs/spark.md, What executors need"


def check_worker(build: str, needs: ExecutorNeeds) -> None:
    """Raise ExecutorTaskError unless this process runs this build and has the driver's store."""
    name = f"executor on {socket.gethostname()} (process {os.getppid()})"
    try:
        if build_digest() != build:
            raise ExecutorUnfitError("it has another build of Cutline", hint=INSTALL)
        check_shared(needs)
    except SnapshotError as error:
        error.message = f"{name}: {error.message}"
        raise ExecutorTaskError(error) from error
