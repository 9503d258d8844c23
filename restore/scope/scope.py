"""The scope of a restore: which part of a snapshot is restored, and how roles are handled.

The records of restored databases contain the scope, so another process can continue with the same scope.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from cutline.fleet.record import Record
from cutline.fleet.table_names import is_matching, is_schema_named, table_name
from cutline.nodes.groups import Group
from cutline.storage.errors import UsageError


def choose_nodes(nodes: Iterable[str], primaries: Iterable[str], place: str) -> list[str]:
    """Return the primaries that `nodes` names, or all if it is empty; raise UsageError naming an unknown id."""
    wanted, primaries = set(nodes), list(primaries)
    if unknown := sorted(wanted - set(primaries)):
        raise UsageError(
            f"--node {', '.join(unknown)}: {place} has no such primary",
            hint=f"its primaries are: {', '.join(primaries)}",
            details={"nodes": unknown},
        )
    return [primary for primary in primaries if not wanted or primary in wanted]


def warn_of_nodes(nodes: Iterable[str], shards: Iterable[str]) -> list[str]:
    """Return a warning that only `nodes` of the snapshot's `shards` are restored, if these are not all of them."""
    chosen = set(nodes)
    others = sorted(set(shards) - chosen)
    if not chosen or not others:
        return []
    return [
        f"not restored: {', '.join(others)}; of transactions that span shards, only the part on"
        f" {', '.join(sorted(chosen))} is restored"
    ]


# This name stands for all roles; no actual role can have it.
PUBLIC_ROLE = "public"


class RoleChanges(Struct, frozen=True):
    """The role substitutions to make. All names are in the same form: either text, or raw as in DDL.

    With `no_owner`, all objects belong to `ours`, the restoring role, which also grants all privileges. In that case,
    `known` contains the roles that exist on the target; grants to other roles are left out.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    no_owner: bool = False
    ours: str = ""
    known: frozenset[str] = frozenset()

    def of(self, role: str) -> str:
        """Return the role in the restored database."""
        return self.names.get(role, role)

    def lacks(self, role: str) -> bool:
        """Whether privileges of `role` are left out because the target has no such role."""
        return self.no_owner and role != PUBLIC_ROLE and self.of(role) not in self.known


UNCHANGED = RoleChanges()


class TableMove(Record, frozen=True):
    """A table and its name in the restored database."""

    schema: str
    table: str
    to_schema: str
    to_table: str

    @property
    def label(self) -> str:
        """Both names, as in options and reports."""
        return f"{table_name(self.schema, self.table)}={table_name(self.to_schema, self.to_table)}"


class RestoreScope(Record, frozen=True, kw_only=True):
    """The part of a snapshot to restore; by default the whole snapshot, unchanged.

    `nodes`: only these shards. `schemas`: only rows from tables in these schemas. `schema_only`: the DDL without rows
    or sequence values. `data_only`: rows and sequence values, into existing tables. `no_owner`: all objects belong to
    the restoring role. `role_map`: pairs of a role and its replacement. `moves`: only rows from these tables, under new
    names. `analyze`: also collect planner statistics. `no_database_settings`: leave out the database's own properties.
    """

    nodes: tuple[str, ...] = ()
    schemas: tuple[str, ...] = ()
    schema_only: bool = False
    data_only: bool = False
    no_owner: bool = False
    role_map: tuple[tuple[str, str], ...] = ()
    moves: tuple[TableMove, ...] = ()
    analyze: bool = False
    no_database_settings: bool = False

    @property
    def changes_roles(self) -> bool:
        """Whether restored objects get owners or grants that differ from the snapshot's."""
        return self.no_owner or bool(self.role_map)

    def roles_needed(self, roles: Iterable[str]) -> list[str]:
        """Return the roles that must exist on a target if the snapshot names `roles`."""
        names = dict(self.role_map)
        kept = [] if self.no_owner else [names.get(role, role) for role in roles]
        return list(dict.fromkeys([*kept, *names.values()]))


WHOLE = RestoreScope()


class ChosenTables(Struct, frozen=True):
    """The tables whose rows are restored: those that match a pattern, and those that `scope` chooses."""

    patterns: tuple[str, ...]
    scope: RestoreScope = WHOLE

    @property
    def is_partial(self) -> bool:
        """Whether only the rows of some tables are restored."""
        return bool(self.patterns or self.scope.schemas or self.scope.moves)

    def of(self, groups: Iterable[Group]) -> tuple[Group, ...]:
        """Return the groups whose rows are restored."""
        if not self.is_partial:
            return () if self.scope.schema_only else tuple(groups)
        moved = {(move.schema, move.table) for move in self.scope.moves}
        return tuple(
            group
            for group in groups
            if (group.schema, group.table) in moved
            or is_schema_named(group.schema, self.scope.schemas)
            or is_matching(group.name, self.patterns)
        )
