"""What whoever restores should know: what records say against a restore point, and what is left of a damaged chain."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from contextlib import suppress

from fleet.hints import restore_command
from snapshots.activity.checks import read_checks
from snapshots.listing.listing import entry_of
from snapshots.listing.missing_points import missing_texts, read_missing_after
from snapshots.records.chain import Chain
from snapshots.records.chains import read_chain
from snapshots.records.commits import SnapshotMissingError
from snapshots.records.documents import ManifestError
from storage.errors import SnapshotError
from storage.store import ObjectStore

INCREMENT_FILE = re.compile(r"/increments/0*(\d+)(?:\.\d+)?\.json$")


def read_restorable(store: ObjectStore, name: str, increment: int | None) -> Chain:
    """Do as read_chain does; if an increment's commit is damaged or missing, the hint names those before it."""
    try:
        return read_chain(store, name, increment)
    except (ManifestError, SnapshotMissingError) as error:
        if found := INCREMENT_FILE.search(str(error.details.get("object", ""))):
            last = int(found[1]) - 1
            with suppress(SnapshotError):
                read_chain(store, name, last)
                error.hint += (
                    f"\nincrements that can still be restored: 0 to {last}; the newest of them:"
                    f" {restore_command(name)} --increment {last}"
                )
        raise


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
            f"a check that ended at {standing.ended_at} has found conflicts in what this needs; to see them:"
            f" snapshot check {chain.name}"
        )
    return tuple(found)
