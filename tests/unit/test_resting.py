"""A check that rests on the record of an earlier check: when it may, what it reads, and what it says."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from msgspec import UNSET, structs

import cutline.check.earlier_check as earlier_check
import cutline.check.resting as resting
from cutline.check.earlier_check import RecordedChecks, commits_to_read_since, new_record, store_digest
from cutline.check.new_part import NewPart
from cutline.check.read_times import LastReads, milliseconds_of
from cutline.check.report import Conflict, Findings, SnapshotReport
from cutline.check.rereading import Deadline
from cutline.check.resting import ChainCheck, ends_of_parts, record_full, rest_on_record
from cutline.fleet.progress import Silent
from cutline.fleet.record import Time
from cutline.snapshots.operations.open_operations import document_names
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import AbsentCopy, Commit
from cutline.snapshots.records.operation_records import (
    CheckedPoint,
    CheckResult,
    ReadIncrement,
    ReadPart,
    ReadTimes,
)
from cutline.storage.location import StoreLocation
from cutline.storage.open import _open_once as open_once
from cutline.storage.store import ObjectStore
from tests.unit.made_checks import ended_after, ended_at, outcome_key, point
from tests.unit.made_commits import as_read, increment_commit, segment
from tests.unit.test_rereading import made_chain

NOW = datetime.now(UTC)
DAY = timedelta(days=1)
MINUTE = timedelta(minutes=1)
NAME, FLEET_ID = "daily", "f1"
REREAD_SECONDS = 30 * 86400.0


def sealed(chain: Chain) -> Chain:
    """The chain as it is read back, with the digests of its commits."""
    commits = [as_read(commit) for commit in chain.commits]
    return Chain(commits[0], tuple(commits[1:]))  # type: ignore[arg-type]


def extended(chain: Chain, count: int, size: int = 0) -> Chain:
    more: list[Commit] = [
        structs.replace(
            increment_commit(chain.last.increment + number), segments={}, counts={"bytes": size}, cut=chain.last.cut
        )
        for number in range(1, count + 1)
    ]
    return sealed(Chain(chain.full, (*chain.increments, *more)))  # type: ignore[arg-type]


@dataclass(slots=True)
class Case:
    """A store with a chain whose copies are only listed, and the checks of it."""

    location: StoreLocation
    chain: Chain
    parts: list[NewPart] = field(default_factory=list)

    @property
    def store(self) -> ObjectStore:
        return self.location.open()

    def check(self, chain: Chain | None = None, **given: Any) -> ChainCheck:
        chain = chain or self.chain
        report = SnapshotReport(NAME, chain.last.increment, allows_one_copy=True)
        check = ChainCheck(
            chain, self.location, Findings(report), cast("Any", None), Silent(), Deadline(None), None, NOW,
            store_digest(self.location, FLEET_ID), REREAD_SECONDS, {},
        )  # fmt: skip
        return structs.replace(check, **given)

    def rest(self, check: ChainCheck, check_part: Callable[[NewPart], None] | None = None) -> bool:
        def read(part: NewPart) -> None:
            self.parts.append(part)
            check.findings.count(objects=1)

        return rest_on_record(check, self.recorded, check_part or read)

    @property
    def recorded(self) -> RecordedChecks:
        return RecordedChecks(self.store, document_names(self.store))

    def commits_since(self) -> str:
        return commits_to_read_since(self.recorded.for_snapshot(NAME), NAME)

    def record(self, chain: Chain | None = None, age: timedelta = DAY, **changed: Any) -> str:
        """Store the outcome of a full check that ended so long ago, with some values of its record changed."""
        chain, at = chain or self.chain, NOW - age
        times = LastReads.of_full(chain.last.increment, milliseconds_of(at))
        read = new_record(chain, store_digest(self.location, FLEET_ID), times, ("", Time.of(at)), milliseconds_of(at))
        return self.store_record(structs.replace(read, **changed), at, chain.last.increment)

    def store_record(self, read: ReadTimes | None, at: datetime, increment: int, result: CheckResult = "valid") -> str:
        return ended_at(self.store, at, CheckedPoint(NAME, increment, result, full=True, read=read or UNSET))

    def why_not(self, chain: Chain | None = None) -> str:
        """The reason why a check does not rest on any record."""
        check = self.check(chain)
        assert not self.rest(check)
        assert (check.report.rests_on, check.report.skipped, check.report.conflicts) == (None, [], [])
        return check.report.unused_records


@pytest.fixture
def case(tmp_path: Path) -> Case:
    location = StoreLocation(f"file://{tmp_path}/store")
    store = location.open()
    store.create("fleet.json", b"{}")
    case = Case(location, sealed(made_chain(store)))
    for path in Path(tmp_path, "store").rglob("*.*"):
        os.utime(path, times=(path.stat().st_atime, (NOW - 60 * DAY).timestamp()))
    return case


def test_a_check_of_everything_is_recorded_and_the_next_check_rests_on_it(case: Case) -> None:
    full = case.check(moment=NOW - DAY)
    full.findings.count(objects=1)
    record_full(full)
    assert full.report.read is not None
    operation = case.store_record(full.report.read, NOW - DAY, 1)
    check = case.check()
    assert case.rest(check)
    report = check.report
    # Nothing is new. A day's share of the rest was reread: a 24th of about 27 objects.
    assert case.parts == []
    assert report.rests_on is not None
    assert (report.result, report.unused_records) == ("one-copy" if report.skipped else "valid", "")
    assert (report.rests_on.operation, report.rests_on.compared_by) == (operation, operation)
    assert report.rests_on.objects + report.rests_on.reread_objects == 27
    assert report.rests_on.reread_objects < 10
    assert report.rests_on.oldest_read_at == full.report.read.oldest_at
    assert report.read is not None
    assert (report.read.compared_by, report.read.compared_at) == (operation, full.report.read.compared_at)


def test_only_new_increments_are_checked_and_their_objects_count_as_read_now(case: Case) -> None:
    case.record()
    chain = extended(case.chain, 3)
    check = case.check(chain)
    assert case.rest(check)
    assert [(part.chain.last.increment, part.after) for part in case.parts] == [(4, 1)]
    assert check.report.read is not None
    increments = [(entry.increment, entry.at) for entry in check.report.read.increments]
    assert increments == [(1, Time.of(NOW - DAY)), (4, Time.of(NOW))]
    assert check.report.read.last_operation == "op-4"
    # The next check rests on this record.
    case.store_record(check.report.read, NOW, 4)
    later = case.check(chain, moment=NOW + timedelta(seconds=1))
    assert case.rest(later)
    assert len(case.parts) == 1


def test_conflicts_in_what_is_new_are_no_basis_for_later_checks(case: Case) -> None:
    case.record()
    check = case.check(extended(case.chain, 1))

    def find(part: NewPart) -> None:
        check.findings.conflict(Conflict("changes", "they differ"))

    assert case.rest(check, find)
    assert (check.report.result, check.report.read) == ("conflicts", None)
    assert check.report.rests_on is not None
    assert check.report.rests_on.reread_objects == 0


def test_a_missing_object_that_was_read_before_is_found(case: Case) -> None:
    case.record()
    gone = "snapshots/daily/base/a/op-0/part-003.parquet"
    case.store.delete(gone)
    check = case.check()
    assert case.rest(check)
    assert [(one.kind, one.object) for one in check.report.conflicts] == [("missing", gone)]
    assert check.report.read is None


def test_what_was_not_read_for_longer_than_allowed_is_reread_and_nothing_is_skipped(case: Case) -> None:
    case.record(age=31 * DAY)
    check = case.check()
    assert case.rest(check)
    assert check.report.rests_on is not None
    assert (check.report.rests_on.objects, check.report.rests_on.reread_objects) == (0, 27)
    assert all(part.is_one_copy for part in check.report.skipped)
    assert check.report.read is not None
    assert check.report.read.oldest_at == Time.of(NOW)
    # It still rests on the comparison by the earlier check.
    assert check.report.rests_on.oldest_read_at == Time.of(NOW)


def test_without_time_the_result_is_inconclusive_only_if_something_is_overdue(case: Case) -> None:
    case.record(age=31 * DAY)
    check = case.check(deadline=Deadline(0.0))
    assert case.rest(check)
    (overdue,) = [part for part in check.report.skipped if not part.is_one_copy]
    assert overdue.what.startswith("27 objects")
    assert "over 30 days ago" in overdue.why
    assert (check.report.result, check.report.read is None) == ("inconclusive", False)
    assert check.report.rests_on is not None
    assert (check.report.rests_on.left_objects, check.report.rests_on.reread_objects) == (27, 0)
    case.record(age=20 * DAY)
    check = case.check(deadline=Deadline(0.0))
    assert case.rest(check)
    assert check.report.result in ("valid", "one-copy")
    assert check.report.rests_on is not None
    assert check.report.rests_on.left_objects > 0


def test_a_short_time_to_reread_is_named_in_its_own_unit(case: Case) -> None:
    case.record(age=timedelta(seconds=6))
    check = case.check(deadline=Deadline(0.0), reread_seconds=5.0)
    assert case.rest(check)
    (overdue,) = [part for part in check.report.skipped if not part.is_one_copy]
    assert "which is over 5 s ago" in overdue.why


def test_the_reason_for_reading_everything_is_in_the_report_alone(case: Case) -> None:
    class Noted(Silent):
        notes: ClassVar[list[str]] = []

        def note(self, text: str) -> None:
            self.notes.append(text)

    check = case.check(progress=Noted())
    assert not case.rest(check)
    assert check.report.unused_records
    assert Noted.notes == []


def test_a_subset_is_reread_instead_of_what_is_due(case: Case) -> None:
    case.record(age=29 * DAY)
    read: list[int] = []
    for number in (1, 2, 3):
        check = case.check(subset=(number, 3))
        assert case.rest(check)
        assert check.report.rests_on is not None
        read.append(check.report.rests_on.reread_objects)
    assert sum(read) == 27
    assert max(read) < 27
    check = case.check(subset=(1, 3), reread_seconds=28 * 86400.0)
    assert case.rest(check)
    assert check.report.result == "inconclusive"


def test_increments_for_which_there_is_no_time_are_named_and_the_others_are_recorded(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resting, "PART_BYTES", 100)
    case.record()
    chain = extended(case.chain, 4, size=60)
    check = case.check(chain, deadline=Deadline(0.0))
    assert case.rest(check)
    # At least one part is checked, whatever the time, so repeated checks come to an end.
    assert [(part.chain.last.increment, part.after) for part in case.parts] == [(3, 1)]
    report = check.report
    assert (report.increment, report.result) == (3, "inconclusive")
    (left,) = [part for part in report.skipped if not part.is_one_copy]
    assert (left.what, left.why) == ("increments 4 to 5", "--max-seconds 0 ended the check")
    assert report.read is not None
    case.store_record(report.read, NOW, 3, "inconclusive")
    check = case.check(chain, deadline=Deadline(0.0))
    assert case.rest(check)
    assert [(part.chain.last.increment, part.after) for part in case.parts[1:]] == [(5, 3)]
    assert check.report.result in ("valid", "one-copy")


def test_parts_of_a_limited_check_end_with_whole_increments(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resting, "PART_BYTES", 100)
    chain = extended(case.chain, 4, size=60)
    assert ends_of_parts(chain, 1, is_limited=False) == [5]
    assert ends_of_parts(chain, 1, is_limited=True) == [3, 5]
    assert ends_of_parts(chain, 4, is_limited=True) == [5]
    assert ends_of_parts(chain, 5, is_limited=True) == ends_of_parts(chain, 5, is_limited=False) == []
    assert ends_of_parts(extended(case.chain, 2, size=500), 1, is_limited=True) == [2, 3]


def test_a_part_does_not_end_where_the_rest_can_not_be_checked_by_itself(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an earlier check that had ended there could not be rested on either."""
    monkeypatch.setattr(resting, "PART_BYTES", 0)
    problems = {3: "a transaction that was prepared on a before a table was copied has been committed since"}
    monkeypatch.setattr(NewPart, "problem", lambda part, _: problems.get(part.after or 0, ""))
    assert ends_of_parts(extended(case.chain, 4), 1, is_limited=True) == [2, 4, 5]


