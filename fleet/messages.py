"""What several messages share: hints that name commands as they can be typed, and long lists shortened."""

from __future__ import annotations

from collections.abc import Iterable

# `init` first: what ends a chain often removes tables from the publications as well. It is safe to repeat.
NEW_CHAIN = "run: snapshot init   then take a new full snapshot under another name: snapshot create NAME"
# While a restore publishes, a database has another name, or accepts no connections.
UNFINISHED_RESTORE = (
    "an unfinished restore may have closed the database; the command that ends it is named by: snapshot list"
)
# After a command that ends or repeats a restore.
SAME_TARGET = "with the same --to FILE, if it had one"
DRILL_COMMAND = "snapshot drill"


def restore_command(snapshot: str, nodes: Iterable[str] = ()) -> str:
    """The command that restores the snapshot, of `nodes` alone if given."""
    return _on_nodes(f"snapshot restore {snapshot}", nodes)


def resume_command(snapshot: str, nodes: Iterable[str] = ()) -> str:
    """The command that finishes an unfinished restore."""
    return _on_nodes(f"snapshot restore-resume {snapshot}", nodes)


def abandon_command(snapshot: str, nodes: Iterable[str] = ()) -> str:
    """The command that undoes an unfinished restore."""
    return _on_nodes(f"snapshot restore-abandon {snapshot}", nodes)


def discard_command(nodes: Iterable[str] = ()) -> str:
    """The command that drops the databases that restores have put aside."""
    return _on_nodes("snapshot restore-discard", nodes)


def _on_nodes(command: str, nodes: Iterable[str]) -> str:
    return " ".join([command, *(f"--node {node}" for node in nodes)])


def list_some(names: Iterable[str], most: int) -> str:
    """The first `most` names: `a, b and 3 more`."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def join_some(texts: Iterable[str], most: int) -> str:
    """The first `most` texts, which may have commas: `a; b; and 3 more`."""
    listed = list(texts)
    more = [f"and {len(listed) - most} more"] if len(listed) > most else []
    return "; ".join([*listed[:most], *more])
