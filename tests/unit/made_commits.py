"""Commits of a small chain, and stores to put them into."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import count

from msgspec import structs

from cutline.fleet.config import GroupRules
from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.fleet.record import Time
from cutline.nodes.baseline import NodeIdentity
from cutline.snapshots.records.commit import Commit, CutRecord, FullSnapshot, Increment
from cutline.snapshots.records.commit_rules import count_listed
from cutline.snapshots.records.documents import seal, unseal
from cutline.snapshots.records.tombstones import DELETED, ONLY_FULL, Mark, RestorePoint
from cutline.storage.memory import InMemoryStore
from cutline.wal.cut.cut_values import NodeCut, Undecided
from cutline.wal.segments.archive import Segment

STORES = count()
MARKED_AT = Time("2026-11-20T00:00:00.500Z")


def identity(node: str, backup_of: str | None = None) -> NodeIdentity:
    return NodeIdentity(node, backup_of, "7", 1, 5, "shop", 180006, "UTF8", "C", "C", backup_of is not None)


def segment(node: str, number: int, after: int, through: int, chain: str = "op-0") -> Segment:
    return Segment(
        key=f"snapshots/daily/wal/{node}/{chain}/{number:020d}.parquet", number=number, size=10, digest="d", changes=1,
        events=1, partials=0, truncates=0, node=node, operation="op", after=Lsn(after), through=Lsn(through), open=None,
    )  # fmt: skip


def commit(number: int, chain: str = "op-0", position: int = 100) -> Commit:
    """Commit `number` of a chain of one primary and its standby; a segment covers 100 bytes of WAL."""
    return increment_commit(number, chain, position) if number else full_commit(chain, position)


def full_commit(chain: str = "op-0", position: int = 100) -> FullSnapshot:
    """The full snapshot of that chain."""
    return FullSnapshot(
        snapshot="daily", increment=0, operation="op-0", chain=chain, created_at="2026-11-20T00:00:00Z", seconds=1.0,
        comment="", counts={"bytes": 20, "changes": 1, "transactions": 0}, cut=_cut(0, position),
        sequences={"a": ()}, segments=_segments(0, chain), fleet_id="fleet", global_id_form="exact",
        baseline=(identity("a"), identity("b", "a")), groups={"a": ()}, base={"a": ORIGIN, "b": ORIGIN}, copied=(),
        roles={"a": ()}, rules=GroupRules(), tables={}, fingerprints={},
    )  # fmt: skip


def increment_commit(number: int, chain: str = "op-0", position: int = 100) -> Increment:
    """Increment `number` of that chain."""
    return Increment(
        snapshot="daily", increment=number, operation=f"op-{number}", chain=chain, created_at="2026-11-20T00:00:00Z",
        seconds=1.0, comment="", counts={"bytes": 20, "changes": 1, "transactions": 0}, cut=_cut(number, position),
        sequences={"a": ()}, segments=_segments(number, chain),
    )  # fmt: skip


def point(number: int, at: str) -> RestorePoint:
    """The restore point of a command that began at `at`, with its cut a second later."""
    return RestorePoint(number, Time(at), Time.of(datetime.fromisoformat(at) + timedelta(seconds=1)))


def begun_at(commit: Commit, at: str) -> Commit:
    """The commit of a command that began at `at`, with its cut a second later."""
    cut = structs.replace(commit.cut, made_at=point(commit.increment, at).cut_at)
    return structs.replace(commit, created_at=Time(at), cut=cut)


def named(commit: Commit, name: str) -> Commit:
    """The commit as one of the snapshot `name`."""
    segments = {
        node: tuple(structs.replace(one, key=one.key.replace("/daily/", f"/{name}/")) for one in listed)
        for node, listed in commit.segments.items()
    }
    return structs.replace(commit, snapshot=name, segments=segments)


def counted(commit: Commit) -> Commit:
    """The commit with the counts of what it lists."""
    primaries = (
        {identity.node for identity in commit.baseline if identity.backup_of is None}
        if commit.increment == 0
        else {"a"}
    )
    return structs.replace(commit, counts=count_listed(primaries, commit))


def _cut(number: int, position: int) -> CutRecord:
    undecided = (Undecided("left out", Lsn(10 + number), Lsn(11)),)
    node = NodeCut("a", Lsn(1), Lsn(2), Lsn(position), 0, undecided, (Lsn(20 + number),), (), MARKED_AT)
    return CutRecord(
        id=f"op-{number}.1", attempts=1, seconds=0.001, nodes=(node,), global_transactions=0, included_early=0,
        in_flight=0, made_at=Time("2026-11-20T00:00:01.000Z"), safe_at=MARKED_AT, skew_seconds=0.0,
    )  # fmt: skip


def _segments(number: int, chain: str) -> dict[str, tuple[Segment, ...]]:
    return {node: (segment(node, number + 1, number * 100, number * 100 + 100, chain),) for node in ("a", "b")}


def as_read(commit: Commit) -> Commit:
    """The commit as it is read back: with the digest of its file."""
    return structs.replace(commit, digest=unseal("", seal(commit))[1])


def mark(name: str = "daily", *, only_full: bool = False) -> Mark:
    """The mark of a snapshot deleted at 11:00, or of one whose increments were pruned then."""
    return Mark(
        format=ONLY_FULL if only_full else DELETED, snapshot=name, operation="op-9", at="2026-11-20T11:00:00Z", by="",
        chain="op-0", slots=("slot",), nodes=("a",), points=(point(0, "2026-11-20T00:00:00Z"),), objects=1,
        bytes=2, servers={"a": "7"},
    )  # fmt: skip


def unused_url() -> str:
    """The URL of a store that no test has used yet."""
    return f"memory://made-commits-{next(STORES)}"


def memory() -> InMemoryStore:
    return InMemoryStore(unused_url())