@pytest.mark.parametrize(("given", "read_objects"), [({"subset": (1, 1)}, 27), ({"deadline": Deadline(0.0)}, 0)])
def test_without_a_record_a_limited_check_reads_that_much_and_is_inconclusive(
    case: Case, given: dict[str, Any], read_objects: int
) -> None:
    check = case.check(**given)
    assert case.rest(check)
    report = check.report
    assert (report.result, report.rests_on, report.read, report.reads_all) == ("inconclusive", None, None, False)
    assert report.compared.objects == read_objects
    assert "no record" in report.unused_records
    whats = [part.what.partition(" objects")[0] for part in report.skipped]
    assert whats == [*(["contents of 27"] if not read_objects else []), "comparison of copies, cuts and transactions"]


def absent_at(chain: Chain, *numbers: int) -> Chain:
    """The chain with the copy of b left out of these increments."""
    copy = AbsentCopy(numbers[0], "it is away", segment("b", 1, 0, 100))
    increments = (
        structs.replace(one, absent={"b": copy}) if one.increment in numbers else one for one in chain.increments
    )
    return sealed(Chain(chain.full, tuple(increments)))


def test_a_part_does_not_end_while_a_copy_is_away_that_comes_back(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resting, "PART_BYTES", 0)
    chain = extended(case.chain, 5)
    assert ends_of_parts(chain, 1, is_limited=True) == [2, 3, 4, 5, 6]
    assert ends_of_parts(absent_at(chain, 3, 4), 1, is_limited=True) == [2, 5, 6]
    # It is still away: no part has its WAL.
    assert ends_of_parts(absent_at(chain, 5, 6), 1, is_limited=True) == [2, 3, 4, 5, 6]
    assert ends_of_parts(absent_at(chain, 3, 5, 6), 1, is_limited=True) == [2, 4, 5, 6]


