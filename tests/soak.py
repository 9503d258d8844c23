"""How long the tests that have a long form are to run: CUTLINE_SOAK=SECONDS chooses it, without it the short form."""

from __future__ import annotations

import os

SOAK_SECONDS = int(os.environ.get("CUTLINE_SOAK", "0"))
