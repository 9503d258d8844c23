"""What a check can't compare because no second copy reaches the cut, according to the commits alone.

The verdict of a check is about the state at its increment, so only what that state lacks is skipped. Restore points
before it that lacked more are named, and don't change the result: a shard that has left the chain since, or a standby
that was away for some increments, would otherwise make the check of each later increment inconclusive.

A check that rests on a record derives the same from the same commits, so its verdict is never better than the verdict
of a check of everything.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping

from msgspec import Struct

from cutline.check.copies import Copies
from cutline.check.report import Findings, Skipped, UncomparedPoints
from cutline.fleet.messages import list_some
from cutline.nodes.left_out import LeftOutKind
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import UNLISTED, Commit, Increment
from cutline.snapshots.records.proven_chains import point_label

TABLES_NAMED_MAX = 20
SHARD, BASE_ROWS, TABLES, COPY = "shard", "base rows", "tables", "copy"


class _Uncompared(Struct, frozen=True):
    """A part of the state at a cut that has no second copy. `kind` and `node` identify it from cut to cut.

    `reason` is why it was not compared, in words that also fit later increments.
    """

    kind: str
    node: str
    skipped: Skipped
    reason: str

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.node


def note_uncompared(chain: Chain, findings: Findings) -> None:
    """Add what can't be compared at the chain's last cut to the skipped parts, and name the earlier restore points."""
    skip_uncompared(Copies.of(chain), findings)
    findings.report.uncompared_points = uncompared_points(chain)


def skip_uncompared(copies: Copies, findings: Findings) -> None:
    """Add what can't be compared at the last cut of the copies to the skipped parts of the report."""
    for part in _uncompared(copies):
        findings.skip(part.skipped)


def ends_of_passes(chain: Chain) -> list[int]:
    """Return the increments up to which a check of everything compares the copies, one after the other.

    They are the last before each increment with which a primary's copy begins again or a shard leaves, because what
    these had is needed to restore the increments before; and the chain's last.
    """
    ends = [
        one.increment - 1
        for one in chain.increments
        if one.retired or any(renewal.identity.backup_of is None for renewal in one.renewed.values())
    ]
    return [*ends, chain.last.increment]


class PassedCopies(Struct, frozen=True):
    """The copies of nodes that the passes of a check read, and up to which increment.

    A node's copies are counted from 0: each renewal begins another one. A copy that is absent where every pass over it
    ends is read by none, such as that of a standby that was away until it was copied again.
    """

    begins: Mapping[str, list[int]]
    reached: Mapping[str, Mapping[int, int]]

    @classmethod
    def of(cls, chain: Chain) -> PassedCopies:
        """Return the copies that `ends_of_passes` reach."""
        begins: dict[str, list[int]] = {node: [] for node in chain.all_nodes}
        for one in chain.increments:
            for node in one.renewed:
                begins.setdefault(node, []).append(one.increment)
        reached: dict[str, dict[int, int]] = {node: {} for node in begins}
        for last in ends_of_passes(chain):
            absent = chain.commit_of(last).absent
            for node in begins:
                if node not in absent:
                    reached[node][bisect_right(begins[node], last)] = last
        return cls(begins, reached)

    @property
    def are_all(self) -> bool:
        """Whether every copy is read to its end, because none began again and none is absent."""
        return not any(self.begins.values()) and all(self.reached.values())

    def is_read(self, node: str, increment: int) -> bool:
        """Whether a pass reads the objects of the node that the increment lists."""
        if node not in self.begins:
            return True
        return increment <= self.reached[node].get(bisect_right(self.begins[node], increment), -1)


def uncompared_points(chain: Chain) -> tuple[UncomparedPoints, ...]:
    """Return what is not compared at restore points before the last cut; without what lasts until there."""
    found = [*_without_second_copy(chain), *_without_pass(chain)]
    return tuple(sorted(found, key=lambda points: (points.first, points.last, points.what)))


