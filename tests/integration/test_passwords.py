"""A password, wherever it is written and whatever is in it, reaches the servers and comes out nowhere.

The server asks for it. It stands in the dsn as a URI and as key=value, in a variable, a password file, a service file
and the environment; every command uses it, in processes of their own, and fails with it in several ways. It is searched
for in everything that they print and leave, Spark's event logs included.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.embedded.server import PORT, SUPERUSER, stop_server
from cutline.fleet.config import Node
from cutline.nodes.connections import connect
from cutline.nodes.encodings import RAW
from tests.faults.ports import HOST, free_ports
from tests.run.command_lines import recording, seen_programs
from tests.run.quick_spark import LINES
from tests.run.soak import SOAK_SECONDS
from tests.servers.dealt import start_fleet

COMMAND_SECONDS_MAX = 600
ROOT = Path(__file__).resolve().parents[2]
# With Spark, whose command lines are looked at, too.
MAIN = "from tests.run.by_spark import work_by_spark; work_by_spark(); from cutline.cli.main import main; main()"
# Either part is also found where the rest is escaped, or taken for another parameter.
PARTS = [f"UNMISTAKABLE{part}{uuid.uuid4().hex}" for part in ("HEAD", "TAIL")]
PASSWORD = f"{PARTS[0]}%40@ '\\:é/{PARTS[1]}"
WRONG = f"{PARTS[0]}wrong/{PARTS[1]}"


@dataclass(slots=True)
class Place:
    """A server that asks for a password, the folder of the inputs, and everything that the commands leave."""

    servers: EmbeddedFleet
    inputs: Path
    left: Path
    lines: set[bytes] = field(default_factory=set)
    outputs: dict[str, bytes] = field(default_factory=dict)

    @property
    def socket_folder(self) -> Path:
        return self.servers.primaries[0].folder

    def describe(self, name: str, dsn: str) -> Path:
        """Write a fleet.toml whose one node has this dsn."""
        quoted = dsn.replace("\\", "\\\\").replace('"', '\\"')
        path = self.inputs / f"{name}.toml"
        events = f'"eventLog.enabled" = true\n"eventLog.dir" = "file://{self.left}/events"\n'
        store = f'name = "secrets"\nstore = "file://{self.left}/store-{name}"\n'
        path.write_text(f'{store}[spark]\n{LINES}{events}[[node]]\nid = "a"\ndsn = "{quoted}"\n')
        return path

    def run(self, fleet: Path, *words: str, **environment: str) -> int:
        """Run `snapshot …` as a process; return its exit code."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
        variables = inherited | {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.left / "tmp")} | environment
        command = [sys.executable, "-c", MAIN, "--fleet", str(fleet), "--verbose", *words]
        with recording(self.lines):
            done = subprocess.run(
                command, capture_output=True, timeout=COMMAND_SECONDS_MAX, env=variables, check=False, cwd=self.left
            )
        self.outputs[f"{len(self.outputs)} {' '.join(words)}"] = done.stdout + done.stderr
        return done.returncode

    def last_output(self) -> str:
        return list(self.outputs.values())[-1].decode()

    def everything(self) -> Iterator[tuple[str, bytes]]:
        """Yield everything in which the password could be, with its place."""
        yield from self.outputs.items()
        for line in self.lines:
            yield f"a command line: {line[:60]!r}", line
        for node in self.servers.nodes:
            yield "the server's log", node.log_file.read_bytes()
        for path in self.left.rglob("*"):
            if path.is_file():
                yield str(path), path.read_bytes()

    def check_nothing_came_out(self) -> None:
        found = [
            f"{part[:16]} in {where}" for where, text in self.everything() for part in PARTS if part.encode() in text
        ]
        assert not found, found


@pytest.fixture(scope="module")
def place(module_fleet: EmbeddedFleet, tmp_path_factory: pytest.TempPathFactory) -> Place:
    inputs, left = tmp_path_factory.mktemp("inputs"), tmp_path_factory.mktemp("left")
    for name in ("tmp", "events"):
        (left / name).mkdir()
    return Place(module_fleet, inputs, left)


@pytest.fixture(scope="module")
def module_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    """A server that asks its only user for PASSWORD."""
    directory = tmp_path_factory.mktemp("asking") / "fleet"
    fleet = start_fleet(directory, shards=1, backups=0, settings={"fsync": "off"})
    try:
        (node,) = fleet.primaries
        with psycopg.connect(node.dsn(), autocommit=True) as connection:
            hashed = connection.pgconn.encrypt_password(
                PASSWORD.encode(), SUPERUSER.encode(), b"scram-sha-256"
            ).decode()
            connection.execute(f"ALTER ROLE {SUPERUSER} PASSWORD '{hashed}'")
        (node.data_directory / "pg_hba.conf").write_text("local all all scram-sha-256\nlocal replication all reject\n")
        stop_server(node)
        fleet.start_node(node)
        with pytest.raises(psycopg.OperationalError, match="no password"):
            psycopg.connect(node.dsn())
        yield fleet
    finally:
        stop_fleet(directory, delete=True)


Spelling = tuple[str, dict[str, str]]


def as_uri(place: Place) -> Spelling:
    user = f"{SUPERUSER}:{quote(PASSWORD, safe='')}"
    return f"postgresql://{user}@/bank?host={place.socket_folder}&port={PORT}", {}


def as_key_and_value(place: Place) -> Spelling:
    return make_conninfo("", host=str(place.socket_folder), user=SUPERUSER, dbname="bank", password=PASSWORD), {}


def as_variable(place: Place) -> Spelling:
    dsn = f"postgresql://{SUPERUSER}:${{NODE_PASSWORD}}@/bank?host={place.socket_folder}"
    return dsn, {"NODE_PASSWORD": PASSWORD}