@pytest.mark.parametrize("new", [0, 1])
def test_what_earlier_increments_lack_is_named_and_what_the_newest_lacks_is_skipped(case: Case, new: int) -> None:
    """Neither depends on what this check reads: the verdict is that of a check of everything."""
    back = absent_at(extended(case.chain, 5), 3, 4)
    case.record(back.up_to(back.last.increment - new))
    check = case.check(back)
    assert case.rest(check)
    assert (check.report.result, check.report.skipped) == ("valid", [])
    assert {(one.first, one.last) for one in check.report.uncompared_points} == {(3, 4)}


@pytest.mark.parametrize("new", [0, 1])
def test_a_check_on_the_record_of_an_inconclusive_check_is_inconclusive(case: Case, new: int) -> None:
    away = absent_at(extended(case.chain, 5), 4, 5, 6)
    case.record(away.up_to(away.last.increment - new))
    check = case.check(away)
    assert case.rest(check)
    assert check.report.result == "inconclusive"
    assert [part.what for part in check.report.skipped] == ["rows of shard a", "the copy of b"]
    assert check.report.uncompared_points == ()


def test_everything_is_read_if_no_check_has_found_the_chain_valid(case: Case) -> None:
    assert case.why_not() == "there is no record of a check that found this chain valid"
    ended_at(case.store, NOW - DAY, point(NAME, 1))
    assert case.why_not() == "there is no record of a check that found this chain valid"


