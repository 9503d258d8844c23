"""Every kind of JSON document in a store: its writer, its key, its reader, and the fields that it may lack."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from cutline.fleet.config import Fleet, GroupRules, Node
from cutline.fleet.record import Time
from cutline.nodes.left_out import LeftOut, LeftOutKind
from cutline.snapshots.operations.activity import Command, Ending, record_without_intent
from cutline.snapshots.operations.committing import decide, put_commit, put_repair
from cutline.snapshots.operations.leases import open_leases
from cutline.snapshots.operations.majority import claim_majority, read_recorded_primaries
from cutline.snapshots.operations.open_operations import read_recorded_commits
from cutline.snapshots.operations.operation import Operation, begin, record_operation
from cutline.snapshots.operations.signs import store_request, store_sign
from cutline.snapshots.records.commit import Previous, Sequence
from cutline.snapshots.records.end_marks import EndMark, end_key, mark_end, read_end
from cutline.snapshots.records.operation_records import (
    PLACES,
    CancelRequest,
    CheckedPoint,
    CheckFigures,
    Failure,
    Intent,
    LeaseRenewal,
    NodeSign,
    ReadIncrement,
    ReadPart,
    ReadTimes,
    SignOfLife,
    SkippedPart,
    operation_key,
    read_cancel_request,
    read_failure,
    read_intent,
    read_outcome,
    read_sign,
    write_operation_record,
)
from cutline.snapshots.records.pins import (
    Pin,
    PinRelease,
    pin_key,
    put_pin,
    put_release,
    read_pin,
    read_release,
    release_key,
)
from cutline.snapshots.records.proven_chains import commit_key, find_place, read_chain, read_commit
from cutline.snapshots.records.repair_records import (
    Repair,
    ReplacedObject,
    Replacement,
    read_repair,
    read_repairs,
    repair_key,
)
from cutline.snapshots.records.store_identity import FLEET_KEY, ensure_identity, read_identity
from cutline.snapshots.records.tombstones import (
    only_full_key,
    put_mark,
    read_mark,
    tombstone_key,
)
from cutline.storage.location import StoreLocation
from cutline.storage.store import ObjectStore
from tests.unit.made_commits import commit, full_commit, identity, mark, memory

NODES = (Node("a", "postgresql:///shop"),)
FLEET = Fleet(Path("fleet.toml"), "shop", StoreLocation("memory://x"), NODES, "exact", GroupRules(), "local[1]", {})
OPERATION = Intent(
    operation="20261120T000000Z-0000000001", kind="create", snapshot="weekly", increment=0,
    began_at="2026-11-20T00:00:00Z", nodes=("a",), slot="slot",
)  # fmt: skip
INTENT, OUTCOME = (f"operations/{OPERATION.id}/{name}.json" for name in ("intent", "outcome"))
FULL = replace(
    full_commit(), comment="ärger",
    sequences={"a": (Sequence("s", "n", 1, is_called=True, increment=1, cycles=False, smallest=1, largest=9),)},
    left_out=(LeftOut("a", LeftOutKind.UNLOGGED_TABLE, "s.t", "why"),),
)  # fmt: skip
RESTORE = replace(OPERATION, operation="20261120T000000Z-0000000009", kind="restore")
LEASE = f"operations/{RESTORE.id}/lease-1.json"
OLD = FULL.segments["a"][0]
REPAIR = Repair(
    snapshot="daily", number=1, operation=OPERATION.id, chain="op-0", made_at="2026-11-20T00:00:00Z",
    by="cutline repair daily ops@db7:1", previous="",
    replacements=(
        Replacement(
            increment=0, commit="d", node="a", copy="b", replaced=(ReplacedObject(OLD.key, "d", "missing"),),
            segments=(replace(OLD, key=f"snapshots/daily/wal/a/{OPERATION.id}/{OLD.number:020d}.parquet"),),
        ),
    ),
)  # fmt: skip
PIN = Pin(
    snapshot="daily", increment=1, pin=OPERATION.id, at="2026-11-20T00:00:00Z", by="cutline keep daily ops@db7:1",
    until="2027-01-01T00:00:00Z", reason="audit",
)  # fmt: skip
RELEASE = PinRelease(snapshot="daily", pin=OPERATION.id, at="2026-11-21T00:00:00Z", by="cutline keep daily ops@db7:2")
END = EndMark("daily", "op-0", 0, "a", "2026-11-20T00:00:00Z")


def write_increment(store: ObjectStore) -> None:
    put_commit(store, FULL)
    put_commit(store, replace(commit(1), previous=Previous("op-0", read_commit(store, "daily", 0).digest)))


def write_outcome(store: ObjectStore) -> None:
    with record_operation(store, Operation(OPERATION)):
        pass


READ = ReadTimes(
    commits="0" * 64, last_operation="op-1", store="1" * 64, version="0.1.0", rules=1, compared_by="op-0",
    compared_at=Time("2026-11-20T00:00:00Z"), oldest_at=Time("2026-11-20T00:00:00Z"),
    parts=(ReadPart(PLACES, Time("2026-11-20T00:00:00Z")),),
    increments=(ReadIncrement(1, Time("2026-11-20T00:00:00Z")),),
)  # fmt: skip


def write_check(store: ObjectStore) -> None:
    figures = CheckFigures({"rows": 3}, 0, 1, (SkippedPart("contents", "--metadata-only"),))
    checked = CheckedPoint(
        "daily",
        1,
        "inconclusive",
        full=False,
        figures=figures,
        rests_on="op-1",
        read=READ,
        uncompared=((0, 0),),
        restorable=True,
    )
    ending = Ending("done", "inconclusive", 4, {"rows": 3}, (checked,), {"check daily": 1.5})
    command = Command("check", "daily", OPERATION.id)
    record_without_intent(store, command, OPERATION.began_at, "cutline check daily ops@db7:1", ending)


def write_lease(store: ObjectStore) -> None:
    begin(store, RESTORE)
    write_operation_record(store, "lease-1", LeaseRenewal(RESTORE.id, "2026-11-20T01:00:00Z"))


SIGN = SignOfLife(
    operation=OPERATION.id, kind="create", snapshot="weekly", increment=0, by="cutline create weekly ops@db7:1",
    began_at="2026-11-20T00:00:00Z", seen_at="2026-11-20T00:01:00Z", next_seconds=12.0,
    phase="copy", done=1, total=3, unit="tasks",
    rate=0.5, nodes=(NodeSign(node="a", done=1, total=3, unit="tasks", rate=0.5, seconds_left=4.0),), seconds_left=4.0,
    is_rough=False,
)  # fmt: skip
FAILURE = Failure(OPERATION.id, "node-unreachable", 6, "2026-11-20T00:01:00Z")
CANCEL = CancelRequest(OPERATION.id, "cutline cancel weekly ops@db7:2", "2026-11-20T00:01:00Z")


# The writer, the key and the reader of a document of each kind.
Kind = tuple[Callable[[ObjectStore], object], str, Callable[[ObjectStore], object]]
KINDS: dict[str, Kind] = {
    "full": (lambda store: put_commit(store, FULL), commit_key("daily", 0), lambda store: read_chain(store, "daily")),
    "increment": (write_increment, commit_key("daily", 1), lambda store: read_chain(store, "daily")),
    "void": (
        lambda store: decide(store, replace(OPERATION, snapshot="daily")),
        commit_key("daily", 0),
        lambda store: find_place(store, "daily", 0),
    ),
    "repair": (
        lambda store: put_repair(store, REPAIR),
        repair_key("daily", 1),
        lambda store: read_repairs(store, "daily"),
    ),
    "repair-void": (
        lambda store: decide(store, replace(OPERATION, kind="repair", snapshot="daily", repair=1)),
        repair_key("daily", 1),
        lambda store: read_repair(store, "daily", 1),
    ),
    "ended": (
        lambda store: mark_end(store, END),
        end_key("daily", "op-0"),
        lambda store: read_end(store, "daily", "op-0"),
    ),
    "pin": (
        lambda store: put_pin(store, PIN),
        pin_key("daily", PIN.pin),
        lambda store: read_pin(store, "daily", PIN.pin),
    ),
    "pin-release": (
        lambda store: put_release(store, RELEASE),
        release_key("daily", PIN.pin),
        lambda store: read_release(store, "daily", PIN.pin),
    ),
    "tombstone": (
        lambda store: put_mark(store, mark()),
        tombstone_key("daily"),
        lambda store: read_mark(store, tombstone_key("daily")),
    ),
    "only-full": (
        lambda store: put_mark(store, mark(only_full=True)),
        only_full_key("daily"),
        lambda store: read_mark(store, only_full_key("daily")),
    ),
    "fleet": (lambda store: ensure_identity(store, FLEET), FLEET_KEY, lambda store: read_identity(store, FLEET)),
    "baseline": (
        lambda store: claim_majority(store, {"a": identity("a")}),
        "baselines/0000000000000001.json",
        read_recorded_primaries,
    ),
    "intent": (write_outcome, INTENT, lambda store: read_intent(store, OPERATION.id)),
    "lease": (write_lease, LEASE, lambda store: open_leases(store)),
    "outcome": (write_outcome, OUTCOME, read_recorded_commits),
    "check": (write_check, OUTCOME, lambda store: read_outcome(store, OPERATION.id)),
    "failure": (
        lambda store: write_operation_record(store, "failure", FAILURE),
        operation_key(OPERATION.id, "failure"),
        lambda store: read_failure(store, OPERATION.id),
    ),
    "sign": (
        lambda store: store_sign(store, SIGN, 1),
        operation_key(OPERATION.id, "sign-1"),
        lambda store: read_sign(store, OPERATION.id, 1),
    ),
    "cancel": (
        lambda store: store_request(store, CANCEL),
        operation_key(OPERATION.id, "cancel-1"),
        lambda store: read_cancel_request(store, OPERATION.id, 1),
    ),
}
# Fields that may be absent.
OPTIONAL = {
    "repair": {"copy", "archived", "list", "objects", "lists", "events_at", "events_digest"},
    "full": {"left_out", "causes", "events_at", "events_digest", "locale_provider", "locale", "icu_rules"},
    "increment": {"previous", "causes"},
    "fleet": {"format"},
    "intent": {"turn"},
    "tombstone": {"servers", "a"},
    "only-full": {"servers", "a"},
    "pin": {"until", "reason"},
    "ended": {"restore", "successor", "slot_problem", "nodes", "ended_by"},
    "outcome": {"increment", "code", "began_at"},
    "check": {
        "code",
        "by",
        "began_at",
        "volumes",
        "phases",
        "checked",
        "figures",
        "examples",
        "rows",
        "check daily",
        "rests_on",
        "read",
        "uncompared",
        "restorable",
    },
    "baseline": {"timeline"},
}
# Objects that are maps: their keys are nodes, shards or names, not fields.
MAPS = {
    "counts",
    "sequences",
    "segments",
    "groups",
    "base",
    "slots_complete_at",
    "roles",
    "tables",
    "fingerprints",
    "volumes",
    "phases",
    "compared",
    "servers",
}
DEFAULTED = {"count", "include", "exclude", "append_only"}
# Values that are wrong for most fields, but valid for these: seconds may be any number.
VALID_VALUES = (
    ("seconds", 1.5),
    ("skew_seconds", 1.5),
    ("seconds", 10**30),
    ("in_recovery", True),
    ("rate", 1.5),
    ("check daily", 1.5),
    ("seconds_left", 1.5),
    ("next_seconds", 1.5),
    ("is_rough", True),
    ("is_called", True),
    ("full", True),
    ("cycles", True),
    ("restorable", True),
)


def seal_by_hand(content: Mapping[str, Any]) -> bytes:
    """Seal a document like `seal`, but accept what no document can hold, such as NaN."""
    content = {name: value for name, value in content.items() if name != "digest"}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode(errors="backslashreplace")
    return text[:-1] + f',"digest":"{hashlib.sha256(text).hexdigest()}"}}'.encode()


def write_document(kind: str) -> tuple[bytes, str]:
    """Write a document of that kind; return its bytes and its key."""
    write, key, _ = KINDS[kind]
    store = memory()
    write(store)
    return store.read(key), key
