"""Prove a merge: its base has the same rows as the chain that it was made from, by their partition hashes.

Both sides are folded and hashed as a check of the chain hashes them. The side of the merge is the chain that begins
with it, read back from the store, as later commands will read it. Objects that both sides list for tables without
changes are hashed on both sides, so damage to them is found as well.
"""

from __future__ import annotations

from collections.abc import Mapping

from cutline.check.copies import Copies
from cutline.check.hashing import combine_all
from cutline.check.new_part import NewPart
from cutline.check.partitions import hash_partitions
from cutline.check.report import Conflict, Findings, SnapshotReport
from cutline.check.streams import StreamHashes
from cutline.snapshots.merge.running import Proof
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.repair.work import Work
from cutline.storage.digest import digest
from cutline.storage.errors import SnapshotError

NAMED_MAX = 5


class MergeUnprovenError(SnapshotError):
    """The base of a merge is not equal to the chain, or one of them can't be read; nothing was committed."""

    exit_code = 1


def prove_merge(chain: Chain, merged: Chain, work: Work) -> Proof:
    """Compare the rows of every copy in the chain and in the merged chain; raise MergeUnprovenError if they differ."""
    was, now = (_hashes(one, work) for one in (chain, merged))
    names = Copies.of(chain).nodes
    if was != now:
        wrong = sorted(key for key in was.keys() | now.keys() if was.get(key) != now.get(key))
        tables = {number: group.name for node in names for number, group in chain.definitions(node).items()}
        named = [
            f"partition {partition} of {tables.get(group, group)} on {names[number]}"
            for number, group, partition in wrong[:NAMED_MAX]
        ]
        more = f", and {len(wrong) - NAMED_MAX:,} more" if len(wrong) > NAMED_MAX else ""
        raise MergeUnprovenError(
            f"the base that was written for {chain.name} differs from the chain in {', '.join(named)}{more}; nothing"
            " was merged",
            hint=f"check the chain: snapshot check {chain.name}; if it is valid, this is a bug: report it",
            details={"snapshot": chain.name, "partitions": len(wrong)},
        )
    text = "\n".join(f"{key} {value}" for key, value in sorted(was.items()))
    return Proof(len(was), digest(text.encode()))


def _hashes(chain: Chain, work: Work) -> Mapping[tuple[int, ...], tuple[int, ...]]:
    """Return the partition hashes of all copies, by the number of the node, the group and the partition."""
    report = SnapshotReport(chain.name, chain.last.increment)
    findings = Findings(report)
    copies = Copies.of(chain, compares_all=True)
    streams = StreamHashes(combine_all([], 2), {}, work.location)
    hashes = hash_partitions(work.session(), copies, work.location, findings, work.progress, streams, NewPart(chain))
    if report.conflicts:
        raise _damage_error(chain, report.conflicts)
    return {tuple(key): tuple(value) for key, value in hashes.rows.as_dict().items() if any(value)}


def _damage_error(chain: Chain, conflicts: list[Conflict]) -> MergeUnprovenError:
    first = conflicts[0]
    more = f" (and {len(conflicts) - 1:,} more)" if len(conflicts) > 1 else ""
    return MergeUnprovenError(
        f"nothing was merged: {first.detail}{more}",
        hint=f"see all damage: snapshot check {chain.name}   to repair it: snapshot repair {chain.name}",
        details={"snapshot": chain.name, "node": first.node, "object": first.object},
    )