@pytest.mark.parametrize(("changed", "reason"), [
    ({"version": "0.0.9"}, "version 0.0.9 of Cutline made it"),
    ({"rules": earlier_check.RULES + 1}, f"with rules {earlier_check.RULES + 1} of checking"),
    ({"store": "0" * 64}, "at another address"),
    ({"commits": "0" * 64}, "no longer begins with the commits"),
    ({"compared_at": Time.of(NOW + timedelta(hours=1))}, "times in the future"),
    ({"increments": (ReadIncrement(0, Time.of(NOW - DAY)),)}, "about increment 0"),
    ({"increments": (ReadIncrement(1, Time.of(NOW + DAY)),)}, "times in the future"),
    ({"parts": (ReadPart(5, Time.of(NOW - DAY)),)}, "do not cover every place"),
])  # fmt: skip
def test_a_record_of_something_else_is_not_used(case: Case, changed: dict[str, Any], reason: str) -> None:
    operation = case.record(**changed)
    found = case.why_not()
    assert operation in found
    assert reason in found


def test_the_newest_record_that_can_be_used_is_used(case: Case) -> None:
    operation = case.record(age=2 * DAY)
    case.record(age=DAY, version="0.0.9")
    check = case.check()
    assert case.rest(check)
    assert check.report.rests_on is not None
    assert check.report.rests_on.operation == operation


