"""The metrics: their names, labels and meanings, as listed in docs/monitoring.md.

Names and units follow Prometheus's conventions. All metrics have the `fleet` label in addition to their own labels.
Labels have few values: where users choose names freely, as for snapshots, only the newest names become label values.
"""

from __future__ import annotations

from msgspec import Struct

from cutline.snapshots.operations.ended_operations import DRILL, FULL, INCREMENT, ONLY_CUT, RESTORE


class Metric(Struct, frozen=True):
    """A gauge. `labels` are its own labels, in addition to `fleet`."""

    name: str
    help: str
    labels: tuple[str, ...] = ()

    def of(self, value: float, *labels: str) -> Sample:
        """Return a sample with these label values; raise ValueError if their number is wrong."""
        if len(labels) != len(self.labels):
            raise ValueError(f"{self.name} has the labels {self.labels}, not {labels}")
        return Sample(self, float(value), labels)


class Sample(Struct, frozen=True):
    """A value of a metric."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()


FLEET = "fleet"
# Values of the `kind` label, in addition to those in ended_operations. Unknown kinds in a store are reported as
# "other".
CHECK, COPY, DELETE, PRUNE, GC, WATCH, OTHER = "check", "copy", "delete", "prune", "gc", "watch", "other"
# Values of the `role` label, taken from fleet.toml.
PRIMARY, STANDBY = "primary", "standby"
KINDS = (FULL, INCREMENT, ONLY_CUT, RESTORE, DRILL, CHECK, COPY, DELETE, PRUNE, GC, WATCH, OTHER)
# The steps of a restore, including WAL_STEP, in which the changes from the WAL are folded.
WAL_STEP = "fold changes"
RESTORE_STEPS = (
    "create databases",
    "start Spark",
    WAL_STEP,
    "load rows",
    "load large objects",
    "indexes and constraints",
    "swap databases",
)

BUILD_INFO = Metric(
    "cutline_build_info", "Always 1; the label is the version of Cutline that gathered the metrics.", ("version",)
)
GATHERED = Metric("cutline_gathered_timestamp_seconds", "Time at which the metrics were gathered.")
GATHERING = Metric("cutline_gathering_seconds", "Time that gathering the metrics took.")
STORE_UP = Metric(
    "cutline_store_up", "1 if the store answered in time and could be read, else 0; if 0, its metrics are absent."
)

NODE_UP = Metric(
    "cutline_node_up",
    "1 if the node answered in time, else 0; if 0, its other metrics are absent.",
    ("node", "role"),
)
NODE_IN_RECOVERY = Metric("cutline_node_in_recovery", "1 if the node is currently a standby, else 0.", ("node",))
PROMOTED = Metric(
    "cutline_node_promoted",
    "1 if the server of a standby in fleet.toml has the role of this primary now, else 0.",
    ("node",),
)
SLOT_LAG = Metric(
    "cutline_node_slot_lag_bytes",
    "WAL between the position that the chain's slot has confirmed and the node's current position. An idle node's slot"
    " stays up to 4 MiB behind.",
    ("node", "slot"),
)
RETAINED = Metric("cutline_node_retained_wal_bytes", "WAL that the node retains for the slot.", ("node", "slot"))
SLOT_UNUSABLE = Metric(
    "cutline_node_slot_unusable",
    "1 if the slot can't continue its chain, for example because the server has invalidated it, else 0.",
    ("node", "slot"),
)
RETAINED_LIMIT = Metric(
    "cutline_node_retained_wal_limit_bytes",
    "Limit max_retained_wal. A chain for which the node retains more is copied again from this node by its own next"
    " increment; another create gives the chain up.",
    ("node",),
)
ARCHIVE_LAG = Metric(
    "cutline_node_archive_lag_bytes",
    "WAL between the node's newest position in the store and its current position.",
    ("node",),
)
REPLAY_LAG = Metric(
    "cutline_node_replay_lag_bytes", "WAL that the primary has written and this standby has not replayed.", ("node",)
)
REPLAY_LAG_SECONDS = Metric(
    "cutline_node_replay_lag_seconds",
    "0 if the standby has replayed everything, else the age of the last commit that it has replayed.",
    ("node",),
)

SNAPSHOTS = Metric("cutline_snapshots", "Snapshots in the store, by state as shown by `list`.", ("state",))
DAMAGED_MARKS = Metric(
    "cutline_damaged_marks",
    "Snapshots that can be restored, but will get no more increments because a mark can't be read.",
)
MISSING_POINTS = Metric(
    "cutline_missing_restore_points",
    "Committed full snapshots and increments whose commit files are missing from the store.",
)
STANDING_CONFLICTS = Metric(
    "cutline_snapshots_with_conflicts",
    "Snapshots in which a check found conflicts, unless a later full check found the same restore points valid.",
)
RESTORE_POINTS = Metric(
    "cutline_restore_points", "Full snapshots and increments in the store, including cuts without rows."
)
COMMITTED_BYTES = Metric(
    "cutline_committed_bytes",
    "Size of the objects that the restore points in the store need, according to the commits.",
)
SNAPSHOT_BYTES = Metric(
    "cutline_snapshot_bytes", "Size of a snapshot with its increments, for the newest 20 snapshots.", ("snapshot",)
)
SNAPSHOT_INCREMENTS = Metric(
    "cutline_snapshot_increments", "Increments of a snapshot, for the newest 20 snapshots.", ("snapshot",)
)
SNAPSHOT_CHECKED = Metric(
    "cutline_snapshot_checked_timestamp_seconds",
    "Time at which the last check of everything in a snapshot ended that found nothing wrong, for the newest 20"
    " snapshots.",
    ("snapshot",),
)
SNAPSHOT_CHECKED_BY_RECORDS = Metric(
    "cutline_snapshot_checked_by_records",
    "1 if that check rests on records of earlier checks, 0 if it read everything itself.",
    ("snapshot",),
)
SNAPSHOT_REREAD = Metric(
    "cutline_snapshot_reread_timestamp_seconds",
    "Time since which a check has read every object of a snapshot, up to the increment that was checked, for the newest"
    " 20 snapshots.",
    ("snapshot",),
)
CHECKED_CUT = Metric(
    "cutline_newest_checked_cut_timestamp_seconds",
    "Time of the newest cut with rows that was read by a check of everything in its snapshot that found nothing wrong.",
)
ABSENT_COPY = Metric(
    "cutline_absent_copy",
    "1 if the newest cut leaves out the copy of this standby, else 0.",
    ("node",),
)
COPYING_BYTES = Metric(
    "cutline_copying_bytes",
    "Bytes of a standby's tables that were copied in the background by the newest cut; only while it is being copied.",
    ("node",),
)
COPYING_BYTES_WANTED = Metric(
    "cutline_copying_bytes_wanted",
    "Bytes of all tables of a standby that is being copied in the background.",
    ("node",),
)
GAPS = Metric(
    "cutline_gaps",
    "Number of gaps in the snapshot of the newest cut: a primary was copied again, and no time between that increment"
    " and the restore point before it can be restored.",
)
NEWEST_CUT = Metric(
    "cutline_newest_cut_timestamp_seconds",
    "Time of the newest cut with rows whose snapshot is not broken, without cuts in the future. A restore loses all"
    " later commits.",
)
MAX_AGE = Metric(
    "cutline_max_age_seconds", "Limit max_age on the age of the newest restore point; absent if none is set."
)
QUOTA = Metric("cutline_quota_bytes", "Quota for the size of all snapshots; absent if none is set.")
CUT_SECONDS = Metric(
    "cutline_newest_cut_seconds", "Duration of the newest cut, from the first start marker to the last finish marker."
)
CUT_RETRIES = Metric(
    "cutline_newest_cut_retries", "Number of times that the newest cut was retried because an attempt was inconsistent."
)
SAFE_TIME = Metric(
    "cutline_safe_timestamp_seconds",
    "Safe time of the newest cut: the cut includes every earlier commit of every node.",
)
NODE_LAST_COMMIT = Metric(
    "cutline_node_last_commit_timestamp_seconds",
    "Commit time of the newest transaction on this primary in the newest cut, by the primary's clock.",
    ("node",),
)
CLOCK_SKEW = Metric("cutline_clock_skew_seconds", "Largest difference between the primaries' clocks at the newest cut.")
COPY_NEWEST_CUT = Metric(
    "cutline_copy_newest_cut_timestamp_seconds",
    "Time of the newest cut in this second store, according to the last copies.",
    ("store",),
)
COPY_BEHIND = Metric(
    "cutline_copy_restore_points_behind",
    "Restore points that this second store lacks, of the snapshots that were copied there.",
    ("store",),
)

OPEN_OPERATIONS = Metric(
    "cutline_open_operations",
    "Operations without an outcome: running, publishing, unfinished or dead.",
    ("kind", "state"),
)
HISTORY_WINDOW = Metric(
    "cutline_history_window_seconds",
    "Period covered by cutline_ended_operations: a day, or less if there were many operations.",
)
ENDED = Metric(
    "cutline_ended_operations",
    "Operations that ended within the window, by exit code (`unknown` if settled after the process had died).",
    ("kind", "code"),
)
LAST_CODE = Metric(
    "cutline_last_exit_code", "Exit code of the operation of this kind that ended last, if known.", ("kind",)
)
SUCCESS = Metric(
    "cutline_last_success_timestamp_seconds",
    "Time at which the last successful operation of this kind ended.",
    ("kind",),
)
SUCCESS_SECONDS = Metric(
    "cutline_last_success_seconds", "Duration of the last successful operation of this kind.", ("kind",)
)
SUCCESS_BYTES = Metric(
    "cutline_last_success_bytes",
    "Bytes that the last successful operation stored, loaded, compared or removed.",
    ("kind",),
)
SUCCESS_OBJECTS = Metric(
    "cutline_last_success_objects", "Objects that the last successful operation stored, compared or removed.", ("kind",)
)
SUCCESS_ROWS = Metric(
    "cutline_last_success_rows", "Rows that the last successful operation copied, loaded or compared.", ("kind",)
)
SUCCESS_CHANGES = Metric(
    "cutline_last_success_changes", "Changes that the last successful operation archived or compared.", ("kind",)
)
SUCCESS_TRANSACTIONS = Metric(
    "cutline_last_success_transactions",
    "Transactions that the last successful operation added (restore: those of the increments; check: global).",
    ("kind",),
)
SUCCESS_RETRIES = Metric(
    "cutline_last_success_retries",
    "Number of times that cuts were retried in the last successful create of this kind.",
    ("kind",),
)
RESTORE_STEP = Metric(
    "cutline_last_restore_step_seconds",
    "Duration of a step of the last restore that loaded all rows itself; WAL is folded in `fold changes`.",
    ("step",),
)
RESTORE_CHANGES = Metric(
    "cutline_last_restore_changes",
    "Changes from WAL folded by the last restore that loaded all rows itself.",
)

WATCH_ACTIVE = Metric(
    "cutline_watch_active", "1 if this `watch` starts the operations, 0 if it is standing by or waiting."
)
WATCH_NEXT = Metric(
    "cutline_watch_next_timestamp_seconds",
    "Time at which `watch` will next start this task according to its schedule and `[limits] hours`.",
    ("kind",),
)
WATCH_FAILURES = Metric(
    "cutline_watch_task_failures",
    "Consecutive failures of this task of `watch`; for kind `watch`, those of `watch` itself.",
    ("kind",),
)

COMMAND_END = Metric(
    "cutline_command_end_timestamp_seconds", "Time at which the command that wrote this file ended.", ("command",)
)
COMMAND_SECONDS = Metric("cutline_command_seconds", "Duration of the command that wrote this file.", ("command",))
COMMAND_CODE = Metric(
    "cutline_command_exit_code",
    "Exit code of the command that wrote this file, even if the command was refused.",
    ("command",),
)
