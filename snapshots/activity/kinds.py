"""What kind of operation one is, as metrics and reports name it: its command, or the form of a create or restore."""

from __future__ import annotations

from cutline.snapshots.records.operation_records import Intent

FULL, INCREMENT, ONLY_CUT, RESTORE, DRILL = "full", "increment", "only-cut", "restore", "drill"


def operation_kind(command: str, increment: int | None, intent: Intent | None) -> str:
    """The kind of an operation of `command`, which is any text of a store.

    An early intent does not say that its create is without rows: it counts as a full snapshot.
    """
    if command == "create":
        if increment:
            return INCREMENT
        return ONLY_CUT if intent is not None and intent.only_cut is True else FULL
    return DRILL if intent is not None and intent.is_drill else command
