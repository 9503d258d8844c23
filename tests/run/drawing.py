"""Draw some of the tests that take long together: each whole run has others, by the seed that it prints.

A run of such a folder or module by its name has all of them, and so has the long form (`make soak`).
"""

from __future__ import annotations

import random
from pathlib import PurePosixPath

import pytest

from tests.run.soak import SEED, SOAK_SECONDS

# One test of so many is run.
DRAWN = {
    "tests/fuzz/test_database.py": 2,
    "tests/integration/test_cancel_places.py": 2,
    "tests/integration/test_cancel_walk.py": 2,
    "tests/integration/test_fault_walk.py": 3,
    "tests/integration/test_lost_commits.py": 3,
    "tests/integration/test_schema_attempts.py": 2,
    "tests/integration/test_stalled_nodes.py": 2,
    "tests/simulation/test_repository.py": 2,
    "tests/spark/test_killed_executors.py": 2,
    "tests/spark/test_session.py": 2,
    "tests/integration/damage": 3,
    "tests/integration/drill": 3,
    "tests/integration/parts": 4,
    "tests/integration/recovering": 2,
    "tests/integration/restoring": 5,
    "tests/integration/routing": 3,
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that are not drawn; pytest counts them in its summary."""
    if SOAK_SECONDS:
        return
    dropped: set[pytest.Item] = set()
    for place, of in DRAWN.items():
        if any(PurePosixPath(place).name in argument for argument in config.args):
            continue
        found = [item for item in items if item.nodeid.startswith((f"{place}/", f"{place}::"))]
        chosen = random.Random(f"{SEED} {place}").sample(found, -(-len(found) // of))
        dropped |= set(found) - set(chosen)
    if dropped:
        config.hook.pytest_deselected(items=list(dropped))
        items[:] = [item for item in items if item not in dropped]
