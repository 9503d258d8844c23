"""What `list` knows of checks: the newest that have ended, how many records are read, and what can't be read."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, UnsetType, structs
from msgspec.structs import replace

import cutline.snapshots.operations.ended_operations as checks
import cutline.snapshots.operations.ended_operations as ended_operations
from cutline.cli.commands.list import checks_document
from cutline.fleet.record import Time
from cutline.snapshots.listing.listing import Entry
from cutline.snapshots.operations.ended_operations import (
    EndedCheck,
    EndedReader,
    NewestChecks,
    newest_covering,
    read_checks,
    standing_check,
)
from cutline.snapshots.operations.open_operations import document_names
from cutline.snapshots.operations.operation import begin, new_operation, record_outcome
from cutline.snapshots.records.chain import summary_of
from cutline.snapshots.records.operation_records import CheckedPoint, CheckResult
from cutline.storage.memory import InMemoryStore
from tests.unit.made_checks import ended, ended_after, ended_at, outcome_key, point
from tests.unit.made_commits import increment_commit, unused_url


@dataclass(frozen=True, slots=True)
class ReadingStore(InMemoryStore):
    """A store that notes which keys are read."""

    read_keys: list[str] = field(default_factory=list)

    def read_range(self, key: str, start: int, size: int) -> bytes:
        self.read_keys.append(key)
        return InMemoryStore.read_range(self, key, start, size)


def read(store: InMemoryStore, *wanted: str) -> NewestChecks:
    return read_checks(store, document_names(store), set(wanted) or None)


def test_the_newest_check_counts_of_each_point_and_of_each_snapshot_by_how_much_it_was_of() -> None:
    store = ReadingStore(unused_url())
    first = ended(store, 1, point("a", 1), point("b", 0, "conflicts"))
    second = ended(store, 2, point("a", 2))
    third = ended(store, 3, point("a", 3, "conflicts"))
    ended(store, 4, point("a", 3, "inconclusive", full=False))
    ended(store, 5, kind="gc")
    fifth = ended(store, 6, point("a", 1, full=False))
    found = read(store)
    assert {name: one.operation for name, one in found.last.items()} == {"a": fifth, "b": first}
    # A check that was asked for less, or for an earlier increment, is not a full one.
    assert {name: one.operation for name, one in found.full.items()} == {"a": third, "b": first}
    assert {name: one.operation for name, one in found.valid.items()} == {"a": second}
    assert found.valid["a"].ended_at == "2026-11-24T10:02:30.000Z"
    entry = Entry("a", None, summaries=tuple(summary_of(increment_commit(number)) for number in (1, 2, 3)))
    shown = {field: one and one["operation"] for field, one in checks_document(found, entry).items()}
    assert shown == {
        "last_check": fifth, "last_full_check": third, "last_valid_check": second, "standing_conflicts": third,
        "last_covering_check": third, "last_record": None,
    }  # fmt: skip
    other = checks_document(found, Entry("b", None))
    assert (other["last_valid_check"], other["standing_conflicts"]["operation"]) == (None, first)


def test_a_check_covers_what_precedes_its_increment_and_an_inconclusive_one_counts_last() -> None:
    """In the order of their ends; of four restore points, and of five, the last of which needs what has conflicts."""
    ends: list[tuple[int, CheckResult]] = [
        (1, "valid"),
        (3, "conflicts"),
        (0, "valid"),
        (2, "inconclusive"),
        (9, "inconclusive"),
    ]
    checks = [
        EndedCheck(str(minute), Time(f"2026-11-24T10:{minute:02}:00.000Z"), point("a", increment, result))
        for minute, (increment, result) in enumerate(ends)
    ]
    assert [one and one.operation for one in newest_covering(checks, 4)] == ["2", "1", "1", "1"]
    for some in (checks, checks[:-1]):
        assert [one and one.operation for one in newest_covering(some, 5)] == ["2", "1", "1", "1", "1"]
    assert [one and one.operation for one in newest_covering(checks[:1], 3)] == ["0", "0", None]
    assert newest_covering([], 2) == [None, None]


def standing(count: int, *ends: tuple[CheckedPoint, int]) -> str | None:
    """The minute at which the check ended that stands for `count` restore points."""
    checks = [EndedCheck(str(minute), Time(f"2026-11-24T10:{minute:02}:00.000Z"), one) for one, minute in ends]
    found = [standing_check(order, count) for order in (checks, checks[::-1])]
    assert found[0] == found[1]
    return found[0] and found[0].operation


def test_conflicts_stand_until_a_later_full_check_finds_all_of_it_valid() -> None:
    conflicts = (point("a", 2, "conflicts"), 1)
    assert standing(3, conflicts) == "1"
    assert standing(3, conflicts, (point("a", 2), 2)) == "2"
    assert standing(3, (point("a", 2), 0), conflicts) == "1"
    # A check of less, or an inconclusive one, may have passed over the damage.
    assert standing(3, conflicts, (point("a", 2, full=False), 2), (point("a", 2, "inconclusive"), 3)) == "1"
    # What a check of less has found is there.
    assert standing(3, (point("a", 2), 0), (point("a", 0, "conflicts", full=False), 1)) == "1"
    assert standing(3, (point("a", 2, full=False), 2), (point("a", 2, "inconclusive"), 3)) is None
    assert standing(0) is None


def test_conflicts_of_any_restore_point_stand_for_the_snapshot() -> None:
    # Increments that came after the check need what it read.
    assert standing(9, (point("a", 2, "conflicts"), 1)) == "1"
    # The full check was begun before increment 3 was there, so it has not read what is wrong with that.
    assert standing(4, (point("a", 3, "conflicts", full=False), 1), (point("a", 2), 2)) == "1"
    assert standing(4, (point("a", 3, "conflicts", full=False), 1), (point("a", 3), 2)) == "2"
    # Of a snapshot without its increments, what was found of all may be in what is left, until that is checked.
    assert standing(1, (point("a", 3, "conflicts"), 1)) == "1"
    assert standing(1, (point("a", 3, "conflicts"), 1), (point("a", 0), 2)) == "2"


def test_a_check_that_passes_is_inconclusive_about_what_it_did_not_compare() -> None:
    """Restore points that it names as not compared are those of which a check of their own would be inconclusive."""
    partial = structs.replace(point("a", 5), uncompared=((0, 1), (3, 3)))
    checks = [
        EndedCheck(str(minute), Time(f"2026-11-24T10:{minute:02}:00.000Z"), one)
        for minute, one in enumerate((point("a", 1), point("a", 3, "inconclusive"), partial))
    ]
    found = [one and (one.operation, one.point.result) for one in newest_covering(checks, 7)]
    valid, unsure = ("2", "valid"), ("2", "inconclusive")
    # An earlier check has compared the first two.
    assert found == [("0", "valid"), ("0", "valid"), valid, unsure, valid, valid, None]
    # Conflicts that it found are there, whatever it did not compare.
    conflicts = structs.replace(partial, result="conflicts")
    assert {one and one.point.result for one in newest_covering([replace(checks[2], point=conflicts)], 6)} == {
        "conflicts"
    }
    # It does not change the result on the snapshot.
    assert standing(6, (point("a", 3, "conflicts"), 1), (partial, 2)) == "2"


def building(increment: int, *, restorable: bool, full: bool = True) -> CheckedPoint:
    """The result of a check with --restorable, which found only what keeps a restore from loading the rows, if that."""
    found = point("a", increment, "valid" if restorable else "conflicts", full=full)
    return structs.replace(found, restorable=restorable)


def test_only_building_the_rows_again_settles_what_would_keep_a_restore_from_loading_them() -> None:
    refused = (building(2, restorable=False), 1)
    assert standing(3, refused, (point("a", 2), 2)) == "1"
    assert standing(3, refused, (point("a", 2), 2), (building(2, restorable=True), 3)) == "3"
    assert standing(3, refused, (building(1, restorable=True), 2)) == "1"
    assert standing(3, refused, (building(2, restorable=True, full=False), 2)) == "1"
    # Newer conflicts count, of any kind; and building the rows again settles those, too.
    assert standing(3, refused, (point("a", 2, "conflicts"), 2), (point("a", 2), 3)) == "1"
    assert standing(3, (point("a", 2, "conflicts"), 1), (building(2, restorable=True), 2)) == "2"
    # The rows of later restore points are the same, as far as anybody knows.
    checks = [
        EndedCheck(str(minute), Time(f"2026-11-24T10:{minute:02}:00.000Z"), one)
        for minute, one in enumerate((building(1, restorable=False), point("a", 3), building(3, restorable=True)))
    ]
    assert [one and one.operation for one in newest_covering(checks[:2], 5)] == ["0", "0", "0", "0", "0"]
    assert [one and one.operation for one in newest_covering(checks, 5)] == ["2", "2", "2", "2", None]


def test_conflicts_that_keep_a_restore_from_loading_rows_stand_until_they_are_built_again() -> None:
    """Also if many checks have ended since: those that may settle them are read."""
    store = InMemoryStore(unused_url())
    ended(store, 1, building(2, restorable=False))
    for minute in range(2, 8):
        ended(store, minute, point("a", 2))
    assert read(store, "a").standing_conflicts("a", 3) is not None
    ended(store, 8, building(2, restorable=True))
    assert read(store, "a").standing_conflicts("a", 3) is None


RESULTS = st.sampled_from(["valid", "conflicts", "inconclusive"])
SPANS = st.sampled_from([(), ((0, 0),), ((0, 1), (3, 3)), ((1, 4),)])
DRAWN = st.tuples(st.integers(0, 5), RESULTS, SPANS, st.sampled_from([UNSET, True, False]))


@given(st.lists(DRAWN, max_size=8), st.integers(1, 6))
def test_conflicts_count_for_what_follows_until_a_newer_check_shows_them_to_be_gone(
    drawn: list[tuple[int, CheckResult, tuple[tuple[int, int], ...], bool | UnsetType]], count: int
) -> None:
    """The same rule, asked of each restore point by itself."""
    ends = [
        EndedCheck(
            str(minute),
            Time(f"2026-11-24T10:{minute:02}:00.000Z"),
            structs.replace(
                point("a", increment, result),
                uncompared=spans or UNSET,
                # Only conflicts say that a restore could not load the rows.
                restorable=True if restorable is False and result != "conflicts" else restorable,
            ),
        )
        for minute, (increment, result, spans, restorable) in enumerate(drawn)
    ]

    def says(one: EndedCheck, increment: int) -> str:
        spans = one.point.uncompared or ()
        is_named = any(first <= increment <= last for first, last in spans)  # type: ignore[union-attr]
        return "inconclusive" if one.point.result == "valid" and is_named else one.point.result

    def own(increment: int) -> tuple[EndedCheck, str] | None:
        reaching = [one for one in ends if one.point.increment >= increment]
        conclusive = [one for one in reaching if says(one, increment) != "inconclusive"]
        built = [one for one in reaching if one.point.restorable is not UNSET and one.point.result != "inconclusive"]
        if built and built[-1].point.restorable is False and says(conclusive[-1], increment) != "conflicts":
            return built[-1], "conflicts"
        if conclusive:
            return conclusive[-1], says(conclusive[-1], increment)
        return (reaching[-1], "inconclusive") if reaching else None

    def expected(increment: int) -> tuple[EndedCheck, str] | None:
        found = own(increment)
        for before in range(increment):
            match own(before):
                case (carried, "conflicts") if carried.point.increment == before:
                    if found is None or found[1] == "inconclusive" or found[0].moment < carried.moment:
                        found = carried, "conflicts"
                    elif carried.point.restorable is False and found[1] == "valid":
                        found = (carried, "conflicts") if found[0].point.restorable is not True else found
        return found

    covering = newest_covering(ends, count)
    assert [one and (one.operation, one.point.result) for one in covering] == [
        one and (one[0].operation, one[1]) for one in map(expected, range(count))
    ]


def test_of_two_checks_the_one_that_ended_later_is_the_newest() -> None:
    found = NewestChecks()
    for at in ("2026-11-24T10:00:01.000Z", "2026-11-24T12:00:02.000+02:00", "2026-11-24T10:00:01.500Z"):
        found.add(EndedCheck(at, Time(at), point("a", 1)))
    assert found.last["a"].operation == "2026-11-24T12:00:02.000+02:00"


def test_records_of_operations_with_an_intent_are_not_read() -> None:
    store = ReadingStore(unused_url())
    for number in range(40):
        intent = new_operation("create", "daily", number, ("a",))
        begin(store, intent)
        record_outcome(store, intent, "done")
    one = ended(store, 1, point("daily", 3))
    store.read_keys.clear()
    assert read(store).valid["daily"].operation == one
    assert store.read_keys == [outcome_key(one, point("daily", 3))]


def test_reading_ends_with_a_full_valid_check_of_every_snapshot_and_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ended_operations, "AT_ONCE", 2)
    monkeypatch.setattr(checks, "READ_MAX", 6)
    store = ReadingStore(unused_url())
    ids = [ended(store, minute, point("a", minute)) for minute in range(20)]
    keys = [outcome_key(one, point("a", 0)) for one in ids]
    for wanted, count in ((["a"], 2), (["a", "never checked"], 6), ([], 6)):
        store.read_keys.clear()
        assert read(store, *wanted).valid["a"].operation == ids[-1]
        assert sorted(store.read_keys) == keys[-count:]
    store.read_keys.clear()
    read_checks(store, document_names(store), count_max=9)
    assert sorted(store.read_keys) == keys[-9:]


def test_a_record_that_can_not_be_read_hides_no_other() -> None:
    store = ReadingStore(unused_url())
    one = ended(store, 1, point("a", 1))
    damaged = ended(store, 2, point("a", 2))
    store.delete(outcome_key(damaged, point("a", 2)))
    store.create(outcome_key(damaged, point("a", 2)), b"{" * 500)
    store.create("operations/somebody's/outcome.json", b"x" * 500)
    assert [check.operation for check in read(store).last.values()] == [one]
    assert read(store).unread == [damaged]


@dataclass(frozen=True, slots=True)
class HastyStore(ReadingStore):
    """A store whose first read of each object ends early."""

    def read_range(self, key: str, start: int, size: int) -> bytes:
        is_first = key not in self.read_keys
        body = ReadingStore.read_range(self, key, start, size)
        return body[:-1] if is_first else body


def test_a_record_whose_read_ends_early_is_read_again() -> None:
    store = HastyStore(unused_url())
    one = ended(store, 1, point("a", 1, "conflicts"))
    found = read(store)
    assert [check.operation for check in found.last.values()] == [one]
    assert found.unread == []
    assert store.read_keys == [outcome_key(one, point("a", 1, "conflicts"))] * 2


def test_of_checks_from_the_future_only_conflicts_count() -> None:
    store = InMemoryStore(unused_url())
    now = datetime.now(UTC)
    ids = {}
    for minutes, result in ((-1, "conflicts"), (4, "valid"), (10, "inconclusive"), (60, "valid")):
        ids[minutes] = ended_at(store, now + timedelta(minutes=minutes), point("daily", 0, cast(CheckResult, result)))
    checks = read_checks(store, document_names(store))
    assert checks.full["daily"].operation == ids[4]
    assert checks.standing_conflicts("daily", 1) is None
    assert sorted(checks.unread) == sorted([ids[10], ids[60]])
    ahead = ended_at(store, now + timedelta(days=1), point("daily", 0, "conflicts"))
    standing = read_checks(store, document_names(store)).standing_conflicts("daily", 1)
    assert standing is not None
    assert standing.operation == ahead


MINUTE = timedelta(minutes=1)


def many_checks_and_a_long_one(store: InMemoryStore, now: datetime) -> str:
    """A check that lasts 300 minutes ends with conflicts; 290 checks of less have begun and ended meanwhile."""
    long = ended_after(store, now - 300 * MINUTE, now - 5 * MINUTE, point("daily", 1, "conflicts"))
    for minutes in range(295, 5, -1):
        ended_at(store, now - minutes * MINUTE, point("daily", 1, full=False))
    return long


def test_conflicts_stand_however_many_checks_have_begun_since_that_check_began() -> None:
    store, now = InMemoryStore(unused_url()), datetime.now(UTC)
    long = many_checks_and_a_long_one(store, now)
    for wanted in ((), ("daily",)):
        standing = read(store, *wanted).standing_conflicts("daily", 2)
        assert standing is not None
        assert standing.operation == long


def test_a_full_check_settles_conflicts_however_many_checks_have_begun_since_then() -> None:
    store, now = ReadingStore(unused_url()), datetime.now(UTC)
    ended_at(store, now - 900 * MINUTE, point("daily", 1, "conflicts"))
    ended_at(store, now - 800 * MINUTE, point("daily", 1))
    for minutes in range(300, 0, -1):
        ended_at(store, now - minutes * MINUTE, point("daily", 1, full=False))
    store.read_keys.clear()
    assert read(store, "daily").standing_conflicts("daily", 2) is None
    # The newest, and the two that matter, which a listing shows.
    assert len(store.read_keys) == checks.READ_MAX + 2


def test_the_metrics_count_conflicts_of_checks_that_are_not_among_the_newest() -> None:
    store, now = ReadingStore(unused_url()), datetime.now(UTC)
    many_checks_and_a_long_one(store, now)
    reader = EndedReader(20)
    for has_been_read in (False, True):
        store.read_keys.clear()
        ended = reader.read(store, ())
        found = NewestChecks()
        found.add_all((*ended.found, *ended.earlier_checks))
        assert found.standing_conflicts("daily", 2) is not None
        assert len(ended.found) == 20
        # Outcomes are read once.
        assert len(store.read_keys) == (0 if has_been_read else 21)
    ended_at(store, now, point("daily", 1))
    ended = reader.read(store, ())
    found = NewestChecks()
    found.add_all((*ended.found, *ended.earlier_checks))
    assert found.standing_conflicts("daily", 2) is None


def test_what_a_check_has_found_counts_if_it_was_taken_for_dead_before() -> None:
    store = InMemoryStore(unused_url())
    long = ended(store, 1, point("daily", 1, "conflicts"))
    ended(store, 1)
    assert document_names(store)[long] == {"conflicts.json", "outcome.json"}
    assert read(store).standing_conflicts("daily", 2) is not None
