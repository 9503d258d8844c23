"""HAProxy before a server of the tests, passing bytes on as it does for Patroni."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from tests.poolers.pgbouncer import Pooler, running
from tests.programs.cached import NotInstallableError
from tests.programs.debian_program import DebianPackage, DebianProgram
from tests.programs.lacking import skip_without
from tests.s3.server import free_port

PROGRAM = DebianProgram(
    (
        DebianPackage(
            "haproxy", "2.6.12-1+deb12u4", "97ca097d12b43fc5cb1b17aa5e84957735ef312a2e02cf8a99512fa1abe8a955"
        ),
        DebianPackage("liblua5.3-0", "5.3.6-2", "576ad8ef2e9f6ad21f29f0c90dac17448deefee8f3912877c2a0911b77e5d3ca"),
        DebianPackage(
            "libopentracing-c-wrapper0",
            "1.1.3-3+b1",
            "68013bf6296a776923622c871bed26bc7b6bfe5f84b0fa2707a06382d1db2692",
        ),
        DebianPackage("libopentracing1", "1.6.0-4", "af62b62a99979253a79e3443f7dabe13f1f33bc2fc024f99039e3868a67f26f4"),
    ),
    "usr/sbin/haproxy",
)


@contextmanager
def haproxy(folder: Path, dsn: str, timeout: str) -> Iterator[Pooler]:
    """Run HAProxy before the server of the dsn, which is reached over a Unix socket; it ends silent connections."""
    try:
        program = PROGRAM.install()
    except NotInstallableError as error:
        skip_without("haproxy", f"it can't be installed: {error}")
    given, port = conninfo_to_dict(dsn), free_port()
    folder.mkdir()
    settings = folder / "haproxy.cfg"
    settings.write_text(
        "global\n    maxconn 200\ndefaults\n    mode tcp\n    timeout connect 5s\n"
        f"    timeout client {timeout}\n    timeout server {timeout}\n"
        f"listen primary\n    bind 127.0.0.1:{port}\n"
        f"    server primary unix@{given['host']}/.s.PGSQL.{given.get('port', 5432)}\n"
    )
    with running(PROGRAM, [str(program), "-f", str(settings), "-db"], port, folder / "log", dsn) as pooler:
        yield pooler
