"""What the environment asks of tests that draw, or have a long form.

CUTLINE_SOAK=SECONDS chooses the long form and for how long about; without it the short one runs. CUTLINE_SEED=N repeats
what a run has drawn and printed.
"""

from __future__ import annotations

import os
import random

SOAK_SECONDS = int(os.environ.get("CUTLINE_SOAK", "0"))
SEED = int(os.environ.get("CUTLINE_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