def _without_pass(chain: Chain) -> Iterator[UncomparedPoints]:
    """Yield the restore points with a second copy that no pass compares: it began again, or is away where one ends."""
    passed, ends = PassedCopies.of(chain), ends_of_passes(chain)
    absent = {end: chain.commit_of(end).absent.keys() for end in ends[:-1]}
    for node, begins in passed.begins.items():
        away = {end for end, names in absent.items() if node in names}
        if not begins and not away:
            continue
        first = chain.commit_of(begins[0]) if begins else None
        joined = begins[0] if isinstance(first, Increment) and first.renewed[node].is_new else chain.full.increment
        points: dict[str, list[int]] = {}
        for number in (one.increment for one in chain.commits if node not in one.absent and one.increment >= joined):
            end, copy = ends[bisect_left(ends, number)], bisect_right(begins, number)
            if copy != bisect_right(begins, end):
                points.setdefault(f"it began again with {point_label(begins[copy])}", []).append(number)
            elif end in away:
                why = f"it was away at {point_label(end)}, after which its primary's copy began again or its shard left"
                points.setdefault(why, []).append(number)
        for why, some in points.items():
            text = f"{why}; a check up to {point_label(some[-1])} compares it"
            yield UncomparedPoints(some[0], some[-1], f"the copy of {node}", text)


def _without_second_copy(chain: Chain) -> Iterator[UncomparedPoints]:
    """Yield what had no second copy at restore points before the last cut.

    Only the commits at which this may change are looked at: a chain may have thousands of increments.
    """
    began: dict[tuple[str, str], tuple[int, _Uncompared]] = {}
    before: Commit | None = None
    for commit in chain.commits:
        if before is None or _may_differ(before, commit, is_read_once=any(kind == TABLES for kind, _ in began)):
            now = {part.key: part for part in _uncompared(Copies.of(chain.up_to(commit.increment)))}
            for key in began.keys() - now.keys():
                first, part = began.pop(key)
                yield UncomparedPoints(
                    first, commit.increment - 1, part.skipped.what, part.reason, part.skipped.is_one_copy
                )
            began |= {key: (commit.increment, part) for key, part in now.items() if key not in began}
        before = commit


def _may_differ(before: Commit, commit: Commit, *, is_read_once: bool) -> bool:
    """Whether other parts may lack a second copy at `commit` than at the commit before."""
    if isinstance(commit, Increment) and (commit.renewed or commit.retired):
        return True
    if commit.absent.keys() != before.absent.keys():
        return True
    changes = commit.definition_changes
    return changes is not None and (is_read_once or bool(changes.readers))


def _uncompared(copies: Copies) -> Iterator[_Uncompared]:
    chain, counts = copies.chain, copies.counts
    for shard in sorted(counts):
        if counts[shard] == 1:
            kinds = (LeftOutKind.STANDBY_COPY, LeftOutKind.ABSENT_COPY)
            out = [f"; {out.name}: {out.why}" for out in chain.left_out if out.node == shard and out.kind in kinds]
            what, why = f"rows of shard {shard}", "no backup copy to compare with"
            yield _Uncompared(SHARD, shard, Skipped(what, f"{why}{''.join(out)}", is_one_copy=True), why)
    for shard, shared in chain.bases_read_once.items():
        if set(copies.same_shard(shard)) - {shard} == {shared.standby}:
            why = f"they were read once, on {shared.standby}, for the copies of {shard} and {shared.standby}"
            yield _one_copy(BASE_ROWS, shard, f"base rows of shard {shard}", why)
    for shard in sorted(counts):
        for standby, tables in _tables_read_once(copies, shard).items():
            why = f"both copies were read on {standby} when the tables were copied"
            what = f"base rows of {list_some(tables, TABLES_NAMED_MAX)} in shard {shard}"
            yield _one_copy(TABLES, shard, what, why)
    for node, absent in chain.absent.items():
        if UNLISTED in absent.reason:
            # Nobody expects the standby to come back, and the other copies were compared.
            continue
        why = f"{point_label(absent.since)} and later leave it out: {absent.reason}"
        skipped = Skipped(f"the copy of {node}", why, is_absent=True)
        yield _Uncompared(COPY, node, skipped, f"it was left out: {absent.reason}")


def _one_copy(kind: str, shard: str, what: str, why: str) -> _Uncompared:
    return _Uncompared(kind, shard, Skipped(what, why, is_one_copy=True), why)


def _tables_read_once(copies: Copies, shard: str) -> dict[str, list[str]]:
    """Return the names of the tables whose copies come from one reading of the shard's only standby, by standby."""
    if not (read_once := copies.chain.tables_read_once(shard)):
        return {}
    others, now = set(copies.same_shard(shard)) - {shard}, copies.chain.numbers_at_cut(shard)
    names = {group.number: group.name for group in copies.chain.groups(shard)}
    found: dict[str, set[str]] = {}
    for number, standby in read_once.items():
        if number in now and others == {standby}:
            found.setdefault(standby, set()).add(names[now[number]])
    return {standby: sorted(tables) for standby, tables in found.items()}
