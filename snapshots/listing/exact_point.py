"""Exact points: the state of a chain at a time between two of its cuts.

The commits contain only cuts. An exact point is a cut that no command made: it is resolved from the archived WAL
between two cuts (wal/cut/exact_time.py), and takes the place of the later cut in the later increment's commit. So a
restore to an exact point folds base copies and segments like any other restore.

Everything that is not in the WAL is known only at cuts. Definitions and DDL must be the same at both cuts. The values
of sequences, the rows of extension tables, and the facts about databases and servers are those of the later cut. Large
objects are always those of the full snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pyarrow as pa
from msgspec import Struct, structs
from msgspec.structs import replace

from cutline.fleet.lsn import Lsn
from cutline.fleet.messages import list_some, restore_command
from cutline.fleet.record import Time
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit, CutRecord, Increment
from cutline.snapshots.records.proven_chains import ASKING_THREADS_MAX, cut_time, point_label
from cutline.storage.digest import digest
from cutline.storage.errors import RefusedError
from cutline.storage.store import ObjectStore
from cutline.wal.cut.cut_values import NodeCut
from cutline.wal.cut.exact_time import CutAtTime, NodeAtTime, resolve_at
from cutline.wal.cut.resolve import GlobalIdReusedError
from cutline.wal.cut.safe_time import later, safe_time_of_nodes
from cutline.wal.segments.archive import Segment
from cutline.wal.segments.segments import SEGMENT_SCHEMA, read_events

TABLES_NAMED_MAX = 5


class ExactTimeError(RefusedError):
    """The chain's archived WAL does not cover the requested time."""


class ExactDefinitionsError(RefusedError):
    """Tables or other DDL changed between the cuts before and after the requested time, at an unknown moment."""


class ExactPoint(Struct, frozen=True):
    """The state of a chain at `moment`, between the cuts of the commits `before` and `after`.

    `chain` ends with `after`, whose cut is replaced by the cut at the moment. `nodes` are the primaries. The nodes'
    clocks differed by at most `skew_seconds` at the cuts.
    """

    moment: datetime
    before: Commit
    after: Increment
    chain: Chain
    nodes: tuple[NodeAtTime, ...]
    skew_seconds: float

    @property
    def cut(self) -> CutRecord:
        """The cut at the moment."""
        return self.chain.last.cut

    def find_changed(self, shards: Collection[str]) -> dict[str, list[str]]:
        """Return the shards whose DDL changed between the two cuts, each with the names of its changed tables."""
        changed: dict[str, set[str]] = {}
        for commit in self.chain.commits_after(self.before.increment):
            if (changes := commit.definition_changes) is None:
                continue
            for shard in shards:
                groups, gone = changes.groups.get(shard, ()), changes.gone.get(shard, ())
                if groups or gone or shard in changes.fingerprints:
                    known = self.chain.definitions(shard)
                    names = {group.name for group in groups} | {known[number].name for number in gone}
                    changed.setdefault(shard, set()).update(names)
        return {shard: sorted(names) for shard, names in changed.items()}


def find_exact_point(store: ObjectStore, whole: Chain, moment: datetime, command: str = "") -> ExactPoint:
    """Resolve the state of the chain at `moment`; reads the events of the segments between the two cuts.

    `command` is the restore that needs it, if any, without the options that choose the state: hints repeat it.

    Raises ExactTimeError, GlobalIdReusedError and ObjectDamagedError.
    """
    before, after = cuts_around(whole, moment)
    chain = whole.up_to(after.increment)
    _check_no_gap(chain, before, moment, command or restore_command(chain.name))
    earlier, later_cuts = before.cut.by_node, after.cut.by_node
    events = _read_events(store, chain, earlier, later_cuts)
    try:
        resolved = resolve_at(earlier, later_cuts, events, moment)
    except GlobalIdReusedError as error:
        error.hint = f"restore another time, or an increment without --exact; for later snapshots: {error.hint}"
        raise
    between = (before, *chain.commits_after(before.increment))
    skew_seconds = max(commit.cut.skew_seconds for commit in between)
    commit = _commit_at(after, resolved, moment, skew_seconds)
    chain = replace(chain, increments=(*chain.increments[:-1], commit))
    return ExactPoint(moment, before, after, chain, resolved.nodes, skew_seconds)


