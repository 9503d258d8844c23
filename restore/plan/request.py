"""The user's request to `restore`."""

from __future__ import annotations

import shlex
from datetime import datetime

from msgspec import Struct, structs
from msgspec.structs import replace

from cutline.fleet.config import Fleet
from cutline.fleet.messages import DRILL_COMMAND
from cutline.fleet.table_names import quote_identifier
from cutline.restore.plan.copies import Wanted
from cutline.restore.scope.scope import WHOLE, ChosenTables, RestoreScope
from cutline.storage.errors import UsageError


class RestoreRequest(Struct, frozen=True):
    """A request to restore a snapshot, or only the tables that match `groups` or are in a schema of `scope`.

    `increment` selects that increment; `at` selects the latest cut at or before that time or, if the request is
    `exact`, the state at that time itself (snapshots/listing/exact_point.py). Without either, the newest increment is
    restored.

    `routes` (restore/scope/table_routes.py) divide the rows of tables among targets that are not the snapshot's shards.

    `scope`: which part to restore. `replace`: set existing databases aside. `create_roles`: create roles that a target
    lacks. `use_backup_copies`: if rows are missing from a primary's copy, take them from a standby's.
    `allow_refused_ddl`: restore without the DDL that the targets refuse. `is_drill`: restore into servers started for
    the drill; it then creates roles, whatever the user's options were: `drill_command` is the `command` with these.
    """

    name: str
    increment: int | None = None
    at: datetime | None = None
    groups: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    replace: bool = False
    create_roles: bool = False
    use_backup_copies: bool = False
    allow_refused_ddl: bool = False
    scope: RestoreScope = WHOLE
    is_drill: bool = False
    exact: bool = False
    drill_command: str = ""

    @property
    def exact_at(self) -> datetime | None:
        """The time whose exact state is restored; None if a cut is restored."""
        return self.at if self.exact else None

    @property
    def command(self) -> str:
        """The command for this request, without --increment, --at, --exact, --use-backup-copies and --to."""
        if self.drill_command:
            return self.drill_command
        scope = self.scope
        words = [word for node in scope.nodes for word in ("--node", node)]
        words += [
            word for group in (*self.groups, *(move.label for move in scope.moves)) for word in ("--group", group)
        ]
        words += [word for schema in scope.schemas for word in ("--schema", schema)]
        words += [word for route in self.routes for word in ("--route", route)]
        words += ["--schema-only"] if scope.schema_only else []
        words += ["--data-only"] if scope.data_only else []
        words += ["--no-owner"] if scope.no_owner else []
        words += [word for pair in scope.role_map for word in ("--role-map", "=".join(map(_role, pair)))]
        words += ["--create-roles"] if self.create_roles else []
        words += ["--replace"] if self.replace else []
        words += ["--allow-refused-ddl"] if self.allow_refused_ddl else []
        words += ["--analyze"] if scope.analyze else []
        words += ["--no-database-settings"] if scope.no_database_settings else []
        return f"{DRILL_COMMAND if self.is_drill else 'snapshot restore'} {self.name} {shlex.join(words)}".rstrip()

    @property
    def words_of_state(self) -> list[str]:
        """The options that choose the restored state and its copies, which `command` lacks."""
        words = ["--increment", str(self.increment)] if self.increment is not None and not self.exact else []
        words += ["--at", self.at.isoformat()] if self.at else []
        words += ["--exact"] if self.exact else []
        return words + (["--use-backup-copies"] if self.use_backup_copies else [])

    @property
    def into_tables(self) -> str:
        """The command that loads the same rows into existing tables; "" if no command can do that.

        The command omits options that change databases, roles or tables.
        """
        scope = self.scope
        if not self.tables.is_partial or scope.moves or self.routes or self.is_drill:
            return ""
        only = RestoreScope(nodes=scope.nodes, schemas=scope.schemas, data_only=True, analyze=scope.analyze)
        given = RestoreRequest(self.name, groups=self.groups, scope=only).command
        return shlex.join([*shlex.split(given), *self.words_of_state])

    def steps(self, increment: int) -> tuple[str, str] | None:
        """Return the commands for the same restore in two steps, first all but the rows, then the rows.

        Returns None for drills, and if rows go to databases or tables other than the snapshot's.
        """
        if self.routes or self.scope.moves or self.is_drill:
            return None
        number, scope = ["--increment", str(increment)], self.scope
        if self.exact_at:
            number = ["--at", self.exact_at.isoformat(), "--exact"]
        ddl = structs.replace(scope, schema_only=True, data_only=False, schemas=(), analyze=False)
        first = replace(self, groups=(), allow_refused_ddl=False, scope=ddl)
        rows = RestoreScope(nodes=scope.nodes, schemas=scope.schemas, data_only=True, analyze=scope.analyze)
        second = RestoreRequest(self.name, groups=self.groups, scope=rows)
        words = [*number, *(["--use-backup-copies"] if self.use_backup_copies else [])]
        return f"{first.command} {shlex.join(number)}", f"{second.command} {shlex.join(words)}"

    def wanted(self, *, is_routed: bool) -> Wanted:
        """Return the parts of a chain that are needed; `is_routed`: the targets are not the snapshot's shards."""
        return Wanted(
            self.tables,
            nodes=self.scope.nodes,
            command=self.command,
            large_objects=self.is_with_all_rows,
            use_backup_copies=self.use_backup_copies,
            may_use_backup_copies=not is_routed,
            ddl=not self.scope.data_only,
        )

    @property
    def tables(self) -> ChosenTables:
        """The tables whose rows are restored."""
        return ChosenTables(self.groups, self.scope)

    @property
    def is_with_all_rows(self) -> bool:
        """Whether new databases get the rows of all tables, and therefore the large objects."""
        return not self.tables.is_partial and not self.scope.schema_only and not self.scope.data_only


def _role(name: str) -> str:
    """Quote a role for --role-map."""
    return quote_identifier(name) if "=" in name or name.startswith('"') else name


def check_routable(request: RestoreRequest, fleet: Fleet) -> None:
    """Raise UsageError for options that are meaningless if the targets are not the snapshot's shards."""
    scope = request.scope
    if scope.nodes and not request.routes:
        raise UsageError(
            f"--node {', '.join(scope.nodes)}: {fleet.path} does not have these primaries",
            hint=f"its primaries are: {', '.join(node.id for node in fleet.primaries)}",
        )
    options = {
        "--node": scope.nodes,
        "--schema-only": scope.schema_only,
        "--data-only": scope.data_only,
        "--group S.T=S.T": scope.moves,
        "--use-backup-copies": request.use_backup_copies,
    }
    if given := [option for option, value in options.items() if value]:
        raise UsageError(
            f"{', '.join(given)}: not allowed if the targets are not the snapshot's shards",
            hint="omit it, or restore to the same shards: without --route, and to a FILE with their ids",
        )
