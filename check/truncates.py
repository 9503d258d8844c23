"""Find TRUNCATEs that were never executed: the table kept its file.

A TRUNCATE gives the table a new file. Only if its own transaction had created the table or the file, it keeps that file
(tablecmds.c, ExecuteTruncateGuts). In both cases, the table has a different file than before the transaction, and no
later command brings back the number of a file. A create reads the files before it makes its cut. So the files of the
commit before a TRUNCATE and of the second commit after it were read before and after its COMMIT was written.

A server that waits for a synchronous standby shows a transaction only after the standby has its COMMIT, which may take
any time. Until then, the transaction holds its lock. So a later change of the table proves that the TRUNCATE was
visible; without such a change, there is a doubt.

The converse proves nothing: VACUUM FULL, CLUSTER and other commands also give a table a new file. TRUNCATEs of
two-phase transactions are left out, because they take effect only at COMMIT PREPARED.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from cutline.check.copies import Copies
from cutline.check.deleted_rows import KeyDeletes
from cutline.check.report import Conflict, Doubt, Findings
from cutline.columns.bytes_column import Ints
from cutline.fleet.lsn import Lsn
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import FullSnapshot

WAITS = "the server waited for a synchronous standby all that time, or somebody changed the store"


def note_contradicted(reports: Mapping[int, Sequence[KeyDeletes]], copies: Copies, findings: Findings) -> None:
    """Report the tables that kept their file although an archive has a TRUNCATE; `reports` are those by node."""
    for number, of_node in reports.items():
        node = copies.nodes[number]
        groups = {group for report in of_node for group, _ in report.truncates}
        if node in findings.damaged or not groups:
            continue
        finishes = np.array([cut.finish for cut in copies.chain.cuts(copies.shard[node])], np.int64)
        files = _files(copies.chain, copies.shard[node], groups)
        for group in sorted(groups):
            found = sorted(_contradicted(of_node, group, finishes, files.get(group, [])))
            if not found:
                continue
            is_proven, at = max(found, key=lambda one: one[0])
            detail = f"the archive contains a TRUNCATE at {at}, but the table kept its file"
            name = copies.group_name(node, group)
            if is_proven:
                findings.conflict(Conflict("history", detail, node=node, group=name))
            else:
                findings.doubt(Doubt("history", f"{detail}: {WAITS}", node=node, group=name))


def _contradicted(
    reports: Sequence[KeyDeletes], group: int, finishes: Ints, files: Sequence[int | None]
) -> Iterator[tuple[bool, Lsn]]:
    """Yield the TRUNCATEs of a group that its files contradict, and whether a later change proves it.

    `finishes` are the ends of the cuts, and `files` those of the table at the same commits, None where it is not known.
    """
    last = np.array([at for report in reports for number, at in report.last_changes if number == group], np.int64)
    for lsn in (at for report in reports for number, at in report.truncates if number == group):
        # The first commit whose cut ends after the TRUNCATE; 0 is the full snapshot.
        after = int(np.searchsorted(finishes, lsn, side="right"))
        if not after or not files:
            continue
        later = np.searchsorted(finishes, last[last > lsn], side="right")
        for is_proven, until in ((True, int(later.min(initial=len(finishes)))), (False, after)):
            if until + 1 < len(finishes) and files[after - 1] is not None and files[until + 1] == files[after - 1]:
                yield is_proven, Lsn(lsn)
                break


def _files(chain: Chain, shard: str, groups: set[int]) -> dict[int, list[int | None]]:
    """Return the files of the tables of these groups at each commit, by the number of the group at the last commit."""
    states = chain.tables(shard)
    listed = [group for group in chain.groups(shard) if group.number in groups and group.name in states]
    oids = {states[group.name].oid: group.number for group in listed}
    found: dict[int, list[int | None]] = {number: [] for number in oids.values()}
    now: dict[int, int] = {}
    for commit in chain.commits:
        lists = [commit.tables] if isinstance(commit, FullSnapshot) else []
        lists += [commit.definition_changes.tables] if commit.definition_changes else []
        now |= {state.oid: state.file for tables in lists for state in tables.get(shard, ())}
        # As in Chain.cuts, the commits begin with the first that has the shard.
        for oid, number in oids.items() if shard in commit.cut.by_node else ():
            found[number].append(now.get(oid))
    return found
