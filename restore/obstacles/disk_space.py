"""The disk space that restored databases need, and what there is.

What is free is known only of servers that run on this machine. Nothing runs on another one to find it out. A server is
on this machine if the files in its data directory here are its own: its system identifier, its port and its start.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.units import size_text
from cutline.restore.obstacles.obstacles import Obstacles
from cutline.storage.errors import RefusedError

# Without the privilege to see where its data is, the server shows no row.
SERVER_QUERY = """
SELECT s.setting, (pg_control_system()).system_identifier, extract(epoch FROM pg_postmaster_start_time())::bigint,
       current_setting('port')
  FROM pg_settings s WHERE s.name = 'data_directory'
"""
# The file with the server's process has the time at which that began, the server tells when it was ready.
START_SECONDS_MAX = 60
IDENTIFIER_BYTES = 8
START_LINE, PORT_LINE = 2, 3


class SpaceLackingError(RefusedError):
    """A target's disk has less space than the databases need."""


@dataclass(slots=True)
class DiskSpace:
    """A disk: the nodes that have their data there, what they need, and what is free; None: it is not known.

    `is_hidden`: our role may not see where the data is.
    """

    nodes: list[str] = field(default_factory=list)
    needed_bytes: int = 0
    free_bytes: int | None = None
    is_rough: bool = False
    is_hidden: bool = False

    @property
    def is_lacking(self) -> bool:
        """Whether less is free than needed."""
        return self.free_bytes is not None and self.free_bytes < self.needed_bytes


@dataclass(frozen=True, slots=True)
class DatabaseSpace:
    """What one database needs, on the server of a node; `folder` is where its data is, None if that is not known.

    `is_hidden`: the server does not tell our role.
    """

    node: Node
    folder: Path | None
    needed_bytes: int
    is_rough: bool
    is_hidden: bool = False


def check_space(databases: Iterable[DatabaseSpace], obstacles: Obstacles) -> list[DiskSpace]:
    """Compare what the databases need with what is free, by disk; add an obstacle where it is less.

    A database that is put aside keeps its space. Where the need is a rough estimate, too little is only a warning.
    """
    disks: dict[str, DiskSpace] = {}
    for one in databases:
        folder = one.folder
        disk = disks.setdefault(f"device {folder.stat().st_dev}" if folder else one.node.id, DiskSpace())
        if folder:
            found = os.statvfs(folder)
            disk.free_bytes = found.f_bavail * found.f_frsize
        disk.nodes.append(one.node.id)
        disk.needed_bytes += one.needed_bytes
        disk.is_rough |= one.is_rough
        disk.is_hidden |= one.is_hidden
    for disk in disks.values():
        if disk.is_lacking and disk.free_bytes is not None:
            where = f"node{'s' * (len(disk.nodes) > 1)} {', '.join(disk.nodes)}"
            what = f"{where}: {size_text(disk.needed_bytes)} needed on disk, {size_text(disk.free_bytes)} free"
            if disk.is_rough:
                obstacles.warnings.append(f"{what}; the need is a rough estimate")
                continue
            obstacles.add(
                SpaceLackingError(
                    what,
                    hint="free space on that disk, or restore to servers with more: --to FILE",
                    details={"nodes": disk.nodes, "needed": disk.needed_bytes, "free": disk.free_bytes},
                ),
                disk.nodes[0],
            )
    return list(disks.values())


def is_data_directory_hidden(connection: psycopg.Connection[Any]) -> bool:
    """Whether the server does not tell the session's role where its data is."""
    return connection.execute(SERVER_QUERY).fetchone() is None


def find_data_directory(connection: psycopg.Connection[Any]) -> Path | None:
    """The server's data directory if that is on this machine and can be read, else None."""
    row = connection.execute(SERVER_QUERY).fetchone()
    if row is None:
        return None
    folder, (identifier, start, port) = Path(row[0]), row[1:]
    try:
        with (folder / "global" / "pg_control").open("rb") as control:
            stored = int.from_bytes(control.read(IDENTIFIER_BYTES), "little")
        lines = (folder / "postmaster.pid").read_text().splitlines()
        is_own = (
            stored == identifier % (1 << 64)
            and lines[PORT_LINE].strip() == port
            and abs(int(lines[START_LINE]) - start) <= START_SECONDS_MAX
        )
    except (OSError, ValueError, IndexError):
        return None
    return folder if is_own else None
