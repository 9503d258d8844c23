"""Copy tables of large standbys after an increment's commit, without the fleet's lock (background_copies.py).

A step copies some tables at one position: small ones together, a large one alone. What a step has stored counts once
its document is stored (records/background_records.py), so this may end at any point; the commit stands in any case. The
slot from which a step's snapshot is exported is dropped at once: it need not keep WAL. Other creates leave that slot
alone while the newest commit names the copy (operations/slot_guard.py). Steps of other creates are held off by an
advisory lock on the standby. It only saves work: if two copied the same table, one of them would be ignored.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from contextlib import suppress

from msgspec.structs import replace

from cutline.fleet.chain_ids import naming_listed_ids
from cutline.fleet.config import Fleet, Node
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.messages import without_node
from cutline.fleet.progress import News, Progress
from cutline.nodes.connections import raising_unreachable
from cutline.nodes.groups import Table
from cutline.nodes.sessions import Sessions, open_sessions
from cutline.snapshots.base_copy.copy_ranges import CopyDestination
from cutline.snapshots.base_copy.copy_slots import check_exported, drop_copy_slots, export_snapshots
from cutline.snapshots.base_copy.copy_tables import TableSource, amount_to_copy, copy_tables
from cutline.snapshots.create.absent_copies import standby_wait_seconds
from cutline.snapshots.create.archive_ahead import archive_ahead
from cutline.snapshots.create.background_copies import UnderwayCopy, read_underway
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.continuable import rules_since
from cutline.snapshots.create.renamed import in_chain_ids
from cutline.snapshots.ddl.table_changes import TableSelection, known_tables, plan_ddl, read_current_tables
from cutline.snapshots.records.background_records import CopyStep, store_step
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import BackgroundCopy, Increment, split_entries
from cutline.snapshots.records.proven_chains import read_continued_full, read_newest_part
from cutline.spark.needs import ExecutorNeeds
from cutline.spark.spark_jobs import SparkSource
from cutline.storage.errors import SnapshotError
from cutline.storage.store import ObjectStore
from cutline.wal.drain.slots import copy_slot_name, drop_slots

# Tables are copied together up to this part of the size from which a standby is copied in the background: 250 MB.
STEP_PART = 40
# While tables are copied, the WAL of the chain is archived this often, unless other commands do so.
AHEAD_SECONDS = 60.0
LOCK_QUERY = "SELECT pg_try_advisory_lock(%s)"


def copy_between(
    fleet: Fleet, listed: Fleet, commit: Increment, request: CreateRequest, spark: SparkSource, progress: Progress
) -> None:
    """Copy tables of the standbys that the commit names as `copying`, for as long as fleet.toml says.

    A table that has begun is finished. `fleet` has the chain's ids, and `listed` those of the file. Errors and
    interrupts end this, and are noted: the increment is committed.
    """
    _copy(fleet, listed, commit, request, spark, progress, time.monotonic() + fleet.background_seconds)


def continue_copies(fleet: Fleet, name: str, spark: SparkSource, progress: Progress) -> None:
    """Copy all remaining tables of the standbys that the snapshot's last commit names as `copying`.

    Another process takes increments meanwhile, and archives the WAL. Raises the errors of the chain's documents.
    """
    store = fleet.store.open()
    known = in_chain_ids(store, fleet, read_continued_full(store, name), ())
    commit = read_newest_part(store, name).last
    if isinstance(commit, Increment):
        with naming_listed_ids(known):
            _copy(known, fleet, commit, CreateRequest(name), spark, progress, None)


def _copy(
    fleet: Fleet,
    listed: Fleet,
    commit: Increment,
    request: CreateRequest,
    spark: SparkSource,
    progress: Progress,
    deadline: float | None,
) -> None:
    """Copy up to the deadline; without one, copy all tables, and leave archiving WAL to another process."""
    for number, (node, copying) in enumerate(sorted(commit.copying.items())):
        if not fleet.background_seconds or (number and _is_over(deadline)):
            return
        try:
            _Copying(fleet, listed, fleet.node(node), copying, request, spark, progress, deadline).run(commit.snapshot)
        except KeyboardInterrupt:
            progress.note(
                News(f"increment {commit.increment} is committed; the copy of {node} continues with the next")
            )
            return
        # The increment is committed: whatever goes wrong now must not make the command fail.
        except Exception as error:  # noqa: BLE001
            reason = error.message if isinstance(error, SnapshotError) else f"{type(error).__name__}: {error}"
            progress.note(f"standby {node}: its copy continues with the next increment: {without_node(reason, node)}")


def _is_over(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


class _Copying:
    """The copy of one standby in the background, by this process."""

    def __init__(
        self,
        fleet: Fleet,
        listed: Fleet,
        node: Node,
        copying: BackgroundCopy,
        request: CreateRequest,
        spark: SparkSource,
        progress: Progress,
        deadline: float | None,
    ) -> None:
        self.fleet, self.listed, self.node, self.copying = fleet, listed, node, copying
        self.request, self.spark, self.progress, self.deadline = request, spark, progress, deadline
        self.store: ObjectStore = fleet.store.open()
        # The tables that were rewritten while they were copied: the next increment's create tries again.
        self.skipped = set[int]()
        self.steps: dict[str, CopyStep] = {}

    def run(self, snapshot: str) -> None:
        """Copy one step after the other, until the time is over or no table is left."""
        node, archived_at = self.node, time.monotonic()
        with open_sessions(self.fleet, [self.fleet.node(node.shard), node]) as sessions:
            was, now = self.copying.identity, sessions.identities[node.id]
            if (was.place, was.timeline) != (now.place, now.timeline) or not self._lock(sessions):
                return
            # A process that was killed may have left it. If it can't be dropped, creating the slot fails.
            drop_slots([node], copy_slot_name(self.copying.operation))
            while True:
                # Other creates may have taken increments meanwhile.
                chain = read_newest_part(self.store, snapshot)
                newest = chain.copying.get(node.id)
                if newest is None or newest.operation != self.copying.operation:
                    return
                copy = read_underway(self.store, chain, node.id, self.steps)
                if not self._copy_step(sessions, chain, copy):
                    return
                copy = read_underway(self.store, chain, node.id, self.steps)
                then = "; the next increment adds the copy to the chain" if copy.is_complete else ""
                self.progress.note(News(f"standby {node.id}: {copy.text} are copied{then}"))
                if _is_over(self.deadline):
                    return
                if self.deadline is not None and time.monotonic() - archived_at > AHEAD_SECONDS:
                    archived_at = time.monotonic()
                    # Another command may be using the fleet; the WAL stays until the next increment.
                    with suppress(SnapshotError):
                        archive_ahead(self.listed, snapshot, self.progress)

    def _lock(self, sessions: Sessions) -> bool:
        """Return whether no other create copies this standby now; it can't before these sessions end."""
        name = f"cutline copies {self.node.id} for {self.copying.operation}"
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)
        with raising_unreachable(self.node):
            (is_free,) = sessions.connections[self.node.id].execute(LOCK_QUERY, (key,)).fetchone() or (False,)
        if not is_free:
            self.progress.note(News(f"standby {self.node.id}: another create is copying its tables"))
        return bool(is_free)

    def _copy_step(self, sessions: Sessions, chain: Chain, copy: UnderwayCopy) -> bool:
        """Copy the next tables; return False if none are left that can be copied now."""
        node, operation = self.node, self.copying.operation
        selection = TableSelection(chain.full.fleet_id, rules_since(chain, self.fleet))
        seen = read_current_tables(sessions, selection, {})
        plan = plan_ddl(seen, known_tables(chain), {}, {})
        # Tables that have changed since the last commit get other numbers with the next.
        same = {group.name: group for group in plan.shards[node.shard].unchanged}
        left = copy.copied.missing - self.skipped
        named = ((table, same.get(table.group.name)) for table in seen[node.shard].tables)
        tables = self._choose([replace(table, group=group) for table, group in named if group and group.number in left])
        if not tables:
            return False
        amount = amount_to_copy([node], {node.shard: tables})
        needs = ExecutorNeeds(self.fleet.store, (node,), writes=True, wait_seconds=self.request.wait_seconds)
        self.spark.begin(needs, self.progress, amount)
        slot, wait = copy_slot_name(operation), standby_wait_seconds(self.fleet, self.request.wait_seconds)
        with export_snapshots(self.fleet, [node], slot, wait, self.progress) as slots:
            drop_copy_slots([node], slot, self.progress)
            check_exported([node], slots, plan.fingerprints)
            exported = slots[node.id]
            copied = copy_tables(
                [TableSource(node, exported.snapshot, tables)],
                CopyDestination(chain.name, operation, self.fleet.store),
                sessions,
                self.spark,
                self.progress,
            )
        if copied.rewritten:
            # Their rows share objects with those of the other tables.
            self.skipped.update(table.group.number for table in tables)
            return True
        rows = Counter({table.group.number: 0 for table in tables})
        for entry in copied.entries:
            rows.update(entry.rows)
        objects, lists = split_entries(copied.entries)
        store_step(
            self.store,
            CopyStep(
                snapshot=chain.name,
                operation=operation,
                node=node.id,
                position=exported.position,
                rows=dict(rows),
                bytes=amount.page_bytes or 0,
                objects=objects,
                lists=lists,
            ),
        )
        self.progress.reached(CrashPoint.STEP_STORED)
        return True

    def _choose(self, tables: list[Table]) -> list[Table]:
        """Return the smallest of the tables: those that are copied together, or one."""
        size_max, sizes = self.fleet.background_bytes_min // STEP_PART, 0
        chosen: list[Table] = []
        for table in sorted(tables, key=lambda table: (table.size_bytes + table.toast_bytes, table.group.name)):
            sizes += table.size_bytes + table.toast_bytes
            if chosen and sizes > size_max:
                break
            chosen.append(table)
        return chosen
