"""Environment variables for tests that draw their cases, or have a long form.

CUTLINE_SOAK=SECONDS chooses the long form and its approximate duration; the default is the short form, which draws the
same cases in every run. Long forms print their seed: CUTLINE_SEED=N repeats one, and draws others in the short form.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import TypeVar

Case = TypeVar("Case")

SOAK_SECONDS = int(os.environ.get("CUTLINE_SOAK", "0"))
# A change is never red because of what happened to be drawn.
SEED = int(os.environ.get("CUTLINE_SEED", "0")) or (random.SystemRandom().randrange(1 << 32) if SOAK_SECONDS else 1)


def draw(cases: Iterable[Case], count: int = 1) -> list[Case]:
    """Return `count` of the cases, in their order, as the seed draws them; in the long form all."""
    every = list(cases)
    if SOAK_SECONDS:
        return every
    return [every[number] for number in sorted(random.Random(SEED).sample(range(len(every)), count))]
