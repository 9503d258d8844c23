"""Parts of messages: hints with commands that can be typed, and shortened lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

# `init` comes first, because events that end a chain often remove tables from the publications as well. Repeating it is
# safe.
NEXT_COPIES = "take the next increment: it copies the node again"
NEW_CHAIN = "run: snapshot init   then take a new full snapshot under another name: snapshot create NAME"
FREE_SLOTS = "raise max_replication_slots, or drop slots that are no longer used"
# While a restore swaps databases, a database is renamed or accepts no connections.
UNFINISHED_RESTORE = (
    "an unfinished restore may have closed the database; to see the commands that finish or undo it, run: snapshot list"
)
# Shown after a command that ends or repeats a restore.
SAME_TARGET = "with the same --to FILE, if it had one"
DRILL_COMMAND = "snapshot drill"
# A restore fills in the snapshot, the increment and its own options, which tasks don't know (restore/run/loading.py).
CHECK_NAMED = "snapshot check NAME"
IN_STEPS = "restore the tables with --schema-only, change them by hand, then load the rows with --data-only"


def check_command(snapshot: str, increment: int) -> str:
    """Return the command that checks the snapshot up to the increment."""
    return f"snapshot check {snapshot} --increment {increment}"


def restore_command(snapshot: str, nodes: Iterable[str] = ()) -> str:
    """Return the command that restores the snapshot, or only `nodes` of it."""
    return _on_nodes(f"snapshot restore {snapshot}", nodes)


def resume_command(snapshot: str, nodes: Iterable[str] = ()) -> str:
    """Return the command that finishes an unfinished restore."""
    return _on_nodes(f"snapshot restore-resume {snapshot}", nodes)


def abandon_command(snapshot: str, nodes: Iterable[str] = ()) -> str:
    """Return the command that undoes an unfinished restore."""
    return _on_nodes(f"snapshot restore-abandon {snapshot}", nodes)


def discard_command(nodes: Iterable[str] = ()) -> str:
    """Return the command that drops the databases that restores have set aside."""
    return _on_nodes("snapshot restore-discard", nodes)


def _on_nodes(command: str, nodes: Iterable[str]) -> str:
    return " ".join([command, *(f"--node {node}" for node in nodes)])


# A fleet may have a thousand nodes; `--json` lists them all.
NODES_NAMED_MAX = 10


def name_nodes(nodes: Iterable[str]) -> str:
    """Return `node a`, `nodes a, b`, or the first NODES_NAMED_MAX nodes: `nodes a, b and 998 more`."""
    listed = list(nodes)
    return f"node{'s' if len(listed) > 1 else ''} {list_some(listed, NODES_NAMED_MAX)}"


def without_node(message: str, node: str) -> str:
    """Return a message about the node without the name at its beginning, for a line that names the node itself."""
    return message.removeprefix(f"node {node}: ")


def group_by_value(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the keys of each text, such as the nodes with the same problem."""
    grouped: dict[str, list[str]] = {}
    for key, text in texts.items():
        grouped.setdefault(text, []).append(key)
    return grouped


def unlisted_text(nodes: Sequence[str], slot: str, name: str) -> str:
    """Return what to do about slots that can't be dropped, because fleet.toml does not list their nodes."""
    return (
        f"{name_nodes(nodes)}: not in fleet.toml any more: if its server still runs, and is not listed under another"
        f" id, drop {slot} there, for which it keeps WAL: SELECT pg_drop_replication_slot('{name}')"
    )


def list_some(names: Iterable[str], most: int) -> str:
    """Join the first `most` names: `a, b and 3 more`."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def join_some(texts: Iterable[str], most: int) -> str:
    """Join the first `most` texts, which may contain commas: `a; b; and 3 more`."""
    listed = list(texts)
    more = [f"and {len(listed) - most} more"] if len(listed) > most else []
    return "; ".join([*listed[:most], *more])