def test_a_record_of_increments_that_were_pruned_is_not_used(case: Case) -> None:
    case.record()
    assert "no longer begins with the commits" in case.why_not(case.chain.up_to(0))
    # Nor is the record of a chain that had another increment of the same number.
    other = structs.replace(case.chain.increments[0], comment="another")
    assert "no longer begins" in case.why_not(sealed(Chain(case.chain.full, (other,))))


def test_after_conflicts_everything_is_compared_again(case: Case) -> None:
    case.record(age=2 * DAY)
    found_by = ended_at(case.store, NOW - DAY, point(NAME, 0, "conflicts", full=False))
    assert f"check {found_by} has found conflicts" in case.why_not()
    # A check that began before the conflicts were found may have read the objects before they were damaged.
    case.record(age=DAY / 2, compared_at=Time.of(NOW - 1.5 * DAY))
    assert "has found conflicts since everything was compared" in case.why_not()
    case.record(age=DAY / 4)
    check = case.check()
    assert case.rest(check)


def test_conflicts_that_a_machine_whose_clock_is_two_minutes_behind_has_found_count(case: Case) -> None:
    case.record(age=10 * MINUTE)
    # Found at 9 minutes ago, which that machine calls 11 minutes ago.
    found_by = ended_at(case.store, NOW - 11 * MINUTE, point(NAME, 1, "conflicts"))
    assert f"check {found_by} has found conflicts less than five minutes before, or since" in case.why_not()
    # Clocks differ by five minutes at most.
    case.record(age=5 * MINUTE)
    assert case.rest(case.check())


def test_conflicts_that_a_long_check_has_found_count_although_many_checks_have_begun_since(case: Case) -> None:
    case.record(age=2 * DAY)
    found_by = ended_after(case.store, NOW - 300 * MINUTE, NOW - MINUTE, point(NAME, 1, "conflicts"))
    # Until then, a check of what is new ran each minute, and found nothing.
    for minutes in range(290, 1, -1):
        case.record(age=minutes * MINUTE, compared_by="x-1", compared_at=Time.of(NOW - 2 * DAY))
    assert f"check {found_by} has found conflicts since" in case.why_not()


