"""Draws for every test module whether the driver folds few changes, as it does for users, or Spark folds all."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

import snapshots.fold.limits
from tests.run.soak import SEED


@pytest.fixture(scope="module", autouse=True)
def drawn_folding(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let Spark fold the changes in half of the modules."""
    with pytest.MonkeyPatch.context() as patch:
        if random.Random(f"{SEED} {request.path.name}").random() < 0.5:
            patch.setattr(snapshots.fold.limits, "CHANGES_MAX", 0)
        yield
