"""`restore --at` chooses the newest cut that was made not after a moment."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from msgspec import UNSET, structs

from cutline.cli.output.arguments import parse_moment
from cutline.fleet.record import Time
from cutline.snapshots.records.chain import Chain, summary_of
from cutline.snapshots.records.proven_chains import SnapshotMissingError, chain_at, cut_time
from cutline.storage.errors import UsageError
from tests.unit.made_commits import full_commit, increment_commit

BEGAN = datetime(2026, 11, 20, 10, 0, tzinfo=UTC)


def made(minutes: int) -> Time:
    return Time.of(BEGAN + timedelta(minutes=minutes))


def chain(*minutes: int | None) -> Chain:
    """Commits that began at 10:00, took half a minute, and made cuts so many minutes later; None: not recorded."""
    commits = [full_commit(), *(increment_commit(number) for number in range(1, len(minutes)))]
    for number, (commit, minute) in enumerate(zip(commits, minutes, strict=True)):
        cut = structs.replace(commit.cut, made_at=UNSET if minute is None else made(minute))
        commits[number] = structs.replace(commit, cut=cut, created_at=made(0), seconds=30.0)
    first, *others = commits
    return Chain(first, tuple(others))


@pytest.mark.parametrize(("minute", "number"), [(5, 0), (9, 0), (10, 1), (19, 1), (20, 2), (500, 2)])
def test_the_newest_cut_not_after_a_moment_counts_and_not_when_its_command_began(minute: int, number: int) -> None:
    assert chain_at(chain(5, 10, 20), BEGAN + timedelta(minutes=minute)).last.increment == number


def test_a_moment_before_the_first_cut_has_none() -> None:
    with pytest.raises(SnapshotMissingError, match="no cut that was made by 2026-11-20T10:04") as raised:
        chain_at(chain(5, 10), BEGAN + timedelta(minutes=4))
    assert "2026-11-20T10:05" in raised.value.hint


def test_a_cut_without_a_time_was_made_before_its_commit_was_put() -> None:
    early = chain(None, 1)
    assert chain_at(early, BEGAN + timedelta(seconds=30)).last.increment == 0
    with pytest.raises(SnapshotMissingError):
        chain_at(early, BEGAN + timedelta(seconds=29))


def test_a_summary_has_the_time_of_its_cut() -> None:
    for commit, seconds in zip(chain(None, 7).commits, (30, 420), strict=True):
        assert cut_time(summary_of(commit)) == cut_time(commit) == BEGAN + timedelta(seconds=seconds)


def test_a_time_says_how_far_it_is_from_utc() -> None:
    assert parse_moment("--at", "2026-11-20T10:00Z") == parse_moment("--at", "2026-11-20T11:00+01:00") == BEGAN
    for text in ("2026-11-20T10:00", "yesterday", "", "9999-12-31T23:59-23:59"):
        with pytest.raises(UsageError):
            parse_moment("--at", text)