def cuts_around(chain: Chain, moment: datetime) -> tuple[Commit, Increment]:
    """Return the newest cut at or before `moment`, and the first later one whose safe time is not before it.

    These are often more than one increment apart if `moment` is close to a cut, because the nodes' clocks differ.
    Raises ExactTimeError.
    """
    safe = [datetime.fromisoformat(increment.cut.safe_at) for increment in chain.increments]
    earliest, newest = cut_time(chain.full), max(safe, default=None)
    details: dict[str, object] = {"snapshot": chain.name}
    if newest is None or newest < earliest:
        # A chain that begins with a merge was read from the newest whose cut is not after the moment.
        point = point_label(chain.full.increment)
        raise ExactTimeError(
            f"snapshot {chain.name} has no increment with WAL after {point}",
            hint=f"take one: snapshot create {chain.name} --incremental; or restore {point} without --exact",
            details=details,
        )
    details |= {"earliest": _text(earliest), "newest": _text(newest)}
    if moment < earliest:
        raise ExactTimeError(
            f"snapshot {chain.name} has no state at {_text(moment)}: the cut of its full snapshot was made later",
            hint=f"its earliest time is {_text(earliest)}; for other snapshots: snapshot list",
            details=details,
        )
    if moment > newest:
        raise ExactTimeError(
            f"the WAL of snapshot {chain.name} is complete only up to {_text(newest)}, which is before {_text(moment)}",
            hint=f"restore this time, or take an increment first: snapshot create {chain.name} --incremental",
            details=details,
        )
    # The time of a cut has fewer digits than its safe time, and so may seem to be before it.
    earlier = chain.commits[:-1] if safe[-1] >= moment else chain.commits
    before = max((commit for commit in earlier if cut_time(commit) <= moment), key=_number)
    for increment, safe_at in zip(chain.increments, safe, strict=True):
        if increment.increment > before.increment and safe_at >= moment:
            return before, increment
    # A clock was set back: the last cut was made before the moment, although an earlier one has a later safe time.
    raise ExactTimeError(
        f"the WAL of snapshot {chain.name} after {point_label(before.increment)} is not known to be complete at"
        f" {_text(moment)}, because a node's clock was set back",
        hint=f"take an increment first: snapshot create {chain.name} --incremental",
        details=details,
    )


def _check_no_gap(chain: Chain, before: Commit, moment: datetime, command: str) -> None:
    """Raise ExactTimeError if a primary was copied or retired after `before`: WAL between the two cuts is missing."""
    for commit in chain.commits_after(before.increment):
        renewed, retired = (commit.renewed, commit.retired) if isinstance(commit, Increment) else ({}, ())
        lost = [node for node, one in renewed.items() if one.identity.backup_of is None and not one.is_new]
        new = [node for node, one in renewed.items() if one.identity.backup_of is None and one.is_new]
        point, last = point_label(commit.increment), point_label(before.increment)
        reasons = {
            f"{point} copied {list_some(lost, TABLES_NAMED_MAX)} again: the chain lacks WAL after {last}": lost,
            f"shard {list_some(new, TABLES_NAMED_MAX)} joined the chain with {point}": new,
            f"shard {list_some(retired, TABLES_NAMED_MAX)} left the chain with {point}": retired,
        }
        if gaps := [*lost, *new, *retired]:
            reason = next(reason for reason, nodes in reasons.items() if nodes)
            raise ExactTimeError(
                f"snapshot {chain.name} can't be restored at {_text(moment)}: {reason}",
                hint=[
                    f"restore the last state before: {command} --increment {before.increment}",
                    f"or the first one after: {command} --increment {commit.increment}",
                ],
                details={"snapshot": chain.name, "nodes": gaps, "before": before.increment, "after": commit.increment},
            )


def _number(commit: Commit) -> int:
    return commit.increment


def _text(moment: datetime) -> str:
    return Time.exactly(moment.astimezone(UTC))


