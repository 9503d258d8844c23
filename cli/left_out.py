"""What a snapshot does not hold, as a person reads it: a line per kind, with names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cli.format import count_text
from fleet.left_out import LeftOut, LeftOutKind

NAMES_SHOWN_MAX = 8
# One and several of a kind, and what a restore makes of them.
CALLED: Mapping[LeftOutKind, tuple[str, str, str]] = {
    LeftOutKind.UNLOGGED_TABLE: ("unlogged table", "unlogged tables", "empty when restored"),
    LeftOutKind.FOREIGN_TABLE: ("foreign table", "foreign tables", "only the definition is restored"),
    LeftOutKind.LARGE_OBJECTS: ("large object", "large objects", "not restored"),
    LeftOutKind.EXCLUDED_TABLE: ("excluded table", "excluded tables", "empty when restored"),
    LeftOutKind.EXTENSION_TABLE: ("table of an extension", "tables of extensions", "as the extension makes it"),
    LeftOutKind.MATERIALIZED_VIEW: ("materialized view", "materialized views", "unpopulated when restored"),
    LeftOutKind.UNLOGGED_SEQUENCE: ("unlogged sequence", "unlogged sequences", "at the start when restored"),
    LeftOutKind.NEW_SEQUENCE: ("new sequence", "new sequences", "not restored"),
    LeftOutKind.SUBSCRIPTION: ("subscription", "subscriptions", "not restored"),
    LeftOutKind.DATABASE_SETTING: ("database setting", "database settings", "not restored"),
    LeftOutKind.DATABASE_PRIVILEGES: ("database's privileges", "databases' privileges", "not restored"),
    LeftOutKind.DATABASE_OWNER: ("database's owner", "databases' owners", "not restored"),
    LeftOutKind.DATABASE_COMMENT: ("database's comment", "databases' comments", "not restored"),
}


def left_out_lines(left_out: Iterable[LeftOut]) -> list[str]:
    """A line per kind; of an append-only table it is the updates and deletes that are left out."""
    by_kind: dict[LeftOutKind, list[LeftOut]] = {}
    for one in left_out:
        by_kind.setdefault(one.kind, []).append(one)
    lines = [_line(kind, by_kind[kind]) for kind in CALLED if kind in by_kind]
    return lines + append_only_lines(one.name for one in by_kind.get(LeftOutKind.APPEND_ONLY_TABLE, []))


def append_only_lines(names: Iterable[str]) -> list[str]:
    """The warning of append-only tables, if there are any, as every output has it."""
    found = sorted(set(names))
    if not found:
        return []
    return [f"warning: inserts and truncates only, updates and deletes are not followed: {_shown(found)}"]


def _line(kind: LeftOutKind, found: list[LeftOut]) -> str:
    one, several, outcome = CALLED[kind]
    if kind == LeftOutKind.LARGE_OBJECTS:
        count = sum(each.count for each in found)
        names = [f"{count_text(each.count)} on {each.node}" for each in found]
    else:
        nodes: dict[str, list[str]] = {}
        for each in found:
            nodes.setdefault(each.name, []).append(each.node)
        count = len(nodes)
        names = [f"{name} on {', '.join(where)}" for name, where in nodes.items()]
    called = one if count == 1 else several
    return f"not in the snapshot: {count_text(count)} {called} ({outcome}): {_shown(names)}"


def _shown(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN_MAX
    return "; ".join(names[:NAMES_SHOWN_MAX]) + (f" and {count_text(more)} more" if more > 0 else "")
