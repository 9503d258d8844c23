"""A history file is read as PostgreSQL writes it, and two histories are compared."""

from __future__ import annotations

import pytest

from cutline.fleet.lsn import Lsn
from cutline.fleet.timeline_history import TimelineHistory
from cutline.nodes.timelines import parse_history
from cutline.wal.drain.lineage import WalDivergedError, check_histories

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


def test_a_server_that_was_promoted_before_a_switch_of_which_it_knew_has_nothing_of_the_timeline_after_it() -> None:
    found = parse_history("1\t0/3000180\tnew\n2\t0/2000060\tnew\n3\t0/5000000\tnew\n")
    assert found == {1: Lsn(0x2000060), 2: Lsn(0x2000060), 3: Lsn(0x5000000)}


def history(timeline: int, **ends: int) -> TimelineHistory:
    """A timeline, and where those before it ended, as t1=100."""
    return TimelineHistory(timeline, {int(one[1:]): Lsn(end) for one, end in ends.items()})


@pytest.mark.parametrize(
    ("was", "now", "parted"),
    [
        (history(1), history(1), None),
        (history(3, t1=100, t2=200), history(3, t1=100, t2=200), None),
        # The server was promoted since, once or more often.
        (history(1), history(2, t1=100), 100),
        (history(1), history(4, t1=100, t3=200), 100),
        (history(3, t1=100, t2=100), history(4, t1=100, t2=100, t3=300), 300),
        (history(2, t1=100), history(3, t1=100, t2=300), 300),
        # It is the server before a promotion.
        (history(2, t1=100), history(1), 100),
        # Two servers were promoted, and their timelines have the same number, or the other was promoted once more.
        (history(2, t1=100), history(2, t1=90), 90),
        (history(2, t1=90), history(2, t1=100), 90),
        (history(2, t1=100), history(3, t1=90, t2=300), 90),
        (history(2, t1=100), history(3, t1=100), 100),
        (history(4, t1=100, t2=200), history(4, t1=100, t3=200), 100),
        # A history file is gone.
        (history(2), history(2), None),
        (history(2, t1=100), history(2), 0),
        (history(2), history(3, t1=100, t2=300), 0),
        (history(1), history(2), 0),
    ],
)
def test_two_histories_part_where_the_first_of_them_leaves_the_other(
    was: TimelineHistory, now: TimelineHistory, parted: int | None
) -> None:
    assert was.parted_from(now) == parted
    assert now.parted_from(was) == parted


@pytest.mark.parametrize(
    ("was", "now", "how"),
    [
        (history(1), history(2, t1=100), "on timeline 2, which left timeline 1 at 0/64, but the chain has WAL of"),
        (history(2, t1=100), history(3, t1=90), "which left the history of the chain's timeline 2 at 0/5A, but"),
        (history(1), history(11), "on timeline 11, whose history file 0000000B.history it lacks, but"),
        (history(2), history(2, t1=100), "can't be compared, because the server lacked 00000002.history at the last"),
        (history(2, t1=100), history(3, t2=200), "on timeline 3, which does not continue timeline 2, but"),
    ],
)
def test_the_reason_why_a_history_does_not_continue_is_named(
    was: TimelineHistory, now: TimelineHistory, how: str
) -> None:
    with pytest.raises(WalDivergedError) as raised:
        check_histories("s1", was, Lsn(200), now)
    assert how in raised.value.message
