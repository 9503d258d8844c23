"""Name the patterns for tables that match no table on any shard: probably a typing error, and never reported otherwise.

A pattern of `include` that matches nothing leaves out what it should include, and one of `exclude` copies what it
should leave out. On some shards a pattern may match nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from cutline.fleet.config import GroupRules
from cutline.fleet.messages import list_some
from cutline.fleet.progress import Progress
from cutline.fleet.table_names import ANY, TABLE_NAME, is_matching, similar_names
from cutline.nodes.encodings import fetch_texts
from cutline.nodes.sessions import Sessions, in_parallel

# Patterns select tables and extensions' tables, and may name tables that are always left out. A partitioned table or a
# view has no rows of its own.
NAMES_QUERY = f"""
SELECT {TABLE_NAME}, c.relkind::text, c.oid::bigint,
       CASE WHEN c.relispartition THEN pg_partition_root(c.oid)::oid::bigint END
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'f', 'p', 'v', 'm') AND c.relpersistence <> 't'
   AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
 ORDER BY 1
"""
PARTITIONED, TABLES = "p", ("r", "f")
NAMED_MAX = 3
EFFECTS = {
    "include": "so it includes nothing",
    "exclude": "so it excludes nothing",
    "append_only": "so it has no effect",
}


class UnmatchedPattern(Struct, frozen=True):
    """A pattern that matches no table; `rule` is its list in [groups], and `similar` says what it may have meant.

    `option` is the option that gave it, "" if it is from fleet.toml.
    """

    rule: str
    pattern: str
    similar: str
    option: str = ""

    @property
    def text(self) -> str:
        """The warning."""
        similar = f" ({self.similar})" if self.similar else ""
        place = self.option or f"[groups] {self.rule}:"
        return f"{place} {self.pattern} matches no table on any shard, {EFFECTS[self.rule]}{similar}"


def find_unmatched(sessions: Sessions, rules: GroupRules, known: GroupRules | None = None) -> list[UnmatchedPattern]:
    """Return the patterns that match no table on any primary, without those that `known` has, too."""
    patterns = {
        rule: [
            pattern
            for pattern in dict.fromkeys(getattr(rules, rule))
            if pattern != ANY and (known is None or pattern not in getattr(known, rule))
        ]
        for rule in EFFECTS
    }
    if not any(patterns.values()):
        return []
    catalogs = in_parallel(lambda connection: fetch_texts(connection, NAMES_QUERY), sessions.primaries.values())
    relations = Relations()
    for rows in catalogs:
        relations.add(rows)
    return unmatched_of(patterns, relations)


class Relations(Struct, frozen=True):
    """The names of a fleet's tables and views, and those of the partitions of each partitioned table."""

    tables: dict[str, None] = field(default_factory=dict)
    views: dict[str, None] = field(default_factory=dict)
    partitions: dict[str, dict[str, None]] = field(default_factory=dict)

    def add(self, rows: Collection[tuple[Any, ...]]) -> None:
        """Add the rows that NAMES_QUERY returned on one node."""
        partitioned = {oid: name for name, kind, oid, _ in rows if kind == PARTITIONED}
        for name, kind, _, root in rows:
            if kind == PARTITIONED:
                self.partitions.setdefault(name, {})
            elif kind not in TABLES:
                self.views[name] = None
            else:
                self.tables[name] = None
                if root in partitioned:
                    self.partitions.setdefault(partitioned[root], {})[name] = None


def unmatched_of(patterns: Mapping[str, Collection[str]], relations: Relations) -> list[UnmatchedPattern]:
    """Return the patterns, keyed by rule, that match none of the tables."""
    return [
        UnmatchedPattern(rule, pattern, _similar_text(pattern, relations))
        for rule, some in patterns.items()
        for pattern in some
        if not any(is_matching(name, (pattern,)) for name in relations.tables)
    ]


def note_unmatched(
    sessions: Sessions,
    rules: GroupRules,
    progress: Progress,
    *,
    known: GroupRules | None = None,
    options: Mapping[str, tuple[str, Collection[str]]] = MappingProxyType({}),
) -> list[UnmatchedPattern]:
    """Report the patterns that `find_unmatched` finds, and return them.

    `options` are those that gave patterns, by rule: the option and its patterns.
    """
    found = list[UnmatchedPattern]()
    for pattern in find_unmatched(sessions, rules, known):
        option, given = options.get(pattern.rule, ("", ()))
        found.append(replace(pattern, option=option) if pattern.pattern in given else pattern)
    for pattern in found:
        progress.note(f"warning: {pattern.text}")
    return found


def _similar_text(pattern: str, relations: Relations) -> str:
    if roots := [name for name in relations.partitions if is_matching(name, (pattern,))]:
        partitions = list_some(relations.partitions[roots[0]], NAMED_MAX)
        return f"the rows of {roots[0]} are in its partitions" + (f": {partitions}" if partitions else "")
    if views := [name for name in relations.views if is_matching(name, (pattern,))]:
        return f"views have no rows of their own: {list_some(views, NAMED_MAX)}"
    return similar_names(pattern, relations.tables, NAMED_MAX)
