"""The documents of operations, compared with the commits that they made."""

from __future__ import annotations

import tracemalloc
from datetime import timedelta
from typing import Any

import pytest
from msgspec import UNSET, UnsetType, structs

from cutline.check.operation_documents import RecordedPoints, check_intent, check_leases, check_outcomes, check_seen
from cutline.check.primaries import LockedPrimaries, check_primaries
from cutline.check.report import Findings, SnapshotReport
from cutline.fleet.record import Time, from_json, to_json
from cutline.snapshots.operations.open_operations import OpenOperation
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.documents import seal
from cutline.snapshots.records.operation_records import (
    CheckedPoint,
    CheckResult,
    Intent,
    LeaseRenewal,
    Outcome,
    operation_key,
)
from cutline.snapshots.records.store_identity import BaselineRecord, RecordedPrimary, baseline_key
from cutline.storage.clock import utc_now
from cutline.storage.memory import InMemoryStore
from cutline.wal.drain.slots import slot_name
from tests.unit.made_checks import read_times
from tests.unit.made_commits import full_commit, identity, increment_commit, memory

# As operation ids of that day; the chain is that of its full snapshot.
FULL, FIRST = "20261120T000000Z-000000000a", "20261120T010000Z-000000000b"
CHAIN = Chain(
    structs.replace(full_commit(FULL), operation=FULL),
    (structs.replace(increment_commit(1, FULL), operation=FIRST, created_at="2026-11-20T01:00:00Z"),),
)
OUTCOME = Outcome(
    operation=FIRST, kind="create", snapshot="daily", increment=1, state="done", reason="",
    ended_at=Time("2026-11-20T01:00:02Z"), began_at=Time("2026-11-20T01:00:00Z"), volumes=dict(CHAIN.last.counts),
)  # fmt: skip
INTENT = Intent(
    operation=FULL, kind="create", snapshot="daily", increment=0, began_at=Time("2026-11-20T00:00:00Z"),
    nodes=("a", "b"), slot=slot_name(FULL), fleet_id="fleet",
)  # fmt: skip


def new_findings() -> Findings:
    return Findings(SnapshotReport("daily", 1))


def of_outcomes(*outcomes: Outcome) -> list[str]:
    findings = new_findings()
    check_outcomes(CHAIN, {one.operation: one for one in outcomes}, findings)
    return [one.detail for one in (*findings.report.conflicts, *findings.report.doubts)]


CHECK = "20261120T020000Z-00000000000d"
OUTCOMES, OUTCOME_BYTES_MAX = 1000, 1400


def seen_by(operation: str, increment: int, result: CheckResult = "valid", last: str = "") -> tuple[str, Outcome]:
    """The outcome of a check; `last` is the operation of the last commit that it read."""
    read = structs.replace(read_times("2026-11-20T02:00:00Z"), last_operation=last) if last else UNSET
    point = CheckedPoint("daily", increment, result, full=True, read=read)
    return operation, Outcome(
        operation=operation, kind="check", snapshot="daily", state="done", reason="",
        ended_at=Time("2026-11-20T02:00:01Z"), checked=(point,),
    )  # fmt: skip


def test_an_increment_that_a_check_has_read_was_committed() -> None:
    """Even if its commit and the documents of the create are gone. A check with conflicts may not have read it."""
    points = RecordedPoints.of([(FIRST, OUTCOME), seen_by(CHECK, 2), seen_by("20261120T030000Z-0", 7, "conflicts")])
    assert points.commits == {"daily": {FIRST: 1, CHECK: 2}}
    assert list(points.creates) == [FIRST]


def test_of_the_outcome_of_a_create_only_what_is_compared_stays_in_memory() -> None:
    """A store may have a hundred thousand of them: about 200 MB, if all of each stayed."""
    names = ("rows", "changes", "transactions", "objects", "bytes", "groups", "continued", "wal_bytes", "ignored")
    stored = to_json(
        structs.replace(
            OUTCOME, by="cutline create daily --incremental root@db7:4711", code=0,
            volumes={name: 12345678 for name in names}, phases={f"step {number}": 1.234 for number in range(14)},
        )
    )  # fmt: skip
    tracemalloc.start()
    try:
        points = RecordedPoints.of((f"{FIRST}{number}", from_json(stored, Outcome)) for number in range(OUTCOMES))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(points.creates) == OUTCOMES
    assert held / OUTCOMES < OUTCOME_BYTES_MAX


def test_a_commit_that_a_check_has_read_is_the_one_that_is_there() -> None:
    def of(operation: str, increment: int, last: str) -> list[str]:
        findings = new_findings()
        points = RecordedPoints.of([seen_by(operation, increment, last=last)])
        check_seen(CHAIN, points.seen["daily"], findings)
        return [one.detail for one in findings.report.conflicts]

    assert of(CHECK, 1, FIRST) == []
    assert of(CHECK, 1, "") == []
    (conflict,) = of(CHECK, 1, "20261120T013000Z-00000000000c")
    assert f"read increment 1 of operation 20261120T013000Z-00000000000c, but operation {FIRST} made that" in conflict
    # A check of an earlier chain of that name, and an increment that is missing.
    assert of("20261119T020000Z-00000000000d", 1, "20261119T013000Z-00000000000c") == []
    assert of(CHECK, 2, "20261120T013000Z-00000000000c") == []


