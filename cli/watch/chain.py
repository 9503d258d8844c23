"""The chain that `watch` continues: that of the newest snapshot whose name its template can have made.

Chains of older ones that still go on are those that the newest has replaced; the watch ends them. A snapshot that
can't be read is passed over, and said: it must not keep others from being taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from cutline.snapshots.listing.name_templates import read_template
from cutline.snapshots.records.chains import read_newest_part
from cutline.snapshots.records.commit import FullSnapshot
from cutline.snapshots.records.commits import SnapshotMissingError, read_full, snapshot_names
from cutline.snapshots.records.cut_times import cut_time
from cutline.snapshots.records.documents import ManifestError, StoreEncryptedError
from cutline.snapshots.records.lost_chains import is_lost
from cutline.snapshots.records.tombstones import SnapshotDeletedError, is_only_full
from cutline.storage.store import ObjectStore

# So many of the newest are looked at: whenever one is followed, those that it has replaced are ended.
READ_MAX, OTHERS_MAX = 5, 20


@dataclass(frozen=True, slots=True)
class WatchedChain:
    """The newest snapshot, when its first and its last cut were made, and why it gets no increments ("": it does).

    `replaced` are older snapshots whose chains still go on.
    """

    name: str
    began_at: datetime
    last_at: datetime
    ended: str = ""
    replaced: tuple[str, ...] = ()

    @property
    def goes_on(self) -> bool:
        """Whether it gets increments."""
        return not self.ended


def matching_names(store: ObjectStore, template: str) -> tuple[str, ...]:
    """The names of snapshots that the template can have made, in its order; raises what reading the store raises."""
    parsed = read_template(template)
    matching = {name: values for name in snapshot_names(store) if (values := parsed.values_in(name))}
    return tuple(sorted(matching, key=lambda one: matching[one]))


def find_chain(store: ObjectStore, names: Sequence[str], log: Callable[..., None]) -> WatchedChain | None:
    """The chain of the newest of these snapshots that has rows, None if none has.

    The newest is the one whose first cut was made last: a name may have a time that has not come yet. Raises
    StoreEncryptedError, and what the store raises.
    """
    fulls = [full for name in names[-READ_MAX:] if (full := _read_full(store, name, log)) and not full.only_cut]
    if not fulls:
        return None
    *older, newest = sorted(fulls, key=cut_time)
    replaced = tuple(one.snapshot for one in older if not _why_ended(store, one))
    ended = _why_ended(store, newest)
    try:
        last_at = cut_time(read_newest_part(store, newest.snapshot).last)
    except StoreEncryptedError:
        raise
    except ManifestError as error:
        # Nothing can be added to it.
        last_at, ended = cut_time(newest), ended or error.message
    return WatchedChain(newest.snapshot, cut_time(newest), last_at, ended, replaced)


def find_others(store: ObjectStore, names: Sequence[str], log: Callable[..., None]) -> tuple[str, ...]:
    """Snapshots that are not of the watch, which has these `names`, and whose chains go on: nodes keep WAL for them.

    Of the last OTHERS_MAX by name. Raises what `find_chain` raises.
    """
    others = sorted(set(snapshot_names(store)).difference(names))[-OTHERS_MAX:]
    fulls = [full for name in others if (full := _read_full(store, name, log)) and not full.only_cut]
    return tuple(full.snapshot for full in fulls if not _why_ended(store, full))


def _read_full(store: ObjectStore, name: str, log: Callable[..., None]) -> FullSnapshot | None:
    """The full snapshot, None if it is damaged, or has been deleted meanwhile."""
    try:
        return read_full(store, name)
    except StoreEncryptedError:
        raise
    except (SnapshotMissingError, SnapshotDeletedError):
        return None
    except ManifestError as error:
        log(f"snapshot {name} is passed over: {error.message}", hint=error.hint)
        return None


def _why_ended(store: ObjectStore, full: FullSnapshot) -> str:
    """Why the chain of this full snapshot gets no increments, "" if it does."""
    try:
        if is_lost(store, full.snapshot, full.chain):
            return "its chain was given up or ended"
        return "its increments were pruned" if is_only_full(store, full.snapshot) else ""
    except StoreEncryptedError:
        raise
    except ManifestError as error:
        # There is a mark, whatever it said.
        return error.message
