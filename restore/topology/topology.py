"""The topology of a restore: its sources, its targets, and the routes of the tables between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cutline.fleet.tables.groups import Group
from cutline.restore.routing.routes import RouteKind, parse_route
from cutline.restore.routing.table_routes import SourceRoutes, TableRoute, resolve_routes
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Sequence as StoredSequence


class ShownRoute(NamedTuple):
    """A table and its route, as reports have it."""

    table: str
    route: str


@dataclass(frozen=True, slots=True)
class Topology:
    """Rows of all `sources` go to `targets`, node ids in the order of the target's file; `routes` are by table name.

    DDL and settings are those of the first source.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    routes: Mapping[str, TableRoute]

    def routes_of(self, chain: Chain, source: str) -> SourceRoutes:
        """The routes by the group numbers of a source."""
        by_group = {
            group.number: self.routes[group.name] for group in chain.groups(source) if group.name in self.routes
        }
        return SourceRoutes(source, source == self.sources[0], self.targets, by_group)

    def sequences(self, chain: Chain) -> tuple[StoredSequence, ...]:
        """The sequences' values for every target: of several sources, the one furthest in the increment's direction."""
        furthest: dict[tuple[str, str], StoredSequence] = {}
        for source in self.sources:
            for one in chain.sequences(source):
                name = one.schema, one.name
                if name not in furthest or _reach(one) > _reach(furthest[name]):
                    furthest[name] = one
        return tuple(furthest.values())

    def shares(self, source: str, target: str) -> dict[str, float]:
        """The part of each table's rows of a source that a target gets, by name."""
        number, is_first = self.targets.index(target), source == self.sources[0]
        return {name: one.share(number, len(self.targets), is_first=is_first) for name, one in self.routes.items()}

    def shown(self, groups: Sequence[Group]) -> list[ShownRoute]:
        """The routes of the tables that are restored, in their order."""
        return [ShownRoute(group.name, self.routes[group.name].text) for group in groups]

    def remarks(self, chain: Chain, groups: Sequence[Group]) -> list[str]:
        """What becomes of the tables' rows and of the sequences, a line each; `groups` are those that are restored."""
        lines = [f"{' + '.join(self.sources)} go to {', '.join(self.targets)}"]
        several = len(self.sources) > 1
        if several:
            lines.append(
                f"settings and privileges of the database, and privileges of PostgreSQL's own objects, are those of"
                f" {self.sources[0]}"
            )
        if self.sequences(chain):
            what = "the value of the source that is furthest" if several else "the source's value"
            lines.append(f"sequences have on every target {what}")
        equal = [self.routes[one.name].table for one in groups if self.routes[one.name].kind is RouteKind.ALL]
        if equal and several:
            lines.append(f"rows taken from {self.sources[0]}, if equal on all sources: {', '.join(equal)}")
        added = [one.name for one in groups if one.is_multiset and one.name not in equal]
        if added and several:
            lines.append(f"rows of all sources added up, as there is no key: {', '.join(added)}")
        return lines


def _reach(one: StoredSequence) -> tuple[int, bool]:
    return (one.last_value if one.increment > 0 else -one.last_value), one.is_called


def plan_topology(
    sources: Sequence[str], targets: Sequence[str], groups: Sequence[Group], words: Sequence[str]
) -> Topology:
    """Resolve the routes that the user gave as `words`; `groups` are those of the first source that are restored.

    Raises UsageError.
    """
    found = resolve_routes(groups, [parse_route(word) for word in words], tuple(targets))
    return Topology(tuple(sources), tuple(targets), found)
