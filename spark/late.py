"""The first task of every Python worker: it checks executors that were added after all executors were checked."""

from __future__ import annotations

import os
import socket

from cutline.spark.needs import ExecutorNeeds, ExecutorTaskError, ExecutorUnfitError, check_shared, of_executor
from cutline.spark.packing import build_digest
from cutline.storage.errors import SnapshotError

INSTALL = (
    "install the same build of Cutline for every executor, or send it to them: snapshot cluster pack cutline.tar.gz"
    "   (docs/cluster.md)"
)


def check_worker(build: str, needs: ExecutorNeeds) -> None:
    """Raise ExecutorTaskError unless this process runs this build and sees the driver's store."""
    try:
        if build_digest() != build:
            raise ExecutorUnfitError("it has a different build of Cutline", hint=INSTALL)
        check_shared(needs)
    except SnapshotError as error:
        raise ExecutorTaskError(of_executor(error, socket.gethostname(), os.getppid())) from error
