"""Which pg_dump and pg_restore to use for a node: those of its server's version, else the wheel's or newer ones.

A newer pg_dump may describe an older server's DDL in a form that only newer servers read.

The wheel's programs are built without TLS. A pg_dump that can't use TLS would read the DDL in plaintext from a server
with which all other sessions use TLS, or would not connect at all. pg_restore connects to no server.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.nodes.connections import program_connection
from cutline.fleet.nodes.sessions import Sessions
from cutline.fleet.programs.wheel import wheel_bin_directory
from cutline.storage.errors import RefusedError

# Where packages install each version's programs: Debian's, PGDG's for Red Hat, and others by PATH.
PACKAGED = ("usr/lib/postgresql/*/bin", "usr/pgsql-*/bin")
PROGRAMS = ("pg_dump", "pg_restore")
ASKING_SECONDS_MAX = 30
# Nobody listens there; without TLS, libpq refuses the mode before it connects.
TLS_PROBE = "host=127.0.0.1 port=1 connect_timeout=2 sslmode=require"


class ProgramsUnfitError(RefusedError):
    """No pg_dump on this machine can dump the node's DDL, or no pg_restore can read the snapshot's."""


@dataclass(frozen=True, slots=True)
class ClientPrograms:
    """A folder with pg_dump and pg_restore of one version."""

    folder: Path
    version: int
    has_tls: bool
    options: frozenset[str]

    def has(self, option: str) -> bool:
        """Whether pg_dump or pg_restore has the option, which depends on their version."""
        return option in self.options


def programs_for(node: Node, connection: psycopg.Connection[object]) -> ClientPrograms:
    """The programs to dump the node's DDL with, as protected as the session `connection` is.

    Those that fleet.toml names; else, of the wheel's and the machine's, those whose version is nearest to the server's.
    None is older than the server, and each can use TLS if the session does. Raises ProgramsUnfitError.
    """
    server, needs_tls = connection.info.server_version // 10000, bool(connection.pgconn.ssl_in_use)
    fit = [one for one in _find_programs(node) if one.version >= server and (one.has_tls or not needs_tls)]
    if fit:
        return min(fit, key=lambda one: one.version)
    what = f"pg_dump {server} or newer" + (" that can use TLS" if needs_tls else "")
    where = f"in {node.programs}" if node.programs is not None else "on this machine"
    raise ProgramsUnfitError(
        f"node {node.id}: there is no {what} {where}",
        hint=f"install PostgreSQL's client programs (Debian: postgresql-client-{server}), or name their folder in"
        " fleet.toml: [tools] postgresql",
        details={"node": node.id, "server": server, "tls": needs_tls},
    )


def archive_reader(node: Node, writer: int) -> ClientPrograms:
    """The programs whose pg_restore reads an archive of pg_dump `writer` (a major version).

    Those that fleet.toml names for the node; else the wheel's; else the newest of the machine. Raises
    ProgramsUnfitError if none can.
    """
    for programs in _find_programs(node):
        if programs.version >= writer:
            return programs
    where = f"in {node.programs}" if node.programs is not None else "on this machine"
    raise ProgramsUnfitError(
        f"node {node.id}: there is no pg_restore {writer} or newer {where}, which the snapshot's DDL needs",
        hint=f"install PostgreSQL's client programs (Debian: postgresql-client-{writer}), or name their folder in"
        " fleet.toml: [tools] postgresql",
        details={"node": node.id, "version": writer},
    )


def _find_programs(node: Node) -> list[ClientPrograms]:
    """Those that fleet.toml names; else the wheel's, then the others of the machine, the newest first."""
    if node.programs is not None:
        found = [_examine(node.programs)]
    else:
        others = [one for folder in installed_folders() if (one := _examine(folder))]
        found = [_examine(wheel_bin_directory()), *sorted(others, key=lambda one: -one.version)]
    return [one for one in found if one]


def check_programs(sessions: Sessions) -> dict[str, ClientPrograms]:
    """The programs for each primary; raise ProgramsUnfitError, or UsageError for a dsn that they can't be given."""
    for node in sessions.fleet.primaries:
        program_connection(node, needs_tls=False)
    return {
        node: programs_for(sessions.fleet.node(node), connection) for node, connection in sessions.primaries.items()
    }


def installed_folders() -> list[Path]:
    """The folders of this machine, besides the wheel's, that have both programs."""
    folders = [path for pattern in PACKAGED for path in Path("/").glob(pattern)]
    if by_path := shutil.which("pg_dump"):
        folders.append(Path(by_path).resolve().parent)
    return list(dict.fromkeys(one for one in folders if all(os.access(one / name, os.X_OK) for name in PROGRAMS)))


@cache
def _examine(folder: Path) -> ClientPrograms | None:
    """Ask the programs for their version and options; None if they don't run."""
    try:
        version = re.search(r"\) (\d+)", _ask(folder / "pg_dump", "--version"))
        options = re.findall(r"--[a-z-]+", "".join(_ask(folder / name, "--help") for name in PROGRAMS))
        refusal = _ask(folder / "pg_dump", "--dbname", TLS_PROBE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if version is None:
        return None
    return ClientPrograms(folder, int(version[1]), "SSL support is not compiled in" not in refusal, frozenset(options))


def _ask(program: Path, *arguments: str) -> str:
    asked = subprocess.run(
        [str(program), *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {"LC_ALL": "C"}, timeout=ASKING_SECONDS_MAX, check=False,
    )  # fmt: skip
    return asked.stdout.decode(errors="replace")
