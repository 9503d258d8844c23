"""What a snapshot does not hold, as a person reads it: a line per kind, with names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cli.output.format import count_text
from fleet.tables.left_out import COUNTED, LeftOut, LeftOutKind

NAMES_SHOWN_MAX = 8
# One and several of a kind, and what a restore makes of them.
CALLED: Mapping[LeftOutKind, tuple[str, str, str]] = {
    LeftOutKind.UNLOGGED_TABLE: ("unlogged table", "unlogged tables", "empty when restored"),
    LeftOutKind.FOREIGN_TABLE: ("foreign table", "foreign tables", "only the definition is restored"),
    LeftOutKind.TEMPORARY_TABLES: ("temporary table", "temporary tables", "of sessions, not restored"),
    LeftOutKind.LARGE_OBJECTS: ("large object", "large objects", "not restored"),
    LeftOutKind.EXCLUDED_TABLE: ("excluded table", "excluded tables", "empty when restored"),
    LeftOutKind.EXTENSION_TABLE: ("table of an extension", "tables of extensions", "as the extension makes it"),
    LeftOutKind.UNLOGGED_SEQUENCE: ("unlogged sequence", "unlogged sequences", "at the start when restored"),
    LeftOutKind.SUBSCRIPTION: ("subscription", "subscriptions", "not restored"),
    LeftOutKind.DATABASE_SETTING: ("database setting", "database settings", "not restored"),
    LeftOutKind.DATABASE_PRIVILEGES: ("database's privileges", "databases' privileges", "not restored"),
    LeftOutKind.DATABASE_OWNER: ("database's owner", "databases' owners", "not restored"),
    LeftOutKind.DATABASE_COMMENT: ("database's comment", "databases' comments", "not restored"),
    LeftOutKind.DATABASE_TABLESPACE: ("database's tablespace", "databases' tablespaces", "not restored"),
    LeftOutKind.USER_MAPPING: ("user mapping", "user mappings", "without options when restored"),
}
# What comes back and may not be what it was.
WARNINGS: Mapping[LeftOutKind, str] = {
    LeftOutKind.APPEND_ONLY_TABLE: "inserts and truncates only, updates and deletes are not followed",
    LeftOutKind.UNCOUNTED_TABLE: "whether rows of append-only tables were updated or deleted is not known, PostgreSQL's"
    " counters were reset or do not count",
    LeftOutKind.LARGE_OBJECTS_OF_FULL: "large objects as they were at the full snapshot, increments do not follow them",
    LeftOutKind.STANDBY_COPY: "no copy of standbys below PostgreSQL 16, which do not decode; check has none to compare",
}


def left_out_lines(left_out: Iterable[LeftOut]) -> list[str]:
    """A line per kind; of an append-only table it is the updates and deletes that are left out."""
    left_out = list(left_out)
    by_kind = _by_kind(left_out)
    return [_line(kind, by_kind[kind]) for kind in CALLED if kind in by_kind] + warning_lines(left_out)


def warning_lines(left_out: Iterable[LeftOut]) -> list[str]:
    """A line per kind of what comes back and may not be what it was, as every output has it."""
    by_kind = _by_kind(left_out)
    append_only = sorted({one.name for one in by_kind.get(LeftOutKind.APPEND_ONLY_TABLE, [])})
    lines = [f"warning: {WARNINGS[LeftOutKind.APPEND_ONLY_TABLE]}: {_shorten(append_only)}"] if append_only else []
    return lines + [
        f"warning: {what}: {_shorten(_names(kind, by_kind[kind]))}"
        for kind, what in WARNINGS.items()
        if kind in by_kind and kind != LeftOutKind.APPEND_ONLY_TABLE
    ]


def warnings_of_several(left_out: Mapping[str, Iterable[LeftOut]]) -> list[str]:
    """The warnings of several snapshots, by name: each line once, with the snapshots that it is of."""
    of: dict[str, list[str]] = {}
    for name, found in left_out.items():
        for line in warning_lines(found):
            of.setdefault(line, []).append(name)
    return [f"{line} (in {_shorten(names)})" for line, names in of.items()]


def _by_kind(left_out: Iterable[LeftOut]) -> dict[LeftOutKind, list[LeftOut]]:
    by_kind: dict[LeftOutKind, list[LeftOut]] = {}
    for one in left_out:
        by_kind.setdefault(one.kind, []).append(one)
    return by_kind


def _names(kind: LeftOutKind, found: list[LeftOut]) -> list[str]:
    if kind in COUNTED:
        return [f"{count_text(each.count)} on {each.node}" for each in found]
    nodes: dict[str, list[str]] = {}
    for each in found:
        nodes.setdefault(each.name, []).append(each.node)
    return [f"{name} on {', '.join(where)}" for name, where in nodes.items()]


def _line(kind: LeftOutKind, found: list[LeftOut]) -> str:
    one, several, outcome = CALLED[kind]
    names = _names(kind, found)
    count = sum(each.count for each in found) if kind in COUNTED else len(names)
    called = one if count == 1 else several
    return f"not in the snapshot: {count_text(count)} {called} ({outcome}): {_shorten(names)}"


def _shorten(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN_MAX
    return "; ".join(names[:NAMES_SHOWN_MAX]) + (f" and {count_text(more)} more" if more > 0 else "")
