"""Which tests begin first if several processes share them, and which stay together.

A process gets one unit at a time: a module, or a folder below tests/integration, whose modules share servers and
chains. A long unit that begins last would keep one process busy while the others are idle.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

TOGETHER = "tests/integration"
# The longest first, as far as it matters; the end of a run names those that are missing here.
LONG = (
    "tests/integration/exact",
    "tests/simulation/test_repository.py",
    "tests/integration/test_fault_walk.py",
    "tests/simulation/test_cut.py",
    "tests/fuzz/test_database.py",
    "tests/integration/test_causal_chains.py",
    "tests/spark/test_session.py",
    "tests/spark/test_killed_executors.py",
    "tests/fuzz/test_decoder.py",
    "tests/integration/test_drain_killed.py",
    "tests/simulation/test_repository_mutants.py",
    "tests/integration/test_demo.py",
    "tests/integration/test_bank.py",
    "tests/integration/test_lost_commits.py",
    "tests/integration/test_fencing.py",
    "tests/integration/test_secrets.py",
    "tests/integration/damage",
    "tests/integration/test_schema_attempts.py",
)
PLACES = {unit: place for place, unit in enumerate(LONG)}


def unit_of(nodeid: str) -> str:
    """The folder or file of a test that one process runs as a whole."""
    module = PurePosixPath(nodeid.partition("::")[0])
    return str(module.parent if str(module.parent.parent) == TOGETHER else module)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """Hand out units rather than files."""
    from xdist.scheduler import LoadFileScheduling

    class LoadUnitScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    return LoadUnitScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests of long units first; every process has the same order, as xdist requires."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: PLACES.get(unit_of(item.nodeid), len(PLACES)))