def test_an_outcome_that_a_create_or_its_successor_recorded_is_right() -> None:
    assert of_outcomes() == []
    assert of_outcomes(OUTCOME) == []
    # Another command settled it.
    assert of_outcomes(structs.replace(OUTCOME, volumes=UNSET, causes=UNSET)) == []
    # Attempts that failed, and one of an earlier chain of that name.
    failed = structs.replace(OUTCOME, operation="20261120T005000Z-000000000c", state="failed")
    earlier = structs.replace(OUTCOME, operation="20261119T005000Z-000000000c")
    assert of_outcomes(OUTCOME, failed, earlier) == []


@pytest.mark.parametrize(
    ("values", "detail"),
    [
        (
            {"state": "failed", "reason": "why"},
            "it failed according to its outcome (why), but its commit is in the store",
        ),
        (
            {"increment": 3},
            "it created increment 3 of daily according to its outcome, but increment 1 of daily according to its"
            " commit",
        ),
        (
            {"snapshot": "weekly"},
            "it created increment 1 of weekly according to its outcome, but increment 1 of daily according to its"
            " commit",
        ),
        ({"volumes": {"bytes": 1}}, "its outcome has other counts of bytes, changes, transactions than its commit"),
        (
            {"began_at": Time("2026-11-20T01:00:00.001Z")},
            "it began at 2026-11-20T01:00:00.001Z according to its outcome, but at 2026-11-20T01:00:00Z"
            " according to the commit of increment 1",
        ),
        ({"causes": ("why",)}, "its outcome has other attempts at its cut than its commit"),
    ],
)
def test_an_outcome_that_contradicts_its_commit_is_found(values: dict[str, Any], detail: str) -> None:
    assert of_outcomes(structs.replace(OUTCOME, **values)) == [f"operation {FIRST}: {detail}"]


def test_the_outcome_of_a_full_snapshot_names_its_commit() -> None:
    """The first increment trusts a commit with this digest. If another command stored the outcome, it has none."""
    digest = "a" * 64
    chain = Chain(structs.replace(CHAIN.full, digest=digest), CHAIN.increments)

    def of(commit_digest: str | UnsetType) -> list[str]:
        findings = new_findings()
        outcome = structs.replace(
            OUTCOME, operation=FULL, increment=0, began_at=UNSET, volumes=UNSET, commit_digest=commit_digest,
        )  # fmt: skip
        check_outcomes(chain, {FULL: outcome}, findings)
        return [one.detail for one in findings.report.conflicts]

    assert of(digest) == of(UNSET) == []
    assert of("b" * 64) == [
        f"operation {FULL}: its outcome names a commit with the digest {'b' * 64}, but its commit has {digest}"
    ]


def test_an_outcome_of_another_kind_of_operation_is_found() -> None:
    findings = new_findings()
    check_outcomes(CHAIN, {}, findings, {FIRST: "check", "20261120T020000Z-000000000c": "restore"})
    assert [one.detail for one in findings.report.conflicts] == [
        f"operation {FIRST}: it was a check according to its outcome, but its commit is in the store"
    ]


def test_an_outcome_of_a_commit_that_another_operation_made_is_found() -> None:
    other = structs.replace(OUTCOME, operation="20261120T020000Z-000000000c")
    assert of_outcomes(other) == [
        f"operation {other.operation}: it committed increment 1 according to its outcome, but operation {FIRST} made"
        " that commit"
    ]


def test_an_outcome_before_the_cut_is_a_doubt() -> None:
    (doubt,) = of_outcomes(structs.replace(OUTCOME, ended_at=Time("2026-11-19T00:00:00Z")))
    assert doubt.startswith("it ended at 2026-11-19T00:00:00Z, before its cut was made at")


def of_intent(*intents: Intent) -> Findings:
    store, findings = memory(), new_findings()
    for intent in intents:
        store.create(operation_key(intent.operation, "intent"), seal(intent))
    check_intent(store, CHAIN, findings)
    return findings


def test_the_intent_of_the_full_snapshot_is_that_of_its_commit() -> None:
    right = of_intent(INTENT).report
    assert (right.conflicts, right.doubts) == ([], [])
    assert [doubt.detail for doubt in of_intent().report.doubts] == ["its intent is missing"]
    for values, detail in (
        ({"nodes": ("a",)}, "nodes a, but its commit has a, b"),
        ({"slot": "cutline_other"}, f"slot cutline_other, but its commit has {slot_name(FULL)}"),
        ({"began_at": Time("2026-11-21T00:00:00Z")}, "time 2026-11-21T00:00:00Z, but its commit has"),
        ({"fleet_id": "another"}, "fleet another, but its commit has fleet"),
    ):
        (conflict,) = of_intent(structs.replace(INTENT, **values)).report.conflicts
        assert f"operation {FULL}: its intent has {detail}" in conflict.detail
    store, findings = memory(), new_findings()
    store.create(operation_key(FULL, "intent"), seal(INTENT).replace(b'"daily"', b'"weekly"'))
    check_intent(store, CHAIN, findings)
    assert [one.object for one in findings.report.conflicts] == [operation_key(FULL, "intent")]


