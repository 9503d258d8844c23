"""Check the documents of operations against the commits that they made, and the leases on snapshots.

Outcomes and intents decide about removals: slots of operations that have failed, objects of those that have ended. A
create stores an outcome that is `failed` only when its commit can never be there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping

from msgspec import UNSET, Struct, UnsetType, field, structs

from cutline.check.report import Conflict, Doubt, Findings
from cutline.check.times import SLACK_SECONDS, seconds_of
from cutline.nodes.left_out import LeftOutKind
from cutline.snapshots.operations.leases import LEASE_SECONDS, LEASED, read_lease
from cutline.snapshots.operations.open_operations import OpenOperation, recorded_commits
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.operation_records import (
    CONFLICTS,
    CREATE,
    FAILED,
    CheckedPoint,
    Intent,
    Outcome,
    operation_key,
    read_intent,
)
from cutline.storage.clock import utc_now
from cutline.storage.store import ObjectMissingError, ObjectStore
from cutline.wal.drain.slots import slot_name

OPERATION = "operation"


class RecordedPoints(Struct, frozen=True):
    """Facts about restore points from outcomes.

    `creates` are the outcomes of creates, keyed by operation. They keep only the fields that are compared: there may be
    a hundred thousand. `seen` are the points that checks have read without conflicts, by snapshot and by the operation
    of the check: they were there, even if no outcome of a create is left. `others` are the kinds of the operations that
    are not creates.
    """

    creates: dict[str, Outcome] = field(default_factory=dict)
    seen: dict[str, dict[str, CheckedPoint]] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, outcomes: Iterable[tuple[str, Outcome]]) -> RecordedPoints:
        """Return the facts from the outcomes, each with its operation."""
        recorded = cls()
        for operation, outcome in outcomes:
            if outcome.kind == CREATE:
                recorded.creates[operation] = _compared(outcome)
            else:
                recorded.others[operation] = outcome.kind
            for point in () if isinstance(outcome.checked, UnsetType) else outcome.checked:
                # A check that could not read a commit reports a conflict at the increment before it, or at the one that
                # it was asked for.
                if point.result != CONFLICTS:
                    recorded.seen.setdefault(point.snapshot, {})[operation] = point
        return recorded

    @property
    def commits(self) -> dict[str, dict[str, int]]:
        """The increments that were committed, keyed by snapshot and by the operation that says so."""
        commits = recorded_commits(self.creates)
        for snapshot, points in self.seen.items():
            commits.setdefault(snapshot, {}).update({operation: point.increment for operation, point in points.items()})
        return commits


def _compared(outcome: Outcome) -> Outcome:
    """Return what a check compares of the outcome of a create: less than half of it."""
    volumes = outcome.volumes
    if not isinstance(volumes, UnsetType):
        # Thousands of outcomes have the same few names.
        volumes = {sys.intern(name): count for name, count in volumes.items()}
    return structs.replace(
        outcome, volumes=volumes, snapshot=sys.intern(outcome.snapshot), by=UNSET, phases=UNSET, figures=UNSET
    )


def check_seen(chain: Chain, points: Mapping[str, CheckedPoint], findings: Findings) -> None:
    """Compare the points of the chain that checks have read, keyed by the operation of the check, with its commits."""
    second = chain.stored_full.operation.rpartition("-")[0]
    for operation, point in points.items():
        is_in_chain = chain.full.increment <= point.increment <= chain.last.increment
        if operation < second or isinstance(point.read, UnsetType) or not is_in_chain:
            continue
        maker, read = chain.commit_of(point.increment).operation, point.read.last_operation
        if read != maker:
            detail = f"it read increment {point.increment} of operation {read}, but operation {maker} made that commit"
            findings.conflict(_conflict(operation, detail))


def check_outcomes(
    chain: Chain, outcomes: Mapping[str, Outcome], findings: Findings, others: Mapping[str, str] | None = None
) -> None:
    """Compare the outcomes of creates, keyed by operation, with the commits of the chain.

    `others` are the kinds of the operations that have an outcome and are no creates.
    """
    commits = {commit.operation: commit for commit in chain.commits}
    kinds = others or {}
    for operation in commits.keys() & kinds.keys():
        detail = f"it was a {kinds[operation]} according to its outcome, but its commit is in the store"
        findings.conflict(_conflict(operation, detail))
    for operation, commit in commits.items():
        if (outcome := outcomes.get(operation)) is not None:
            for detail in _contradictions(commit, outcome):
                findings.conflict(_conflict(operation, detail))
            if seconds_of(outcome.ended_at) < seconds_of(commit.cut.made_at) - SLACK_SECONDS:
                detail = f"it ended at {outcome.ended_at}, before its cut was made at {commit.cut.made_at}"
                findings.doubt(Doubt(OPERATION, detail, object=operation_key(operation, "outcome")))
    # The first increment trusts the full snapshot's commit if it has the digest that the outcome names.
    full = chain.stored_full
    outcome = outcomes.get(full.operation)
    if outcome is not None and isinstance(outcome.commit_digest, str) and outcome.commit_digest != full.digest:
        detail = f"its outcome names a commit with the digest {outcome.commit_digest}, but its commit has {full.digest}"
        findings.conflict(_conflict(full.operation, detail))
    # Ids from different seconds sort by time. Earlier operations may belong to an earlier chain.
    second = full.operation.rpartition("-")[0]
    for operation, outcome in outcomes.items():
        number = outcome.increment
        if operation < second or operation in commits or outcome.snapshot != chain.name or outcome.state == FAILED:
            continue
        if isinstance(number, int) and chain.full.increment <= number <= chain.last.increment:
            maker = chain.commit_of(number).operation
            detail = f"it committed increment {number} according to its outcome, but operation {maker} made that commit"
            findings.conflict(_conflict(operation, detail))


def _contradictions(commit: Commit, outcome: Outcome) -> Iterator[str]:
    if outcome.state == FAILED:
        yield f"it failed according to its outcome ({outcome.reason}), but its commit is in the store"
    if (outcome.snapshot, outcome.increment) != (commit.snapshot, commit.increment):
        yield (
            f"it created increment {outcome.increment} of {outcome.snapshot} according to its outcome, but"
            f" increment {commit.increment} of {commit.snapshot} according to its commit"
        )
    if not isinstance(outcome.began_at, UnsetType) and outcome.began_at != commit.created_at:
        yield (
            f"it began at {outcome.began_at} according to its outcome, but at {commit.created_at} according to the"
            f" commit of increment {commit.increment}"
        )
    if not isinstance(outcome.volumes, UnsetType) and outcome.volumes != commit.counts:
        names = sorted({name for name, _ in outcome.volumes.items() ^ commit.counts.items()})
        yield f"its outcome has other counts of {', '.join(names)} than its commit"
    if not isinstance(outcome.causes, UnsetType) and outcome.causes != commit.cut.causes:
        yield "its outcome has other attempts at its cut than its commit"


def check_intent(store: ObjectStore, chain: Chain, findings: Findings) -> None:
    """Compare the intent of the full snapshot's operation, which names its slots, with its commit."""
    operation = chain.stored_full.operation
    try:
        intent = read_intent(store, operation)
    except ObjectMissingError:
        # gc removes old intents, but not that of a snapshot that exists: then its slots can no longer be dropped.
        findings.doubt(Doubt(OPERATION, "its intent is missing", object=operation_key(operation, "intent")))
        return
    except ManifestError as error:
        findings.conflict(Conflict(OPERATION, error.message, object=operation_key(operation, "intent")))
        return
    given, expected = _of_intent(intent), _of_commit(chain)
    # A snapshot goes on without the standbys that are away, and if it was resumed, without those that have left
    # fleet.toml since then. All primaries are in the commit: its tables are those of their shards.
    full = chain.stored_full
    left_out = {out.name for out in full.left_out if out.kind == LeftOutKind.ABSENT_COPY}
    may_be_gone = set(intent.nodes) if full.ran_seconds is not None else left_out
    given["nodes"] = set(intent.nodes) - (may_be_gone - set(full.parts))
    for what, value in given.items():
        if not isinstance(value, UnsetType) and value != expected[what]:
            detail = f"its intent has {what} {_shown(value)}, but its commit has {_shown(expected[what])}"
            findings.conflict(_conflict(operation, detail, "intent"))


