"""What one process runs as a whole: modules of a folder below tests/integration share servers and chains."""

from __future__ import annotations

from pathlib import PurePosixPath

TOGETHER = "tests/integration"


def unit_of(nodeid: str) -> str:
    """The folder or file of a test that one process runs as a whole."""
    module = PurePosixPath(nodeid.partition("::")[0])
    return str(module.parent if str(module.parent.parent) == TOGETHER else module)
