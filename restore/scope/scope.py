"""The scope of a restore: its part of a snapshot, and its handling of roles.

The records of restored databases have it, so that another process continues with the same scope.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cutline.fleet.record import Record
from cutline.fleet.table_names import table_name
from cutline.storage.errors import UsageError


def choose_nodes(nodes: Iterable[str], primaries: Iterable[str], place: str) -> list[str]:
    """Return the primaries that `nodes` names, all of them if it is empty. Raises UsageError naming an unknown id."""
    wanted, primaries = set(nodes), list(primaries)
    if unknown := sorted(wanted - set(primaries)):
        raise UsageError(
            f"--node {', '.join(unknown)}: {place} has no such primary",
            hint=f"its primaries are: {', '.join(primaries)}",
            details={"nodes": unknown},
        )
    return [primary for primary in primaries if not wanted or primary in wanted]


def warn_of_nodes(nodes: Iterable[str], shards: Iterable[str]) -> list[str]:
    """The warning that only `nodes` of the snapshot's `shards` are restored; none if these are all."""
    chosen = set(nodes)
    others = sorted(set(shards) - chosen)
    if not chosen or not others:
        return []
    return [
        f"not restored: {', '.join(others)}; what spans shards is as of the cut on {', '.join(sorted(chosen))} alone"
    ]


# No role has this name: it stands for all of them.
PUBLIC_ROLE = "public"


@dataclass(frozen=True, slots=True)
class RoleChanges:
    """Which role takes the place of which. All names are in one form: as text, or raw as in DDL.

    With `no_owner` all objects belong to `ours`, the role that restores, which also grants everything. Then `known` are
    the roles that the target has, and grants to others are left out.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    no_owner: bool = False
    ours: str = ""
    known: frozenset[str] = frozenset()

    def of(self, role: str) -> str:
        """The role in the restored database."""
        return self.names.get(role, role)

    def lacks(self, role: str) -> bool:
        """Whether what `role` was granted is left out, because the target has no such role."""
        return self.no_owner and role != PUBLIC_ROLE and self.of(role) not in self.known


UNCHANGED = RoleChanges()


class TableMove(Record, frozen=True):
    """A table and the name under which it is restored."""

    schema: str
    table: str
    to_schema: str
    to_table: str

    @property
    def label(self) -> str:
        """Both names, as options and reports have them."""
        return f"{table_name(self.schema, self.table)}={table_name(self.to_schema, self.to_table)}"


class RestoreScope(Record, frozen=True, kw_only=True):
    """The part of a snapshot that is restored; without values all of it, as it was.

    `nodes`: these shards alone. `schemas`: the rows of the tables in these schemas. `schema_only`: the DDL without rows
    and without values of sequences. `data_only`: the rows and the values of sequences, into tables that exist.
    `no_owner`: all objects belong to the role that restores. `role_map`: pairs of a role and its replacement. `moves`:
    the rows of these tables, which get other names. `analyze`: the planner's statistics are collected, too.
    `no_database_settings`: what belongs to the database itself is left out.
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
        """Whether restored objects get other owners or grants than the snapshot's."""
        return self.no_owner or bool(self.role_map)

    def roles_needed(self, roles: Iterable[str]) -> list[str]:
        """The roles that a target must have, if the snapshot names `roles`."""
        names = dict(self.role_map)
        kept = [] if self.no_owner else [names.get(role, role) for role in roles]
        return list(dict.fromkeys([*kept, *names.values()]))


WHOLE = RestoreScope()
