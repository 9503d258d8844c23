"""`snapshot … --json` in this process, for commands that start no Spark: a process of its own takes a second to start.

How a process ends is tested where that is the point (run_command in tests/snapshot_runs.py).
"""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from cli.main import run
from fleet.config import Fleet


def run_here(fleet: Fleet, *words: str) -> tuple[int, dict[str, Any]]:
    """Run the command line; its exit code and its document."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        code = run(["--fleet", str(fleet.path), *words, "--json"])
    assert out.getvalue(), errors.getvalue()
    return code, json.loads(out.getvalue())
