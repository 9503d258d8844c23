"""Draw for every test module how changes are folded: by the driver (usual for few changes), or by Spark.

Spark folds by segment or by rows. If it folds a restore by segment, a check folds the hashes that tasks report.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

import cutline.check.verify
import cutline.snapshots.fold.limits
from tests.run.soak import SEED

# A program that a test starts folds in the same way: a restore is resumed only by a process that folds like the first.
FOLDING = "CUTLINE_TEST_FOLDING"


def fold_as(drawn: int, patch: pytest.MonkeyPatch) -> None:
    """Fold by the driver (0), by Spark by segment (1), or by Spark by rows (2)."""
    for name in ("CHANGES_MAX", "CHOSEN_CHANGES_MAX")[:drawn]:
        patch.setattr(cutline.snapshots.fold.limits, name, 0)
    if drawn == 1:
        patch.setattr(cutline.check.verify, "STORED_BYTES_MAX", 0)
    patch.setattr(cutline.snapshots.fold.limits, "CHANGES_PER_SEGMENT", 0)


@pytest.fixture(scope="module", autouse=True)
def drawn_folding(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make Spark fold the changes of two thirds of the modules, and half of these by rows."""
    drawn = random.Random(f"{SEED} {request.path.name}").randrange(3)
    with pytest.MonkeyPatch.context() as patch:
        fold_as(drawn, patch)
        patch.setenv(FOLDING, str(drawn))
        yield
