"""The metrics: their names, labels and meanings. docs/monitoring.md lists them from here.

Names and units are by Prometheus's conventions. All have the label `fleet` besides their own. The values of a label are
few: names that others may choose freely, such as those of snapshots, are in none but of the newest.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutline.snapshots.operations.ended_operations import DRILL, FULL, INCREMENT, ONLY_CUT, RESTORE


@dataclass(frozen=True, slots=True)
class Metric:
    """A gauge. `labels` are its own, besides `fleet`."""

    name: str
    help: str
    labels: tuple[str, ...] = ()

    def of(self, value: float, *labels: str) -> Sample:
        """A sample with these values of the metric's labels; raise ValueError if they are more or fewer."""
        if len(labels) != len(self.labels):
            raise ValueError(f"{self.name} has the labels {self.labels}, not {labels}")
        return Sample(self, float(value), labels)


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()


FLEET = "fleet"
# The label `kind`, besides those of snapshots.operations.ended_operations. Other kinds in a store are shown as "other".
CHECK, DELETE, PRUNE, GC, WATCH, OTHER = "check", "delete", "prune", "gc", "watch", "other"
# The label `role`, as fleet.toml has it.
PRIMARY, STANDBY = "primary", "standby"
KINDS = (FULL, INCREMENT, ONLY_CUT, RESTORE, DRILL, CHECK, DELETE, PRUNE, GC, WATCH, OTHER)
# The steps of a restore; the changes of the WAL are folded in one of them.
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

BUILD_INFO = Metric("cutline_build_info", "1; the version of Cutline that has gathered this.", ("version",))
GATHERED = Metric("cutline_gathered_timestamp_seconds", "When all of this was gathered.")
GATHERING = Metric("cutline_gathering_seconds", "How long gathering it took.")
STORE_UP = Metric(
    "cutline_store_up", "Whether the store answered in time, and could be read: 1 or 0. If 0, its metrics are absent."
)

