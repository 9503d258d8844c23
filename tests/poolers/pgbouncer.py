"""PgBouncer before a server of the tests, in whatever mode."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cutline.nodes.programs import server_programs
from tests.programs.cached import NotInstallableError
from tests.programs.debian_program import DebianPackage, DebianProgram
from tests.programs.lacking import skip_without
from tests.s3.server import free_port

PROGRAM = DebianProgram(
    (
        DebianPackage(
            "pgbouncer", "1.18.0-1+deb12u1", "b8468c31f94596da0967b1a27980a0a036268eb8e53d3e647651bd7b82b6f65e"
        ),
        DebianPackage("libc-ares2", "1.18.1-3", "087fd5c2ac883202e1786ab45617cdab7f77bc7f060d58cca177ddf6b6c3fa73"),
        DebianPackage(
            "libevent-2.1-7",
            "2.1.12-stable-8+deb12u1",
            "95a025ae2548aed9dbb0f0a0215b0483b7fa43db1d4f1f318f013f2ea84987c3",
        ),
    ),
    "usr/sbin/pgbouncer",
)
# What most installations let it ignore: without that, no client of JDBC connects.
COMMON = "extra_float_digits,options"
START_SECONDS_MAX, STOP_SECONDS_MAX = 20, 10


@dataclass(frozen=True, slots=True)
class Pooler:
    """A running PgBouncer. It has every database of its server, under the same name."""

    port: int
    log: Path

    def dsn(self, dsn: str) -> str:
        """The dsn of a server's database through the pooler."""
        return make_conninfo(dsn, host="127.0.0.1", port=self.port)


def require_pgbouncer() -> Path:
    """Return the program; skip the calling test where it can't be installed, as without apt-get."""
    try:
        return PROGRAM.install()
    except NotInstallableError as error:
        skip_without("pgbouncer", f"it can't be installed: {error}")


@contextmanager
def pgbouncer(
    folder: Path,
    dsn: str,
    pool_mode: str,
    *,
    ignored: str = COMMON,
    reset_query: str = "DISCARD ALL",
    pool_size: int = 20,
) -> Iterator[Pooler]:
    """Run PgBouncer before the server of the dsn, which is reached over a Unix socket."""
    program, account = require_pgbouncer(), server_programs().account
    given, port = conninfo_to_dict(dsn), free_port()
    folder.mkdir()
    settings = folder / "pgbouncer.ini"
    settings.write_text(
        f"[databases]\n* = host={given['host']} port={given.get('port', 5432)} user={given['user']}\n[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
        f"pool_mode = {pool_mode}\nignore_startup_parameters = {ignored}\n"
        f"server_reset_query = {reset_query}\ndefault_pool_size = {pool_size}\nquery_wait_timeout = 30\n"
        # As PostgreSQL's server, it refuses to work as root; but the program is in root's own cache.
        + (f"user = {account.name}\n" if account else "")
    )
    with running(PROGRAM, [str(program), str(settings)], port, folder / "log", dsn) as pooler:
        yield pooler


@contextmanager
def running(program: DebianProgram, command: list[str], port: int, log: Path, dsn: str) -> Iterator[Pooler]:
    """Run a program that listens on the port before the server of the dsn, once sessions come through it."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            env=os.environ | program.environment(), cwd="/",
        )  # fmt: skip
    try:
        pooler = Pooler(port, log)
        _await(process, pooler, dsn)
        yield pooler
    finally:
        process.terminate()
        process.wait(STOP_SECONDS_MAX)


def _await(process: subprocess.Popen[bytes], pooler: Pooler, dsn: str) -> None:
    """Wait until a session comes to the server."""
    deadline = time.monotonic() + START_SECONDS_MAX
    while True:
        try:
            psycopg.connect(pooler.dsn(dsn)).close()
        except psycopg.OperationalError:
            assert process.poll() is None, pooler.log.read_text()
            assert time.monotonic() < deadline, pooler.log.read_text()
            time.sleep(0.05)
        else:
            return
