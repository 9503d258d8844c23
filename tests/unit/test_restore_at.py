"""`restore --at` chooses the newest cut that was made not after a moment."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from msgspec import structs

from cutline.cli.output.arguments import parse_moment
from cutline.fleet.record import Time
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.proven_chains import SnapshotMissingError, chain_at
from cutline.storage.errors import UsageError
from tests.unit.made_commits import full_commit, increment_commit

BEGAN = datetime(2026, 11, 20, 10, 0, tzinfo=UTC)


def made(minutes: int) -> Time:
    return Time.of(BEGAN + timedelta(minutes=minutes))


def chain(*minutes: int) -> Chain:
    """Commits that began at 10:00, took half a minute, and made cuts so many minutes later."""
    commits = [full_commit(), *(increment_commit(number) for number in range(1, len(minutes)))]
    for number, (commit, minute) in enumerate(zip(commits, minutes, strict=True)):
        cut = structs.replace(commit.cut, made_at=made(minute))
        commits[number] = structs.replace(commit, cut=cut, created_at=made(0), seconds=30.0)
    first, *others = commits
    return Chain(first, tuple(others))


@pytest.mark.parametrize(("minute", "number"), [(5, 0), (9, 0), (10, 1), (19, 1), (20, 2), (500, 2)])
def test_the_newest_cut_not_after_a_moment_counts_and_not_when_its_command_began(minute: int, number: int) -> None:
    assert chain_at(chain(5, 10, 20), BEGAN + timedelta(minutes=minute)).last.increment == number


def test_a_moment_before_the_first_cut_has_none() -> None:
    with pytest.raises(SnapshotMissingError, match="no cut at or before 2026-11-20T10:04") as raised:
        chain_at(chain(5, 10), BEGAN + timedelta(minutes=4))
    assert "2026-11-20T10:05" in raised.value.hint


def test_a_time_says_how_far_it_is_from_utc() -> None:
    assert parse_moment("--at", "2026-11-20T10:00Z") == parse_moment("--at", "2026-11-20T11:00+01:00") == BEGAN
    for text in ("2026-11-20T10:00", "yesterday", "", "9999-12-31T23:59-23:59"):
        with pytest.raises(UsageError):
            parse_moment("--at", text)
