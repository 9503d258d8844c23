"""A history file is read as PostgreSQL writes it."""

from __future__ import annotations

import pytest

from cutline.fleet.lsn import Lsn
from cutline.nodes.timelines import parse_history

# As a server of PostgreSQL 18 wrote it after two promotions, with a comment and an empty line, which it accepts.
WRITTEN = """# by hand
1\t0/3000180\tno recovery target specified

2\t1/5D8\tbefore 2026-11-29 17:57:04+00 and after
"""


def test_each_earlier_timeline_has_its_end() -> None:
    assert parse_history(WRITTEN) == {1: Lsn.parse("0/3000180"), 2: Lsn.parse("1/5D8")}
    assert parse_history("") == {}


@pytest.mark.parametrize("content", ["x\t0/1\treason", "1\t0-1\treason"])
def test_anything_else_is_refused(content: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_history(content)
