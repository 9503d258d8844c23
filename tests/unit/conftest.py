"""Property tests run without deadlines, so that none fails because the machine is busy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("cutline", deadline=None)
settings.load_profile("cutline")
