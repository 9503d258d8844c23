"""The report on a restore, for both human readers and scripts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from msgspec import Struct
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cutline.fleet.config import SECRET_PARAMETERS
from cutline.fleet.record import Time
from cutline.nodes.left_out import LeftOut
from cutline.restore.ddl.ddl import Refusal, show_name, without_options
from cutline.restore.ddl.running import AFTER_EXTENSION, session_settings
from cutline.restore.plan.topology import ShownRoute
from cutline.restore.scope.scope import WHOLE, RestoreScope
from cutline.restore.targets.databases import OwnerChange
from cutline.restore.targets.target import Target
from cutline.snapshots.ddl.ddl_archive import EXTENSION, PRIVILEGES
from cutline.snapshots.listing.exact_point import ExactPoint
from cutline.snapshots.listing.recovery_plan import InDoubtTransaction
from cutline.snapshots.operations.object_damage import Damage
from cutline.snapshots.operations.open_operations import OpenOperation

# Stands for the number of lines in the text that replaces them if they are many.
COUNT = "{count}"


class NodeReport(Struct):
    """One restored database."""

    node: str
    database: str
    rows: int = 0
    seconds: float = 0.0


class BorrowedRows(Struct, frozen=True):
    """The names of the groups whose rows a shard got from standby `node`'s copy."""

    shard: str
    node: str
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RefusedStatement:
    """A statement that a target refused, as reported; `needs` names the refused object that it depends on, if any.

    `statement` is the refused statement in readable form. `script` contains all the statements in the object's entry:
    none of them took effect, or they are grants, which can be repeated. The script is raw text (nodes.encodings) and
    may contain passwords, so it is written only to the file of refused statements. `settings` are the statements that
    set the session up for this script and the following ones (empty if nothing changes). `access` is the database's
    connection string without passwords. If there are many similar statements, the text report only counts them, and
    `counted` describes them, with COUNT in the place of their number.
    """

    node: str
    database: str
    object: str
    section: str = ""
    reason: str = ""
    statement: str = ""
    needs: str = ""
    script: str = field(default="", repr=False)
    settings: str = field(default="", repr=False)
    access: str = field(default="", repr=False)
    counted: str = field(default="", repr=False)

    def document(self) -> dict[str, Any]:
        """Return the refusal for JSON."""
        hidden = ("script", "settings", "access", "counted")
        return {name: value for name, value in asdict(self).items() if name not in hidden}

    def text(self) -> str:
        """Return the refusal on one line."""
        return f"{self.node}: {self.object}" + (f": {self.reason}" if self.reason else "")


class NeededSearchPath(Struct, frozen=True):
    """A restored object that can't be maintained until the `functions` that it uses set a search_path.

    `work` are the commands that fail, such as REINDEX, and `statements` set the search_path. Functions and statements
    are empty if the functions are not known.
    """

    node: str
    object: str
    work: tuple[str, ...]
    functions: tuple[str, ...] = ()
    statements: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the object and its functions on one line."""
        functions = f": {', '.join(self.functions)}" if self.functions else ""
        return f"{self.node}: {self.object} needs functions with a search_path{functions}"


class WalPhase(Struct, frozen=True):
    """The part of a restore that processes archived WAL: reading the segments and finding each row's last change.

    `changes` also counts changes in the segments that were committed after the cut.
    """

    seconds: float
    segments: int
    bytes: int
    changes: int
    transactions: int


@dataclass(slots=True)
class RestoreReport:
    """The results of a restore.

    `aside`: the new names of existing databases. `left_out`: parts of the snapshot that were not restored.
    `not_in_snapshot`: what the snapshot does not contain. `open_operations`: operations on the snapshot that have no
    outcome. `slots_dropped`: the slots of chains that ended when their databases were set aside; `slots_left`: slots
    that could not be dropped. `owner_changes`: restored databases whose owner changed. `roles_created` (`node: role`)
    remain if the restore fails. `is_resumed`: an earlier process started the restore. `in_doubt`: the transactions in
    doubt at the cut, None if they are unknown. `borrowed`: rows taken from standbys' copies because of the objects in
    `damaged`; a resumed restore does not look for damage again. `warnings`: what is wrong with the restored databases.
    `moved`: renamed tables, as `node: name=other`. `routes`: how the rows of each table were divided if the targets are
    not the snapshot's shards; `remarks`: the consequences of that division. `scope`: the scope of the request.
    `role_differences`: how roles that exist on the targets differ from the snapshot's. `cut_at`: when the cut was made,
    `safe_at`: its safe time; both None if the snapshot could not be read. `exact`: the restored state, unless it is
    that of a cut; `increment` is then the first increment after it. `wal` is None if this process loaded no rows
    and so did not read the archived WAL. `needed_paths`: all objects that `warnings` count, by the cause.
    """

    snapshot: str
    increment: int
    operation: str
    nodes: list[NodeReport]
    rows: int = 0
    bytes: int = 0
    seconds: float = 0.0
    aside: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    not_in_snapshot: tuple[LeftOut, ...] = ()
    slots_dropped: list[str] = field(default_factory=list)
    slots_left: list[str] = field(default_factory=list)
    owner_changes: list[OwnerChange] = field(default_factory=list)
    open_operations: tuple[OpenOperation, ...] = ()
    roles_created: list[str] = field(default_factory=list)
    is_resumed: bool = False
    in_doubt: tuple[InDoubtTransaction, ...] | None = None
    borrowed: tuple[BorrowedRows, ...] = ()
    damaged: tuple[Damage, ...] = ()
    warnings: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    routes: list[ShownRoute] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    scope: RestoreScope = WHOLE
    cut_at: datetime | None = None
    safe_at: Time | None = None
    exact: ExactPoint | None = None
    wal: WalPhase | None = None
    refused: list[RefusedStatement] = field(default_factory=list)
    role_differences: list[str] = field(default_factory=list)
    needed_paths: list[NeededSearchPath] = field(default_factory=list)


def describe_refusals(target: Target, refusals: Iterable[Refusal]) -> list[RefusedStatement]:
    """Describe a target's refusals for reports."""
    described: list[RefusedStatement] = []
    settings = ""
    for one in refusals:
        entry = one.entry
        shown = without_options(entry.kind, show_name(one.statement or entry.statements).strip())
        before, settings = settings, session_settings(entry)
        after = AFTER_EXTENSION if entry.kind == EXTENSION else ""
        script = f"{entry.statements.strip()}\n{after}"
        changed = settings if settings != before else ""
        names = (target.node.id, target.database, one.label)
        texts = (one.section, one.reason, shown, one.needs, script, changed)
        refusal = RefusedStatement(*names, *texts, access_to(target))
        if entry.kind == PRIVILEGES and entry.schema:
            refusal = replace(
                refusal,
                counted=f"privileges of {COUNT} objects in schema {show_name(entry.schema)} on {target.node.id}",
            )
        described.append(refusal)
    return described


def access_to(target: Target) -> str:
    """Return the connection string of the target's database under its real name, without passwords."""
    given = conninfo_to_dict(target.node.dsn, dbname=target.database)
    return make_conninfo("", **{name: value for name, value in given.items() if name not in SECRET_PARAMETERS})
