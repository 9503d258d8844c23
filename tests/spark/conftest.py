"""A folder for the temporary files of sessions that a test starts in other processes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture
def temporary_files_of_subprocesses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the files of killed processes and the logs of failed starts in a folder, short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:  # only its length matters
        monkeypatch.setenv("TMPDIR", folder)
        yield
