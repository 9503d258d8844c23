"""Environment variables for tests that draw their cases, or have a long form.

CUTLINE_SOAK=SECONDS chooses the long form and its approximate duration; the default is the short form. CUTLINE_SEED=N
repeats the draws of a run that printed N.
"""

from __future__ import annotations

import os
import random

SOAK_SECONDS = int(os.environ.get("CUTLINE_SOAK", "0"))
SEED = int(os.environ.get("CUTLINE_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
