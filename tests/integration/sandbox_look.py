"""Look around in a drill's server, with more power than any code of a snapshot has: as a superuser, by programs.

`python -m tests.integration.sandbox_look FOLDER [PROGRAMS]` prints what was found as JSON, and leaves nothing running.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import psycopg

from cutline.embedded.fleet import stop_fleet
from cutline.embedded.sandbox import SandboxedServer, find_confinement, start_sandboxed

SECRET, SHOWN = "a password", "AWS_SECRET_ACCESS_KEY"
# As long as fleet.toml allows: no path of a socket has room for it beside a few folders.
LONGEST_ID = "s" * 63


def look(folder: Path, programs: Path | None) -> dict[str, Any]:
    """What the server of this user sees; `folder` has a secret of the user's."""
    home = os.environ["HOME"]
    (folder / "probe").mkdir()
    confinement = find_confinement(folder / "probe")
    (folder / "fleet.toml").write_text(SECRET)
    (folder / "fleet.toml").chmod(0o600)
    try:
        (server,) = start_sandboxed(folder / "servers", [LONGEST_ID], confinement, programs, {"fsync": "off"})
        data = server.node.data_directory
        pid = int((data / "postmaster.pid").read_text().split("\n", 1)[0])
        return {
            "namespaces": confinement.namespaces,
            "lacking": confinement.lacking,
            "user": Path(f"/proc/{pid}").stat().st_uid,
            "data": str(data),
            "socket": str(server.node.socket),
            "variables": run_in(server, "env"),
            "secret": run_in(server, f"cat {folder}/fleet.toml"),
            "home": run_in(server, f"ls -A {home}; cat {home}/.pgpass {home}/../etc/key {home}/../etc/for_all"),
            "root": run_in(server, "ls /"),
            "proc": run_in(server, "find /proc"),
            "uuid": refusal_of(server, 'CREATE EXTENSION "uuid-ossp"'),
            "sockets": run_in(server, "ls /run /var/run /tmp"),
            "network": run_in(server, "test -d /sys/class/net && ls /sys/class/net"),
            "mounting": run_in(server, "mount -t tmpfs none /tmp && echo mounted"),
            "writing": run_in(server, f"touch /usr/planted {server.node.folder.parent}/planted && echo written"),
            "refused": refusal(server),
        }
    finally:
        stop_fleet(folder / "servers", delete=True)


def run_in(server: SandboxedServer, command: str) -> list[str]:
    """What a program prints that the server runs."""
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        connection.execute("CREATE TEMP TABLE printed (line text)")
        connection.execute(f"COPY printed FROM PROGRAM $c$({command}) 2>&1; true$c$ (DELIMITER E'\\x01')".encode())
        return [line for (line,) in connection.execute("SELECT line FROM printed")]


def refusal_of(server: SandboxedServer, statement: str) -> str:
    """What its superuser is answered; "" if the statement is executed."""
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        try:
            connection.execute(statement.encode())
        except psycopg.Error as error:
            return str(error)
    return ""


def refusal(server: SandboxedServer) -> str:
    """What the server answers somebody who knows its superuser's name alone; "" if it lets him in."""
    try:
        psycopg.connect(server.dsn("postgres", server.superuser, "guessed")).close()
    except psycopg.OperationalError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    os.environ[SHOWN] = SECRET
    sys.stdout.write(json.dumps(look(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)))
