"""Compare the transactions that copies lack, as commits list them, with the archives.

A transaction that was prepared before a copy of a table and decided after it is not in the copy, and its changes are
before the copy's position. A commit lists such transactions, so that their changes count: for tables that were copied
again, and for base copies that were read on a standby. An extra entry would count changes twice, and a missing entry
would lose them, in all copies of the shard alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from msgspec import Struct

from cutline.check.report import Conflict, Findings
from cutline.fleet.lsn import Lsn
from cutline.nodes.sessions import in_parallel
from cutline.snapshots.base_copy.copy_slots import find_changed_groups, find_prepared, find_prepared_at
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit, FullSnapshot, Increment
from cutline.snapshots.records.proven_chains import commit_key, point_label
from cutline.storage.errors import report_of
from cutline.storage.store import ObjectStore
from cutline.wal.segments.damage import ObjectDamagedError


class _ListedAtCopy(Struct, frozen=True):
    """The transactions that a commit lists for a copy at `position`, in the archive of `node`.

    Only those count that changed tables with the `numbers`; None means all.
    """

    node: str
    position: Lsn
    numbers: frozenset[int] | None
    listed: tuple[Lsn, ...]


def check_spanning(chain: Chain, store: ObjectStore, findings: Findings, after: int | None = None) -> None:
    """Report a conflict for every list of a commit, after increment `after` if given, that the archive contradicts."""
    for commit in chain.commits:
        if after is not None and commit.increment <= after:
            continue
        copies = [lists for lists in _lists_of(chain, commit) if lists[0].node not in findings.damaged]
        for lists, found in zip(copies, in_parallel(partial(_find, store, commit), copies), strict=True):
            if isinstance(found, ObjectDamagedError):
                findings.damage(report_of(found))
                continue
            for listed, spanning in zip(lists, found, strict=True):
                if wrong := spanning ^ {*listed.listed}:
                    detail = (
                        f"{point_label(commit.increment)} lists {len(listed.listed):,} transactions that span a copy of"
                        f" tables of {listed.node}, but the archive has {len(spanning):,}; they differ at {min(wrong)}"
                    )
                    key = commit_key(chain.name, commit.increment)
                    findings.conflict(Conflict("commit", detail, node=listed.node, object=key))


def _lists_of(chain: Chain, commit: Commit) -> Iterator[tuple[_ListedAtCopy, ...]]:
    """Yield the lists of each copy: several if tables were copied at several positions, in the background."""
    if isinstance(commit, FullSnapshot):
        for primary, shared in commit.shared_bases.items():
            yield (_ListedAtCopy(primary, commit.base[shared.standby], None, shared.pending),)
    if (changes := commit.definition_changes) is None:
        return
    for node, copied in changes.copied.items():
        if copied and commit.increment >= chain.begun(node):
            # All tables that an increment copies on a node are copied at one position.
            position = changes.begun[node][min(copied)]
            yield (_ListedAtCopy(node, position, frozenset(copied), changes.pending.get(node, ())),)
    for node, renewal in commit.renewed.items() if isinstance(commit, Increment) else ():
        if renewal.later and commit.increment == chain.begun(node):
            yield tuple(_ListedAtCopy(node, one.position, frozenset(one.numbers), one.pending) for one in renewal.later)


def _find(store: ObjectStore, commit: Commit, lists: tuple[_ListedAtCopy, ...]) -> list[set[Lsn]] | ObjectDamagedError:
    """Return what the archive has for each of the lists; its events are read once."""
    segments = commit.segments[lists[0].node]
    try:
        if len(lists) == 1:
            prepared = {lists[0].position: tuple(find_prepared(store, segments, lists[0].position))}
        else:
            prepared = find_prepared_at(store, segments, [listed.position for listed in lists])
        return [
            {*prepared[listed.position]}
            if listed.numbers is None
            else {*find_changed_groups(store, segments, prepared[listed.position], listed.numbers)}
            for listed in lists
        ]
    except ObjectDamagedError as error:
        return error
