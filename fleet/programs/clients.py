"""Which pg_dump and pg_restore to use for a node: the wheel's, or others of the machine.

The wheel's programs are built without TLS. A program that can't use TLS would read the DDL in plaintext from a server
with which all other sessions use TLS, or would not connect at all.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psycopg

from fleet.config import Node
from fleet.nodes.connections import TRANSACTION_TIMEOUT_VERSION, ProgramConnection, as_connected, program_connection
from fleet.nodes.encodings import RAW
from fleet.nodes.sessions import Sessions
from fleet.programs.wheel import wheel_bin_directory
from storage.errors import RefusedError, UsageError

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

    Those that fleet.toml names; else the wheel's; else, if these can't, the newest of the machine. None is older than
    the server, and each can use TLS if the session does. Raises ProgramsUnfitError.
    """
    server, needs_tls = connection.info.server_version // 10000, bool(connection.pgconn.ssl_in_use)
    for one in _find_programs(node):
        if one.version >= server and (one.has_tls or not needs_tls):
            return one
    what = f"pg_dump {server} or newer" + (" that can use TLS" if needs_tls else "")
    where = f"in {node.programs}" if node.programs is not None else "on this machine"
    raise ProgramsUnfitError(
        f"node {node.id}: there is no {what} {where}",
        hint=f"install PostgreSQL's client programs (Debian: postgresql-client-{server}), or name their folder in"
        " fleet.toml: [tools] postgresql",
        details={"node": node.id, "server": server, "tls": needs_tls},
    )


def restoring_programs(
    node: Node, connection: psycopg.Connection[Any], writer: int
) -> tuple[ClientPrograms, ProgramConnection | None]:
    """The programs to restore an archive of pg_dump `writer` (a major version) with, and how pg_restore can connect.

    That is None if no pg_restore can: as protected as the session `connection` is, or to a server older than 17, which
    does not know a setting that pg_restore sets from 17 on. Raises ProgramsUnfitError if none can read the archive.
    """
    needs_tls, is_old = bool(connection.pgconn.ssl_in_use), connection.info.server_version < TRANSACTION_TIMEOUT_VERSION
    readers = [one for one in _find_programs(node) if one.version >= writer]
    if not readers:
        where = f"in {node.programs}" if node.programs is not None else "on this machine"
        raise ProgramsUnfitError(
            f"node {node.id}: there is no pg_restore {writer} or newer {where}, which the snapshot's DDL needs",
            hint=f"install PostgreSQL's client programs (Debian: postgresql-client-{writer}), or name their folder in"
            " fleet.toml: [tools] postgresql",
            details={"node": node.id, "version": writer},
        )
    for one in readers:
        if (one.has_tls or not needs_tls) and (one.version < TRANSACTION_TIMEOUT_VERSION // 10000 or not is_old):
            # A secret that could only be passed on the command line is passed to no program.
            with suppress(UsageError):
                return one, program_connection(as_connected(node, connection), needs_tls=needs_tls, client_encoding=RAW)
    return readers[0], None


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
