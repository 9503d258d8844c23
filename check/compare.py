"""Compare each backup copy of a shard with the primary copy, by group and partition."""

from __future__ import annotations

from collections.abc import Mapping

from cutline.check.copies import Copies
from cutline.check.hashing import Sums
from cutline.check.image_hashes import PartitionHashes
from cutline.check.report import Conflict, Findings, Skipped

NAMED_MAX = 1000
EMPTY = (0, 0, 0, 0)
EVENTS = 0


def compare_copies(copies: Copies, hashes: PartitionHashes, findings: Findings) -> None:
    """Compare the rows and row versions of every partition; add conflicts and damaged copies to the report.

    What has no second copy is not named here (check/uncompared.py).
    """
    report = findings.report
    entries, writers = _by_node(copies, hashes.rows), _by_node(copies, hashes.versions)
    for primary, backup in copies.pairs:
        if _is_skipped(primary, backup, findings):
            continue
        places = sorted(entries.get(primary, {}).keys() | entries.get(backup, {}).keys())
        report.compared.partitions += len(places)
        conflicts = [
            conflict
            for place in places
            for conflict in _compare_place(copies, (primary, backup), place, entries, writers)
        ]
        report.conflicts += conflicts[:NAMED_MAX]
        if len(conflicts) > NAMED_MAX:
            detail = f"{len(conflicts) - NAMED_MAX:,} more partitions with conflicts are not listed"
            report.conflicts.append(Conflict("partition", detail, node=primary, other_node=backup))


def _compare_place(
    copies: Copies,
    pair: tuple[str, str],
    place: tuple[int, ...],
    entries: Mapping[str, Mapping[tuple[int, ...], tuple[int, ...]]],
    writers: Mapping[str, Mapping[tuple[int, ...], tuple[int, ...]]],
) -> list[Conflict]:
    primary, backup = pair
    ours, theirs = (entries.get(node, {}).get(place, EMPTY) for node in pair)
    if ours == theirs:
        left, right = (writers.get(node, {}).get(place, EMPTY) for node in pair)
        if left == right:
            return []
        kind, detail = "version", "the rows are identical, but were last written by different transactions"
    elif ours[0] != theirs[0]:
        kind, detail = "row-count", f"{ours[0]:,} rows on {primary}, {theirs[0]:,} on {backup}"
    else:
        kind, detail = "row-hash", f"one or more of the {ours[0]:,} rows in this partition differ"
    group, partition = place
    return [
        Conflict(
            kind,
            detail,
            node=primary,
            other_node=backup,
            group=copies.group_name(primary, group),
            partition=partition,
        )
    ]


def compare_streams(copies: Copies, sums: Sums, findings: Findings) -> None:
    """Compare the copies' WAL archives: the changes by group, and the transaction events."""
    streams = _by_node(copies, sums)
    for primary, backup in copies.pairs:
        if primary in findings.damaged or backup in findings.damaged:
            continue
        ours, theirs = streams.get(primary, {}), streams.get(backup, {})
        for place in sorted(ours.keys() | theirs.keys()):
            left, right = ours.get(place, EMPTY), theirs.get(place, EMPTY)
            if left == right:
                continue
            what = "transaction events" if place == (EVENTS,) else "changes"
            findings.conflict(
                Conflict(
                    "events" if place == (EVENTS,) else "changes",
                    f"{left[0]:,} {what} in the archive of {primary}, {right[0]:,} in the archive of {backup}"
                    + ("" if left[0] != right[0] else ", with different contents"),
                    node=primary,
                    other_node=backup,
                    group=copies.group_name(primary, place[0]),
                )
            )


def _is_skipped(primary: str, backup: str, findings: Findings) -> bool:
    broken = sorted({primary, backup} & findings.damaged)
    if broken:
        why = f"objects of {' and '.join(broken)} are damaged"
        findings.skip(Skipped(f"rows of {primary} against {backup}", why))
    return bool(broken)


def _by_node(copies: Copies, sums: Sums) -> dict[str, dict[tuple[int, ...], tuple[int, ...]]]:
    """Group the combined hashes by node, the first number of each key; map the rest of the key to the hash."""
    by_node: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
    for key, value in sums.as_dict().items():
        by_node.setdefault(copies.nodes[key[0]], {})[key[1:]] = value
    return by_node
