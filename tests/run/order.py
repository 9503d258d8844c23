"""Which modules begin first where several processes share the tests, a module each at a time.

A long one that begins last keeps one process busy while the others have nothing left. Inside of a module nothing moves.
"""

from __future__ import annotations

import pytest

# The longest first, as far as it matters; the end of a run names those that are missing here.
LONG_MODULES = (
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
    "tests/integration/test_mixed_fleet.py",
    "tests/integration/test_secrets.py",
)
PLACES = {module: place for place, module in enumerate(LONG_MODULES)}


def module_of(nodeid: str) -> str:
    """The file of a test."""
    return nodeid.partition("::")[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests of long modules first; every process has the same order, as xdist wants it."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: PLACES.get(module_of(item.nodeid), len(PLACES)))
