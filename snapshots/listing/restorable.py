"""What of a chain can still be restored if one of its commits is damaged or gone."""

from __future__ import annotations

import re
from contextlib import suppress

from cutline.fleet.hints import restore_command
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.chains import read_chain
from cutline.snapshots.records.commits import SnapshotMissingError
from cutline.snapshots.records.documents import ManifestError
from cutline.storage.errors import SnapshotError
from cutline.storage.store import ObjectStore

COMMIT_FILE = re.compile(r"/increments/0*(\d+)(?:\.\d+)?\.json$")


def read_restorable(store: ObjectStore, name: str, increment: int | None) -> Chain:
    """Do as read_chain does; if an increment's commit is damaged or missing, the hint names those before it."""
    try:
        return read_chain(store, name, increment)
    except (ManifestError, SnapshotMissingError) as error:
        if found := COMMIT_FILE.search(str(error.details.get("object", ""))):
            last = int(found[1]) - 1
            with suppress(SnapshotError):
                read_chain(store, name, last)
                error.hint += (
                    f"\nincrements that can still be restored: 0 to {last}; the newest of them:"
                    f" {restore_command(name)} --increment {last}"
                )
        raise
