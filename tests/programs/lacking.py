"""Skip tests that need a program which this machine lacks; the end of a run says how many were skipped for which.

The servers that `make servers` installs are never skipped in CI (tests/servers/installed.py). Other programs come from
apt-get, Go or npm, or are installed by nobody here, so that a machine of CI may lack them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NoReturn

import pytest

LACKS = "lacks "


def lacking(program: str, how: str) -> str:
    """Return the reason for skipping a test that needs the program; `how` says why it is missing or how to get it."""
    return f"{LACKS}{program}: {how}"


def skip_without(program: str, how: str) -> NoReturn:
    """Skip the calling test, which needs the program."""
    pytest.skip(lacking(program, how))


def lacking_line(reasons: Iterable[str]) -> str:
    """Return how many tests were skipped for which program; "" if none were."""
    programs = [
        reason.partition(LACKS)[2].partition(":")[0]
        for reason in reasons
        if reason.removeprefix("Skipped: ").startswith(LACKS)
    ]
    if not programs:
        return ""
    counts = sorted(Counter(programs).items())
    return f"skipped because this machine lacks a program: {', '.join(f'{name} {count}' for name, count in counts)}"