def without_password(place: Place, **more: str) -> str:
    return make_conninfo("", host=str(place.socket_folder), user=SUPERUSER, dbname="bank", **more)


def in_a_password_file(place: Place) -> Spelling:
    path = place.inputs / "passwords"
    escaped = PASSWORD.replace("\\", "\\\\").replace(":", "\\:")
    path.write_text(f"*:*:*:*:{escaped}\n")
    path.chmod(0o600)
    return without_password(place, passfile=str(path)), {}


def in_a_service_file(place: Place) -> Spelling:
    path = place.inputs / "services"
    path.write_text(f"[shop]\nhost={place.socket_folder}\nuser={SUPERUSER}\ndbname=bank\npassword={PASSWORD}\n")
    return "service=shop dbname=bank", {"PGSERVICEFILE": str(path)}


def in_the_environment(place: Place) -> Spelling:
    return without_password(place), {"PGPASSWORD": PASSWORD}


SPELLINGS: list[Callable[[Place], Spelling]] = [
    as_uri, as_key_and_value, as_variable, in_a_password_file, in_a_service_file, in_the_environment,
]  # fmt: skip


@pytest.mark.skipif(not SOAK_SECONDS, reason="the long form: CUTLINE_SOAK=1")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_command_reaches_the_server_and_shows_no_password(
    place: Place, spelling: Callable[[Place], Spelling]
) -> None:
    dsn, environment = spelling(place)
    fleet = place.describe(spelling.__name__, dsn)
    expected = {
        "init": 0,
        "create daily": 0,
        "create daily --incremental --json": 0,
        "check daily --junit check.xml": 4,  # nothing to compare with
        "list --json": 0,
        "restore daily --replace --yes": 0,
        "show daily": 0,
        "create again": 0,
        "prune --keep-last 1 --yes": 0,
        "delete daily --force --yes": 0,
        "gc --yes": 0,
        "resume": 0,
    }
    for words, code in expected.items():
        assert place.run(fleet, *words.split(), **environment) == code, place.last_output()
    assert list((place.left / "events").rglob("*"))
    assert {"pg_dump", "pg_restore", "java"} <= seen_programs(place.lines)
    place.check_nothing_came_out()


def test_a_session_of_any_encoding_takes_a_password_of_any_letters(place: Place) -> None:
    dsn, _ = as_key_and_value(place)
    with connect(Node("a", dsn), client_encoding=RAW) as session:
        assert session.execute("SELECT 1").fetchone() == (1,)


def test_failures_show_no_password(place: Place) -> None:
    (port,) = free_ports(1)
    there = f"@/bank?host={place.socket_folder}&port={PORT}"
    failures = {
        "wrong": (f"postgresql://{SUPERUSER}:{quote(WRONG, safe='')}{there}", 6),
        "unreachable": (f"postgresql://{SUPERUSER}:{quote(PASSWORD, safe='')}@{HOST}:{port}/bank", 6),
        "at": (f"postgresql://{SUPERUSER}:{PARTS[0]}@{PARTS[1]}@{HOST}:{port}/bank", 2),
        "slash": (f"postgresql://{SUPERUSER}:{PARTS[0]}/{PARTS[1]}@{HOST}:{port}/bank", 2),
        "nohost": (f"postgresql://{SUPERUSER}:{PARTS[0]}", 2),
        "percent": (f"postgresql://{SUPERUSER}:{PARTS[0]}%{PARTS[1]}{there}", 2),
        "space": (f"user={SUPERUSER} password={PARTS[0]} {PARTS[1]} dbname=bank", 2),
        "quote": (f"user={SUPERUSER} password='{PARTS[0]} dbname=bank", 2),
    }
    for name, (dsn, code) in failures.items():
        assert place.run(place.describe(name, dsn), "init") == code, place.last_output()
        assert ("password authentication failed" in place.last_output()) == (name == "wrong")
    place.check_nothing_came_out()


@contextmanager
def quoting_server(message: str) -> Iterator[int]:
    """Run a server that answers every session with this error; yields its port."""
    fields = b"SFATAL\0C08006\0M" + message.encode() + b"\0\0"
    answer = b"E" + struct.pack("!I", 4 + len(fields)) + fields

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                session, _ = listener.accept()
            except OSError:
                return
            with session:
                # A request for TLS or GSSAPI has 8 bytes.
                while len(session.recv(4096)) == 8:
                    session.sendall(b"N")
                session.sendall(answer)

    with socket.create_server((HOST, 0)) as listener:
        thread = threading.Thread(target=serve, args=[listener])
        thread.start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize("in_file", [False, True], ids=["in the dsn", "in a password file"])
def test_a_server_that_quotes_what_it_was_given_does_not_make_commands_show_it(place: Place, *, in_file: bool) -> None:
    """As a pooler does whose own connection fails: it repeats the connection string in its error."""
    text = make_conninfo("", host="pooled", password=PASSWORD)
    with quoting_server(f"cannot connect with {text} ({quote(PASSWORD, safe='')})") as port:
        dsn = f"postgresql://{SUPERUSER}:{quote(PASSWORD, safe='')}@{HOST}:{port}/bank"
        if in_file:
            dsn, _ = in_a_password_file(place)
            dsn = make_conninfo(dsn, host=HOST, port=str(port))
        fleet = place.describe(f"quoting-{in_file}", dsn)
        for words in (["init"], ["init", "--json"]):
            assert place.run(fleet, *words) == 6, place.last_output()
            assert "cannot connect with" in place.last_output()
    place.check_nothing_came_out()