NODE_UP = Metric(
    "cutline_node_up",
    "Whether the node answered in time: 1 or 0. If 0, its other metrics are absent.",
    ("node", "role"),
)
NODE_IN_RECOVERY = Metric("cutline_node_in_recovery", "Whether the node is a standby now: 1 or 0.", ("node",))
SLOT_LAG = Metric(
    "cutline_node_slot_lag_bytes",
    "WAL between the position that the chain's slot has confirmed and the node's current one.",
    ("node", "slot"),
)
RETAINED = Metric("cutline_node_retained_wal_bytes", "WAL that the node retains for the slot.", ("node", "slot"))
RETAINED_LIMIT = Metric(
    "cutline_node_retained_wal_limit_bytes", "max_retained_wal: past it the chain is given up.", ("node",)
)
ARCHIVE_LAG = Metric(
    "cutline_node_archive_lag_bytes",
    "WAL between the newest position in the store, by any commit, and the node's current one.",
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

SNAPSHOTS = Metric("cutline_snapshots", "Snapshots in the store, by state as `list` has it.", ("state",))
DAMAGED_MARKS = Metric(
    "cutline_damaged_marks",
    "Snapshots that can be restored, but get no more increments, as one of their marks can't be read.",
)
MISSING_POINTS = Metric(
    "cutline_missing_restore_points",
    "Full snapshots and increments that were committed, and whose commit files are gone from the store.",
)
STANDING_CONFLICTS = Metric(
    "cutline_snapshots_with_conflicts",
    "Snapshots with conflicts that a check has found, and no later full check has found the same points valid.",
)
RESTORE_POINTS = Metric("cutline_restore_points", "Full snapshots and increments in the store, cuts without rows too.")
COMMITTED_BYTES = Metric("cutline_committed_bytes", "Size of all that the commits in the store list.")
SNAPSHOT_BYTES = Metric(
    "cutline_snapshot_bytes", "Size of a snapshot with its increments; of the newest 20.", ("snapshot",)
)
SNAPSHOT_INCREMENTS = Metric(
    "cutline_snapshot_increments", "Increments of a snapshot; of the newest 20.", ("snapshot",)
)
NEWEST_CUT = Metric(
    "cutline_newest_cut_timestamp_seconds",
    "When the newest cut with rows, in no broken snapshot, was made. A restore loses later commits: the least RPO.",
)
CUT_SECONDS = Metric(
    "cutline_newest_cut_seconds", "How long the newest cut took: from the first start marker to the last finish marker."
)
CUT_RETRIES = Metric("cutline_newest_cut_retries", "How often the newest cut was tried again, as it was inconsistent.")
SAFE_TIME = Metric(
    "cutline_safe_timestamp_seconds", "The safe time of the newest cut: it has every earlier commit of every node."
)
NODE_LAST_COMMIT = Metric(
    "cutline_node_last_commit_timestamp_seconds",
    "When the newest transaction of the newest cut was committed on this primary, by its own clock.",
    ("node",),
)
CLOCK_SKEW = Metric(
    "cutline_clock_skew_seconds", "By how much the primaries' clocks differed at most, at the newest cut."
)

OPEN_OPERATIONS = Metric(
    "cutline_open_operations", "Operations without an outcome: running, publishing or dead.", ("kind", "state")
)
HISTORY_WINDOW = Metric(
    "cutline_history_window_seconds",
    "How far back cutline_ended_operations reaches: a day, or less if there were many.",
)
ENDED = Metric(
    "cutline_ended_operations",
    "Operations that ended within the window, by exit code; `unknown`: they were settled after their process had died.",
    ("kind", "code"),
)
LAST_CODE = Metric(
    "cutline_last_exit_code", "Exit code of the last operation of this kind that ended, if it is known.", ("kind",)
)
SUCCESS = Metric(
    "cutline_last_success_timestamp_seconds", "When the last operation of this kind that succeeded ended.", ("kind",)
)
SUCCESS_SECONDS = Metric(
    "cutline_last_success_seconds", "Duration of the last operation of this kind that succeeded.", ("kind",)
)
SUCCESS_BYTES = Metric(
    "cutline_last_success_bytes", "Bytes that the last success stored, loaded, compared or removed.", ("kind",)
)
SUCCESS_OBJECTS = Metric(
    "cutline_last_success_objects", "Objects that the last success stored, compared or removed.", ("kind",)
)
SUCCESS_ROWS = Metric("cutline_last_success_rows", "Rows that the last success copied, loaded or compared.", ("kind",))
SUCCESS_CHANGES = Metric(
    "cutline_last_success_changes", "Changes that the last success archived or compared.", ("kind",)
)
SUCCESS_TRANSACTIONS = Metric(
    "cutline_last_success_transactions",
    "Transactions of the last success: added; of the increments, for a restore; global, for a check.",
    ("kind",),
)
SUCCESS_RETRIES = Metric(
    "cutline_last_success_retries", "How often the last successful create of this kind tried a cut again.", ("kind",)
)
RESTORE_STEP = Metric(
    "cutline_last_restore_step_seconds",
    "Duration of a step of the last restore that loaded all rows itself; WAL is folded in `fold changes`.",
    ("step",),
)
RESTORE_CHANGES = Metric(
    "cutline_last_restore_changes",
    "Changes of the WAL that were folded by the last restore that loaded all rows itself.",
)

WATCH_ACTIVE = Metric(
    "cutline_watch_active", "Whether this `watch` begins the operations: 1; or 0: it stands by or waits."
)
WATCH_NEXT = Metric(
    "cutline_watch_next_timestamp_seconds", "When `watch` begins this task next, by its schedule.", ("kind",)
)
WATCH_FAILURES = Metric(
    "cutline_watch_task_failures",
    "Consecutive failures of this task of `watch`; of kind `watch`: how often it could not work at all.",
    ("kind",),
)

COMMAND_END = Metric(
    "cutline_command_end_timestamp_seconds", "When the command that wrote this file ended.", ("command",)
)
COMMAND_SECONDS = Metric("cutline_command_seconds", "Duration of the command that wrote this file.", ("command",))
COMMAND_CODE = Metric(
    "cutline_command_exit_code", "Exit code of the command that wrote this file, also if it was refused.", ("command",)
)

METRICS: tuple[Metric, ...] = tuple(value for value in list(vars().values()) if isinstance(value, Metric))
