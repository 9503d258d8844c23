"""Descriptions of the items that a snapshot leaves out: one line per kind, with names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cutline.cli.output.tables import count_text
from cutline.fleet.messages import NODES_NAMED_MAX, list_some
from cutline.nodes.left_out import COUNTED, WHY, LeftOut, LeftOutKind

NAMES_SHOWN_MAX = 8


class KindText(NamedTuple):
    """The singular and plural of a kind, and its effect on a restore."""

    singular: str
    plural: str
    outcome: str


KINDS: Mapping[LeftOutKind, KindText] = {
    LeftOutKind.UNLOGGED_TABLE: KindText("unlogged table", "unlogged tables", "empty when restored"),
    LeftOutKind.FOREIGN_TABLE: KindText("foreign table", "foreign tables", "only the definition is restored"),
    LeftOutKind.TEMPORARY_TABLES: KindText("temporary table", "temporary tables", "session-local, not restored"),
    LeftOutKind.LARGE_OBJECTS: KindText("large object", "large objects", "not restored"),
    LeftOutKind.EXCLUDED_TABLE: KindText("excluded table", "excluded tables", "empty when restored"),
    LeftOutKind.EXTENSION_TABLE: KindText(
        "extension table", "extension tables", "restored as CREATE EXTENSION creates them"
    ),
    LeftOutKind.UNLOGGED_SEQUENCE: KindText(
        "unlogged sequence", "unlogged sequences", "restart at their initial value"
    ),
    LeftOutKind.SUBSCRIPTION: KindText("subscription", "subscriptions", "not restored"),
    LeftOutKind.USER_MAPPING: KindText("user mapping", "user mappings", "without options when restored"),
}
# Texts for the kinds in WARNINGS that stay the same throughout a chain.
PARTIAL: Mapping[LeftOutKind, KindText] = {
    LeftOutKind.APPEND_ONLY_TABLE: KindText("append-only table", "append-only tables", "without updates and deletes"),
    LeftOutKind.LARGE_OBJECTS_OF_FULL: KindText("large object", "large objects", "as of the full snapshot"),
    LeftOutKind.STANDBY_COPY: KindText("standby", "standbys", "without a copy to compare"),
    LeftOutKind.PENDING_DETACH: KindText(
        "partition whose detachment was interrupted",
        "partitions whose detachment was interrupted",
        "attached when restored",
    ),
    LeftOutKind.EXTENSION_ROWS: KindText(
        "extension table that was not read",
        "extension tables that were not read",
        "restored as CREATE EXTENSION creates them",
    ),
}
DETACHED = "partitions whose detachment was interrupted are restored attached (show prints how to finish it)"
LARGE_OBJECTS_REMEDY = (
    "a full snapshot includes them with --large-objects, or with large_objects = true under [groups] in fleet.toml"
)
REMEDY = "after ALTER TABLE … REPLICA IDENTITY FULL, the next increment copies the table again and captures all changes"
# Items that are restored but may differ from the source.
WARNINGS: Mapping[LeftOutKind, str] = {
    LeftOutKind.APPEND_ONLY_TABLE: f"only inserts and truncates are captured, not updates and deletes ({REMEDY})",
    LeftOutKind.UNCOUNTED_TABLE: "it is unknown whether rows of append-only tables were updated or deleted:"
    f" PostgreSQL's counters were reset or are disabled ({REMEDY})",
    LeftOutKind.LARGE_OBJECTS_OF_FULL: "large objects as of the full snapshot, without the changes since",
    LeftOutKind.STANDBY_COPY: "standbys older than PostgreSQL 16 can't decode WAL: check has no copy to compare",
    LeftOutKind.PENDING_DETACH: DETACHED,
    LeftOutKind.ABSENT_COPY: "copies of standbys are left out, so check can't compare them",
    LeftOutKind.EXTENSION_ROWS: "rows of extension tables were not read: they are restored as CREATE EXTENSION"
    " creates them (--json lists the reasons; exclude the tables in [groups], or give the role BYPASSRLS if policies"
    " hide rows)",
}


def left_out_lines(left_out: Iterable[LeftOut]) -> list[str]:
    """Return one line per kind, including append-only tables, whose updates and deletes are left out."""
    left_out = list(left_out)
    by_kind = _by_kind(left_out)
    return [_line(kind, by_kind[kind]) for kind in KINDS if kind in by_kind] + warning_lines(left_out)


def left_out_since(left_out: Iterable[LeftOut], before: Iterable[LeftOut], snapshot: str) -> list[str]:
    """Return `left_out_lines` for an increment; items that were already left out `before` are only counted.

    An item is named only in the first commit that leaves it out, because somebody reads these lines every night.
    """
    known = {(out.node, out.kind, out.name) for out in before}
    brief = {**KINDS, **PARTIAL}
    old, new = list[LeftOut](), list[LeftOut]()
    for out in left_out:
        (old if (out.node, out.kind, out.name) in known and out.kind in brief else new).append(out)
    lines = left_out_lines(new)
    by_kind = _by_kind(old)
    counts = [
        f"{_quantity(kind, text, by_kind[kind])} ({text.outcome})" for kind, text in brief.items() if kind in by_kind
    ]
    return [*lines, f"left out as before: {', '.join(counts)}; see: snapshot show {snapshot}"] if counts else lines


def warning_lines(left_out: Iterable[LeftOut], *, remedy: bool = True) -> list[str]:
    """Return one line for each kind of object that is restored but may differ from the source."""
    by_kind = _by_kind(left_out)
    append_only = sorted({out.name for out in by_kind.get(LeftOutKind.APPEND_ONLY_TABLE, [])})
    texts = {kind: text if remedy else text.replace(f" ({REMEDY})", "") for kind, text in WARNINGS.items()}
    lines = [f"warning: {texts[LeftOutKind.APPEND_ONLY_TABLE]}: {_shorten(append_only)}"] if append_only else []
    return lines + [
        f"warning: {text}: {_shorten(_names(kind, by_kind[kind]))}"
        for kind, text in texts.items()
        if kind in by_kind and kind != LeftOutKind.APPEND_ONLY_TABLE
    ]


def warnings_of_several(left_out: Mapping[str, Iterable[LeftOut]]) -> list[str]:
    """Return the warnings about snapshots, keyed by name: each line once, with the snapshots that it concerns."""
    snapshots: dict[str, list[str]] = {}
    for name, found in left_out.items():
        for line in warning_lines(found, remedy=False):
            snapshots.setdefault(line, []).append(name)
    return [f"{line} (in {_shorten(names)})" for line, names in snapshots.items()]


def _by_kind(left_out: Iterable[LeftOut]) -> dict[LeftOutKind, list[LeftOut]]:
    by_kind: dict[LeftOutKind, list[LeftOut]] = {}
    for out in left_out:
        by_kind.setdefault(out.kind, []).append(out)
    return by_kind


def _names(kind: LeftOutKind, found: list[LeftOut]) -> list[str]:
    if kind in COUNTED:
        return [f"{count_text(each.count)} on {each.node}" for each in found]
    if kind == LeftOutKind.ABSENT_COPY:
        return [f"{each.name} ({each.why.removeprefix(WHY[kind].format('')).lstrip(': ')})" for each in found]
    nodes: dict[str, list[str]] = {}
    for each in found:
        nodes.setdefault(each.name, []).append(each.node)
    return [f"{name} on {list_some(where, NODES_NAMED_MAX)}" for name, where in nodes.items()]


def _line(kind: LeftOutKind, found: list[LeftOut]) -> str:
    text = KINDS[kind]
    names = _shorten(_names(kind, found))
    remedy = f"; {LARGE_OBJECTS_REMEDY}" if kind is LeftOutKind.LARGE_OBJECTS else ""
    return f"not in the snapshot: {_quantity(kind, text, found)} ({text.outcome}): {names}{remedy}"


def _quantity(kind: LeftOutKind, text: KindText, found: list[LeftOut]) -> str:
    count = sum(each.count for each in found) if kind in COUNTED else len({each.name for each in found})
    return f"{count_text(count)} {text.singular if count == 1 else text.plural}"


def _shorten(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN_MAX
    return "; ".join(names[:NAMES_SHOWN_MAX]) + (f" and {count_text(more)} more" if more > 0 else "")
