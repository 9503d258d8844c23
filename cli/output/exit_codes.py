"""The exit codes and their meanings: the one table, printed by `--help` and enforced by the tests.

A SnapshotError carries its code as `exit_code`. No command may exit with a code that is not in this table.
"""

from __future__ import annotations

DONE = 0
CONFLICTS = 1
USAGE = 2
REFUSED = 3
INCONCLUSIVE = 4
INDETERMINATE = 5
UNREACHABLE = 6
BUSY = 7
CANCELLED = 8
INCONSISTENT_CUT = 9
DDL_REFUSED = 10
UNWRITTEN = 11
BUG = 70
INTERRUPTED = 130

MEANINGS: dict[int, str] = {
    DONE: "done; for check: everything compared, no conflicts",
    CONFLICTS: "check found conflicts, or an assertion failed in a drill",
    USAGE: "usage: arguments or fleet.toml",
    REFUSED: "refused: a precondition does not hold, and nothing was changed; or the store refused to delete objects",
    INCONCLUSIVE: "check or drill was inconclusive: something was skipped, or nothing was there to compare or to ask",
    INDETERMINATE: "indeterminate: it is not known whether the commit was stored; the next create, delete, prune or gc"
    " settles it",
    UNREACHABLE: "a node or the store can't be reached, or a node can't do its part now: its disk is full, say; or the"
    " command or an executor gets no more memory, threads or open files",
    BUSY: "another operation is running",
    CANCELLED: "cancelled from elsewhere, or by SIGTERM or SIGHUP",
    INCONSISTENT_CUT: "the cut stayed inconsistent after all retries",
    DDL_REFUSED: "restored, but the target refused some DDL statements; the databases get their names only"
    " with --allow-refused-ddl",
    UNWRITTEN: "done, but the result could not be written",
    BUG: "a bug: traceback kept in a file whose name is printed",
    INTERRUPTED: "stopped by Ctrl-C",
}
