"""What the records of operations say against a restore point that can be read: whoever restores it should know."""

from __future__ import annotations

from collections.abc import Mapping, Set

from cutline.snapshots.activity.checks import read_checks
from cutline.snapshots.listing.listing import entry_of
from cutline.snapshots.listing.missing_points import missing_texts, read_missing_after
from cutline.snapshots.records.chain import Chain
from cutline.storage.store import ObjectStore


def find_doubts(
    store: ObjectStore, documents: Mapping[str, Set[str]], chain: Chain, *, is_newest: bool
) -> tuple[str, ...]:
    """Conflicts that a check has found; and, if the chain `is_newest`, later increments whose commit files are gone.

    `documents` are those of document_names, listed before the chain was read. Raises what read_summaries raises.
    """
    missing = read_missing_after(store, documents, entry_of(store, chain)) if is_newest else []
    found = missing_texts(missing)
    checks = read_checks(store, documents, {chain.name})
    if standing := checks.standing_conflicts(chain.name, chain.last.increment + 1):
        found.append(
            f"a check up to increment {standing.point.increment} of {chain.name}, which ended at {standing.ended_at},"
            f" has found conflicts; to see whether this is concerned: snapshot check {chain.name} --increment N"
        )
    return tuple(found)