def _read_events(
    store: ObjectStore, chain: Chain, earlier: dict[str, NodeCut], later_cuts: dict[str, NodeCut]
) -> dict[str, pa.Table]:
    """Read the events of each primary between two cuts' positions, and some before and after."""
    needed = [
        (node, segment)
        for node in earlier
        for segment in chain.segments(node)
        if _reaches_into(segment, earlier[node].position, later_cuts[node].position)
    ]
    with ThreadPoolExecutor(ASKING_THREADS_MAX) as threads:
        tables = list(threads.map(lambda found: read_events(store, found[1]), needed))
    by_node: dict[str, list[pa.Table]] = {node: [SEGMENT_SCHEMA.empty_table()] for node in earlier}
    for (node, _), table in zip(needed, tables, strict=True):
        by_node[node].append(table.cast(SEGMENT_SCHEMA))
    return {node: pa.concat_tables(found) for node, found in by_node.items()}


def _reaches_into(segment: Segment, begin: Lsn, end: Lsn) -> bool:
    return segment.through > begin and segment.after < end


def _commit_at(after: Increment, resolved: CutAtTime, moment: datetime, skew_seconds: float) -> Increment:
    """Return the commit of the later increment, with the cut at the moment in place of its own."""
    cuts, cut = after.cut.by_node, resolved.cut
    # The archive reaches to the later cut's markers.
    nodes = tuple(structs.replace(node, finish=cuts[node.node].finish) for node in cut.nodes)
    at = Time.exactly(moment)
    record = CutRecord(
        id=f"{after.cut.id}@{at}",
        attempts=1,
        seconds=0.0,
        nodes=nodes,
        global_transactions=cut.global_transactions,
        included_early=cut.included_early,
        in_flight=cut.in_flight,
        made_at=_latest(at, nodes),
        safe_at=safe_time_of_nodes(nodes),
        skew_seconds=skew_seconds,
    )
    return structs.replace(after, cut=record, digest=_digest_at(after, at))


def _digest_at(after: Increment, at: Time) -> str:
    return digest(f"{after.digest}\n{at}".encode())


def digest_at(chain: Chain, moment: datetime) -> str:
    """Return the digest of the exact point's chain at `moment`, of which the chain's last increment is the later one.

    Reads nothing. Without increments, no chain of an exact point has the digest.
    """
    if not chain.increments:
        return chain.digest
    *earlier, after = chain.increments
    after = structs.replace(after, digest=_digest_at(after, Time.exactly(moment)))
    return replace(chain, increments=(*earlier, after)).digest


def _latest(at: Time, nodes: Iterable[NodeCut]) -> Time:
    """Return the time after which nothing in the state was committed."""
    for node in nodes:
        found = later(at, node.last_commit_at)
        at = found if isinstance(found, str) else at
    return at


def check_same_definitions(point: ExactPoint, shards: Collection[str], command: str = "") -> None:
    """Raise ExactDefinitionsError if tables or DDL of one of the shards changed between the two cuts.

    `command` is as in find_exact_point.
    """
    changed = point.find_changed(shards)
    if not changed:
        return
    name, before, after = point.chain.name, point.before, point.after
    again = command or restore_command(name)
    what = "; ".join(
        f"{shard}: {list_some(tables, TABLES_NAMED_MAX) if tables else 'DDL, but no table that is in the snapshot'}"
        for shard, tables in changed.items()
    )
    raise ExactDefinitionsError(
        f"snapshot {name} can't be restored at {_text(point.moment)}: definitions changed between"
        f" {point_label(before.increment)} ({_text(cut_time(before))}) and {point_label(after.increment)}"
        f" ({_text(cut_time(after))}), and WAL does not show when; on {what}",
        hint=[
            f"restore the state before the change: {again} --increment {before.increment}",
            f"or the state after it: {again} --increment {after.increment}",
        ],
        details={
            "snapshot": name,
            "changed": changed,
            "before": before.increment,
            "after": after.increment,
            "before_at": _text(cut_time(before)),
            "after_at": _text(cut_time(after)),
        },
    )
