"""What a restore did, for a person and for scripts."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleet.tables.left_out import LeftOut
from snapshots.operations.open_operations import OpenOperation


@dataclass(slots=True)
class NodeReport:
    """One restored database."""

    node: str
    database: str
    rows: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class RestoreReport:
    """What a restore did.

    `aside`: the names that existing databases were given. `left_out`: what the snapshot has and was not restored.
    `not_in_snapshot`: what the snapshot lacks. `open_operations`: operations on the snapshot that had no outcome.
    `slots_dropped`: slots of the chains that ended when their databases were put aside; `slots_left`: those that could
    not be dropped. `roles_created` (`node: role`) remain if the restore fails.
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
    open_operations: tuple[OpenOperation, ...] = ()
    roles_created: list[str] = field(default_factory=list)
