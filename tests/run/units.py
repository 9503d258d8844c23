"""Units of tests that one process runs: the modules of a folder below tests/integration share servers and chains."""

from __future__ import annotations

from pathlib import PurePosixPath

TOGETHER = "tests/integration"


def unit_of(nodeid: str) -> str:
    """Return the unit of a test: its folder or file."""
    module = PurePosixPath(nodeid.partition("::")[0])
    return str(module.parent if str(module.parent.parent) == TOGETHER else module)