@pytest.mark.parametrize("size", [0, 1, 500])
@pytest.mark.parametrize(("minutes", "is_used"), [(0, False), (4, False), (6, True)])
def test_conflicts_of_which_the_record_can_not_be_read_count_from_when_it_was_stored(
    case: Case,
    minutes: int,
    is_used: bool,  # noqa: FBT001  # a parameter
    size: int,
) -> None:
    key = outcome_key("20261101T000000Z-000000000a", point(NAME, 1, "conflicts"))
    case.record(age=10 * MINUTE)
    case.store.create(key, b"{" * size)
    path = Path(case.location.url.removeprefix("file://"), key)
    stored_at = NOW - (10 + minutes) * MINUTE
    os.utime(path, times=(path.stat().st_atime, stored_at.timestamp()))
    if is_used:
        assert case.rest(case.check())
    else:
        assert "has found conflicts since then, and its record can't be read" in case.why_not()


def test_a_record_from_a_clock_that_was_ahead_is_not_used_even_when_that_time_has_come(case: Case) -> None:
    operation = case.record(age=DAY)
    path = Path(case.location.url.removeprefix("file://"), outcome_key(operation, point(NAME, 1)))
    # The store received it a week earlier than it says.
    os.utime(path, times=(path.stat().st_atime, (NOW - 8 * DAY).timestamp()))
    assert "later than the time at which the store received it" in case.why_not()


def test_objects_that_were_put_in_the_place_of_those_that_were_read_are_read(case: Case) -> None:
    operation = case.record()
    path = Path(case.location.url.removeprefix("file://"), "snapshots/daily/base/a/op-0/part-003.parquet")
    os.utime(path)
    assert case.why_not().startswith(f"some objects (1) were stored after check {operation} had read")


def test_the_store_is_told_from_another_and_from_a_copy_of_it(tmp_path: Path) -> None:
    def made(folder: Path) -> StoreLocation:
        location = StoreLocation(f"file://{folder}")
        location.open().create("fleet.json", b"{}")
        return location

    one, other = made(tmp_path / "one"), made(tmp_path / "other")
    assert store_digest(one, "f") == store_digest(StoreLocation(one.url), "f")
    found = {store_digest(one, "f"), store_digest(one, "g"), store_digest(other, "f")}
    # As if a copy of the folder were mounted in its place.
    file = tmp_path / "one" / "fleet.json"
    shutil.copy2(file, copied := tmp_path / "copied.json")
    copied.replace(file)
    assert len({*found, store_digest(one, "f")}) == 4
    s3 = StoreLocation("s3://bucket/folder", {"endpoint_url": "http://127.0.0.1:1", "key": "k", "secret": "s"})
    digests = {
        store_digest(s3, "f"),
        store_digest(replace(s3, options={**s3.options, "secret": "another"}), "f"),
        store_digest(replace(s3, options={**s3.options, "endpoint_url": "http://127.0.0.1:2"}), "f"),
    }
    assert len(digests) == 2


def test_commits_since_an_hour_before_the_last_checked_one_are_looked_for(case: Case) -> None:
    assert case.commits_since() == ""
    case.record(last_operation="20261124T193137Z-65c4c093aa")
    assert case.commits_since() == "20261124T183137Z-65c4c093aa"
    # Then the record before that counts.
    case.record(age=DAY / 2, last_operation="not an id")
    assert case.commits_since() == "20261124T183137Z-65c4c093aa"


def test_services_that_only_the_aws_configuration_distinguishes_are_different_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(endpoint: str, region: str = "us-east-1") -> str:
        # As in a new process: within one, the store stays open.
        open_once.cache_clear()
        file = tmp_path / "config"
        line = f"endpoint_url = {endpoint}\n" if endpoint else ""
        file.write_text(f"[default]\nregion = {region}\n{line}")
        return store_digest(StoreLocation("s3://bucket/folder"), "f")

    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    first, second, aws = digest("http://127.0.0.1:1"), digest("http://127.0.0.1:2"), digest("")
    assert len({first, second, aws}) == 3
    assert digest("http://127.0.0.1:1") == first
    # All endpoints of a partition of AWS show the same buckets.
    assert digest("", "eu-central-1") == digest("https://vpce-1.s3.us-east-1.vpce.amazonaws.com") == aws
    assert digest("", "us-gov-west-1") != aws
    open_once.cache_clear()
