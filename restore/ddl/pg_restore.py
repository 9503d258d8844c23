"""Run entries of an archive by pg_restore, or the script that it writes of them where it can't connect."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fleet.config import Node
from fleet.nodes.connections import TRANSACTION_TIMEOUT_VERSION, connect, raising_unreachable
from fleet.nodes.encodings import raw_text
from fleet.nodes.free_connections import task_sessions
from fleet.nodes.watch import Watch
from fleet.programs.clients import ClientPrograms, restoring_programs
from fleet.programs.wheel import ProgramFailedError, run_group, run_tool
from restore.ddl.ddl import refused_error, show_name
from restore.ddl.scripts import run_script, run_whole
from snapshots.ddl.archive import read_contents, statements_of_entry
from storage.errors import SnapshotError

# How many entries one pg_restore runs side by side at most, and how many objects it creates in one transaction
# otherwise: each holds a lock until the commit.
JOBS, OBJECTS_AT_ONCE = 4, 200
BUILD_OPTIONS = "-c synchronous_commit=off"
# For each of JOBS; more if the server gives more.
BUILD_MEGABYTES = 128
MEMORY_QUERY = "SELECT setting::bigint / 1024 FROM pg_settings WHERE name = 'maintenance_work_mem'"
# What pg_restore says of an error.
REFUSED, NOT_EXECUTED, COMMAND, CUT_OFF = "pg_restore: error: ", "could not execute query: ", "Command was: ", "..."
# libpq's own words about a lost session.
LOST = ("server closed the connection unexpectedly", "connection to server ", "no connection to the server")


class Manner(Enum):
    """How entries are run: in transactions of OBJECTS_AT_ONCE objects, in one, or each by itself, JOBS at once."""

    TRANSACTIONS = auto()
    ONE_TRANSACTION = auto()
    SIDE_BY_SIDE = auto()


@dataclass(frozen=True, slots=True)
class ArchivePart:
    """The entries with these numbers of the archive in the file `path`; they belong to one section."""

    path: Path
    section: str
    numbers: Collection[int]
    manner: Manner = Manner.TRANSACTIONS

    def write_list(self) -> list[str]:
        """Write the list of the entries beside the archive; return the words that make pg_restore run these alone."""
        listed = self.path.with_name(f"{self.path.name}-{self.section}")
        listed.write_text("".join(f"{number};\n" for number in self.numbers))
        return [f"--use-list={listed}", str(self.path)]


def run_part(part: ArchivePart, writer: int, node: Node, watch: Watch) -> None:
    """Run the entries of an archive of pg_dump `writer` (a major version).

    Raises SchemaLoadError with the server's message and the statement, ProgramFailedError, NodeUnreachableError.
    """
    if not part.numbers:
        return
    with raising_unreachable(node), connect(node) as connection:
        building = replace(node, dsn=_with_options(node.dsn, connection))
        programs, access = restoring_programs(building, connection, writer)
        if access is not None:
            command = [str(programs.folder / "pg_restore"), "--dbname", access.conninfo, "--exit-on-error"]
            jobs = 1
            if part.manner == Manner.SIDE_BY_SIDE:
                jobs = min(task_sessions({node: connection})[node.id], JOBS)
            words = [*command, "--no-password", *_options(part.manner, programs, jobs), *part.write_list()]
            ended = run_group(words, access.environment, watch.on_silence)
            if ended.returncode:
                # A session that was lost with pg_restore's raises here.
                connection.execute("SELECT")
                raise _failure(part, node, ended)
            return
    run = run_whole if part.manner == Manner.ONE_TRANSACTION else run_script
    run(node, part.section, write_script(part, programs), watch)


def write_script(part: ArchivePart, programs: ClientPrograms) -> str:
    """The script that pg_restore writes of the entries, as raw text, without the lines of psql's restrict mode."""
    if not part.numbers:
        return ""
    guard, script = secrets.token_hex(16), part.path.with_name(f"{part.path.name}-{part.section}.sql")
    run_tool(
        "pg_restore", f"--file={script}", *part.write_list(),
        # Older ones write no lines for psql's restrict mode.
        *([f"--restrict-key={guard}"] if programs.has("--restrict-key") else []), folder=programs.folder,
    )  # fmt: skip
    lines = raw_text(script.read_bytes()).split("\n")
    return "\n".join(line for line in lines if line not in (f"\\restrict {guard}", f"\\unrestrict {guard}"))


def _options(manner: Manner, programs: ClientPrograms, jobs: int) -> list[str]:
    if manner == Manner.ONE_TRANSACTION:
        return ["--single-transaction"]
    if manner == Manner.SIDE_BY_SIDE:
        return [f"--jobs={jobs}"]
    return [f"--transaction-size={OBJECTS_AT_ONCE}"] if programs.has("--transaction-size") else []


def _with_options(dsn: str, connection: psycopg.Connection[Any]) -> str:
    (given,) = connection.execute(MEMORY_QUERY).fetchone() or (0,)
    memory = f"-c maintenance_work_mem={max(given, BUILD_MEGABYTES)}MB"
    options = [conninfo_to_dict(dsn).get("options") or "", BUILD_OPTIONS, memory]
    # pg_restore sets it from 17 on.
    options += ["-c transaction_timeout=0"] if connection.info.server_version >= TRANSACTION_TIMEOUT_VERSION else []
    return make_conninfo(dsn, options=" ".join(map(str, options)).strip())


def _failure(part: ArchivePart, node: Node, ended: subprocess.CompletedProcess[str]) -> SnapshotError:
    """The error for a pg_restore that did not end well."""
    said = ended.stderr.partition(REFUSED)[2].partition(f"\n{REFUSED}")[0]
    message, _, statement = said.partition(COMMAND)
    if ended.returncode < 0 or not message or any(text in message for text in LOST):
        return ProgramFailedError(
            f"node {node.id}: pg_restore did not end the {part.section} DDL:"
            f" {' '.join(message.split()) or 'no output'}",
            hint="check that the server runs and that the machine has free memory, then repeat the command",
            details={"node": node.id, "section": part.section},
        )
    named, statement = _find_refused(part, statement.strip())
    return refused_error(node, part.section, message.removeprefix(NOT_EXECUTED), statement, named)


def _find_refused(part: ArchivePart, begin: str) -> tuple[str, str]:
    """The object and the whole text of the statement of which pg_restore shows the beginning."""
    body, shown = part.path.read_bytes(), begin.removesuffix(CUT_OFF)
    numbers = frozenset(part.numbers)
    for entry in read_contents(body).entries if shown else ():
        if entry.number not in numbers:
            continue
        statements = show_name(statements_of_entry(body, entry)).strip()
        if statements.startswith(shown):
            return show_name(f"{entry.kind} {f'{entry.schema}.' if entry.schema else ''}{entry.name}"), statements
    return "", begin
