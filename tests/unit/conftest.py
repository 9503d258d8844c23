"""The folder for temporary files, and settings: property tests run without deadlines, as the machine may be busy."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("cutline", deadline=None)
settings.load_profile("cutline")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files of this process and of those that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path
