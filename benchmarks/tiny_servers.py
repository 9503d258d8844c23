"""Many small PostgreSQL servers on one machine: a fleet of hundreds of shards, of real servers with real sockets.

`initdb` runs once. Every primary is a copy of its data directory with a system identifier of its own, and every standby
is a copy of its primary's. A server takes about 4 MB of memory, 2 to 12 MB more for each session of Cutline's, and
20 MB of disk. The template databases are links to one folder, because nobody connects to them.

The identifier is in pg_control, which ends with a CRC-32C, and in the first page of every WAL segment
(PostgreSQL source, catalog/pg_control.h and access/xlog_internal.h).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psycopg

from cutline.embedded.server import EmbeddedNode, create_primary, start_server, stop_server
from cutline.nodes.programs import Programs, server_programs
from cutline.nodes.sessions import in_parallel

DATABASE, ROWS = "bank", 10
SETTINGS = {
    "fsync": "off",
    "autovacuum": "off",
    "shared_buffers": "1MB",
    "wal_buffers": "64kB",
    "min_wal_size": "2MB",
    "max_wal_size": "4MB",
    "max_connections": "60",
    "max_wal_senders": "6",
    "max_replication_slots": "6",
    "max_prepared_transactions": "4",
    "max_worker_processes": "0",
    "max_logical_replication_workers": "0",
    "bgwriter_lru_maxpages": "0",
    "io_method": "sync",
}
# The oids of template1 and template0.
SHARED_DATABASES = ("1", "4")
START_SECONDS_MAX, STOP_SECONDS_MAX = 120.0, 60.0
# Both are known from the structures' definitions: the identifier comes first in pg_control, and after the short header
# of a long WAL page.
CONTROL_BYTES_MIN, IDENTIFIER_IN_PAGE = 200, 24
SECTOR_BYTES = 512


@dataclass(slots=True)
class TinyServers:
    """The running servers, primaries first. `processes` are their postmasters, which are children of this process."""

    folder: Path
    nodes: tuple[EmbeddedNode, ...]
    processes: dict[str, subprocess.Popen[bytes]]

    @property
    def primaries(self) -> tuple[EmbeddedNode, ...]:
        """The primaries, in order."""
        return tuple(node for node in self.nodes if node.backup_of is None)

    def write_fleet(self, path: Path, store: str, more: str = "", database: str = DATABASE) -> Path:
        """Write a fleet file with these nodes; `more` is additional TOML."""
        lines = ['name = "shards"', f"store = {json.dumps(store)}", more]
        for node in self.nodes:
            lines += ["", "[[node]]", f'id = "{node.id}"']
            lines += [f'backup_of = "{node.backup_of}"'] if node.backup_of else []
            lines += [f'dsn = "{node.dsn(database)}"']
        path.write_text("\n".join(lines) + "\n")
        return path


@contextmanager
def tiny_servers(folder: Path, *, shards: int, standbys: int = 0) -> Iterator[TinyServers]:
    """Run the servers while the block runs; then stop them and delete their data."""
    programs = server_programs()
    template = EmbeddedNode("template", folder / "template")
    servers = TinyServers(folder, tuple(_nodes(folder, shards, standbys)), {})
    try:
        _create_template(programs, template)
        for group in (servers.primaries, servers.nodes[shards:]):
            in_parallel(lambda node: _copy(programs, template, node, servers), group)
            for node in group:
                servers.processes[node.id] = _start(programs, node)
            in_parallel(_await_start, group)
        yield servers
    finally:
        stop_server(template, immediate=True)
        for process in servers.processes.values():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGQUIT)
        for process in servers.processes.values():
            process.wait(STOP_SECONDS_MAX)
        shutil.rmtree(folder, ignore_errors=True)


def execute_on(nodes: Sequence[EmbeddedNode], statement: str, database: str = DATABASE) -> None:
    """Execute the statement on every node."""

    def execute(node: EmbeddedNode) -> None:
        with psycopg.connect(node.dsn(database), autocommit=True) as connection:
            connection.execute(statement.encode())

    in_parallel(execute, nodes)


def _nodes(folder: Path, shards: int, standbys: int) -> Iterator[EmbeddedNode]:
    for shard in range(1, shards + 1):
        yield EmbeddedNode(f"s{shard}", folder / f"s{shard}")
    for shard in range(1, shards + 1):
        for number in range(1, standbys + 1):
            yield EmbeddedNode(f"s{shard}-b{number}", folder / f"s{shard}-b{number}", f"s{shard}")


def _create_template(programs: Programs, template: EmbeddedNode) -> None:
    """Create a cluster with the database and its table, and stop its server."""
    create_primary(programs, template, SETTINGS, wal_segment_megabytes=1)
    start_server(programs, template)
    execute_on([template], f"CREATE DATABASE {DATABASE}", "postgres")
    execute_on([template], f"CREATE TABLE item AS SELECT n AS id, 0 AS n FROM generate_series(1, {ROWS}) AS n")
    execute_on([template], "ALTER TABLE item ADD PRIMARY KEY (id)")
    execute_on([template], "CHECKPOINT")
    stop_server(template)


def _copy(programs: Programs, template: EmbeddedNode, node: EmbeddedNode, servers: TinyServers) -> None:
    node.folder.mkdir(mode=0o700)
    shared = template.data_directory / "base"

    def links(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(folder) == shared and name in SHARED_DATABASES]

    shutil.copytree(template.data_directory, node.data_directory, ignore=links)
    for name in SHARED_DATABASES:
        (node.data_directory / "base" / name).symlink_to(shared / name)
    shard = next(n for n, primary in enumerate(servers.primaries) if primary.id == (node.backup_of or node.id))
    _change_identifier(node.data_directory, shard + 1)
    if node.backup_of:
        primary = next(primary for primary in servers.primaries if primary.id == node.backup_of)
        (node.data_directory / "standby.signal").touch()
        with (node.data_directory / "postgresql.conf").open("a") as file:
            file.write(f"primary_conninfo = 'host={primary.socket_folder} port=5432 user=postgres'\n")
    if programs.account:
        for path in (node.folder, *node.folder.rglob("*")):
            os.chown(path, programs.account.uid, programs.account.gid, follow_symlinks=False)


def _start(programs: Programs, node: EmbeddedNode) -> subprocess.Popen[bytes]:
    command = [
        str(programs.bin_directory / "postgres"), "-D", str(node.data_directory),
        "-c", f"unix_socket_directories={node.socket_folder}",
    ]  # fmt: skip
    with node.log_file.open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            umask=0o077,
            user=programs.account.uid if programs.account else None,
            group=programs.account.gid if programs.account else None,
            extra_groups=[] if programs.account else None,
            # Ctrl-C must end the commands first.
            start_new_session=True,
        )


def _await_start(node: EmbeddedNode) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    while True:
        try:
            psycopg.connect(node.dsn(), autocommit=True).close()
            return
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _change_identifier(data: Path, number: int) -> None:
    """Add `number` to the cluster's system identifier. The server must have been shut down."""

    def change(path: Path, offset: int, seal: Callable[[bytearray], None] = lambda _: None) -> None:
        with path.open("r+b") as file:
            head = bytearray(file.read(SECTOR_BYTES))
            (identifier,) = struct.unpack_from("=Q", head, offset)
            struct.pack_into("=Q", head, offset, identifier + number)
            seal(head)
            file.seek(0)
            file.write(head)

    control = data / "global" / "pg_control"
    at = _crc_offset(control.read_bytes()[:SECTOR_BYTES])
    change(control, 0, lambda head: struct.pack_into("=I", head, at, crc32c(head[:at])))
    for segment in (data / "pg_wal").iterdir():
        if segment.is_file() and len(segment.name) == 24:
            change(segment, IDENTIFIER_IN_PAGE)


def _crc_offset(control: bytes) -> int:
    """Return the offset of pg_control's CRC, which depends on the version: it is the CRC of everything before it."""
    for offset in range(CONTROL_BYTES_MIN, SECTOR_BYTES - 4, 4):
        if struct.unpack_from("=I", control, offset)[0] == crc32c(control[:offset]):
            return offset
    raise ValueError("pg_control has no CRC-32C")


def crc32c(content: Iterable[int]) -> int:
    """Return the CRC-32C (Castagnoli) of the bytes."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in content:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


@cache
def _crc_table() -> Mapping[int, int]:
    table = {}
    for number in range(256):
        crc = number
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        table[number] = crc
    return table