def _of_intent(intent: Intent) -> dict[str, object]:
    return {
        "kind": intent.kind,
        "snapshot": intent.snapshot,
        "increment": intent.increment,
        "time": intent.began_at,
        "nodes": set(intent.nodes),
        "fleet": intent.fleet_id,
        "slot": intent.slot,
    }


def _of_commit(chain: Chain) -> dict[str, object]:
    """Return the fields that the intent of a chain's full snapshot should have, according to its commit."""
    full = chain.stored_full
    return {
        "kind": CREATE,
        "snapshot": full.snapshot,
        "increment": 0,
        "time": full.created_at,
        "nodes": set(full.parts),
        "fleet": full.fleet_id,
        "slot": slot_name(full.operation),
    }


def _shown(value: object) -> str:
    return ", ".join(sorted(value)) if isinstance(value, set) else str(value)


def check_leases(store: ObjectStore, operations: Iterable[OpenOperation], name: str, findings: Findings) -> None:
    """Check the leases of open restores and repairs, which keep the snapshot `name` from being deleted."""
    latest = utc_now().timestamp() + LEASE_SECONDS + SLACK_SECONDS
    intents = [one.operation for one in operations if one.operation is not None]
    for intent in intents:
        if intent.kind not in LEASED or intent.snapshot != name:
            continue
        try:
            lease = read_lease(store, intent)
        except ManifestError as error:
            findings.conflict(Conflict("lease", error.message, object=str(error.details["object"])))
            continue
        if lease.until.timestamp() > latest:
            detail = f"its lease on the snapshot runs until {lease.until:%Y-%m-%dT%H:%M:%SZ}, longer than any lease"
            findings.doubt(Doubt("lease", detail, object=operation_key(intent.operation, "intent")))


def _conflict(operation: str, detail: str, document: str = "outcome") -> Conflict:
    return Conflict(OPERATION, f"operation {operation}: {detail}", object=operation_key(operation, document))
