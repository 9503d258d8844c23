"""Property tests without deadlines: a busy machine is no fault of the code."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("cutline", deadline=None)
settings.load_profile("cutline")