def of_lease(store: InMemoryStore, minutes: int, kind: str = "restore") -> Findings:
    """The findings of an operation whose lease runs for so long."""
    now = utc_now()
    intent = Intent(
        operation="20261120T020000Z-000000000c", kind=kind, snapshot="daily", increment=1,
        began_at=Time.of(now), nodes=("a",), slot=None, expires_at=Time.of(now + timedelta(minutes=minutes)),
    )  # fmt: skip
    findings = new_findings()
    check_leases(store, [OpenOperation(intent.operation, intent)], "daily", findings)
    check_leases(store, [OpenOperation(intent.operation, intent)], "weekly", findings)
    return findings


def test_a_lease_that_runs_longer_than_any_is_a_doubt() -> None:
    assert of_lease(memory(), 15).report.doubts == []
    for kind in ("restore", "repair"):
        (doubt,) = of_lease(memory(), 60, kind).report.doubts
        assert doubt.kind == "lease"
    store = memory()
    key = operation_key("20261120T020000Z-000000000c", "lease-1")
    store.create(key, seal(LeaseRenewal("20261120T020000Z-000000000c", Time.of(utc_now())))[:-1])
    assert [one.object for one in of_lease(store, 15).report.conflicts] == [key]


SERVERS = {"a": "7", "b": "8", "c": "9"}


def record(primaries: dict[str, str], forgotten: tuple[str, ...] = (), at: str = "20261101T000000Z") -> BaselineRecord:
    entries = tuple(RecordedPrimary(node, identifier) for node, identifier in primaries.items())
    return BaselineRecord(f"{at}-000000000a", entries, forgotten)


def of_records(*records: BaselineRecord | None, nodes: dict[str, str] | None = None) -> list[str]:
    """The conflicts of these records, numbered from 1, with a snapshot of these primaries."""
    store = memory()
    for number, one in enumerate(records, 1):
        if one is not None:
            store.create(baseline_key(number), seal(one))
    baseline = tuple(
        structs.replace(identity(node), system_identifier=identifier) for node, identifier in (nodes or SERVERS).items()
    )
    full = structs.replace(CHAIN.full, baseline=baseline)
    return [conflict.detail for conflict in check_primaries(store, [LockedPrimaries.of(full)])]


def test_records_of_a_fleet_that_grows_and_is_made_smaller_are_right() -> None:
    assert check_primaries(memory(), []) == []
    assert of_records(record({"a": "7"}), record(SERVERS)) == []
    two = {"a": "7", "b": "8"}
    assert of_records(record(SERVERS), record(two, ("c",)), nodes=two) == []
    # A replaced server, and a snapshot of most of the primaries.
    assert of_records(record(SERVERS | {"c": "1"}), record(SERVERS)) == []
    assert of_records(record(SERVERS), nodes=two) == []
    # The record of a fleet file that came after the snapshot tells nothing of it.
    assert of_records(record(SERVERS), record({"d": "1"}, ("a", "b", "c"), at="20261120T000001Z")) == []


@pytest.mark.parametrize(
    ("records", "detail"),
    [
        ([record(SERVERS), record({"a": "7"})], "record 2 has 1 primaries, fewer than the 3 before, and forgets none"),
        ([record(SERVERS), record(SERVERS)], "record 2 has the same primaries as record 1"),
        ([], f"there is no record of the primaries, which {baseline_key(1)} should contain"),
        # Every snapshot is later than the first record, whatever their ids say.
        (
            [record({"a": "7"}, at="20261120T000001Z")],
            "the newest record has 1 primaries, but the later snapshot daily has 3",
        ),
        ([None, record(SERVERS)], "record 2 of the primaries exists, but record 1 is missing"),
        ([record({"a": "7"})], "the newest record has 1 primaries, but the later snapshot daily has 3"),
        (
            [record({"a": "7", "d": "1", "e": "2", "f": "3"})],
            "the later snapshot daily has at most half of the recorded primaries",
        ),
        (
            [record(SERVERS | {"b": "1"})],
            "node b is recorded with system identifier 1, but the later snapshot daily was taken from 8",
        ),
    ],
)
def test_records_that_no_create_leaves_are_found(records: list[BaselineRecord | None], detail: str) -> None:
    assert detail in of_records(*records)


def test_a_damaged_record_is_found() -> None:
    store = memory()
    store.create(baseline_key(1), seal(record(SERVERS))[:-1])
    conflicts = check_primaries(store, [LockedPrimaries.of(CHAIN.full)])
    assert [conflict.object for conflict in conflicts] == [baseline_key(1)]
