"""Servers that ask for a certificate of the client: every session has it, of psycopg, ADBC, pg_dump and executors.

The server is PostgreSQL 15 of a package, since the wheel's is built without TLS. A session without a certificate, or
with one for another role, is refused.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cutline.embedded.fleet import start_fleet, stop_fleet
from cutline.embedded.server import stop_server
from cutline.fleet.config import Fleet, load_fleet
from tests.certificates.authority import Authority, Certificate, make_authority
from tests.commands.snapshot_runs import configure_fleet, sorted_copies
from tests.faults.ports import free_ports
from tests.integration.refusing import execute
from tests.run.quick_spark import LINES
from tests.run.soak import SOAK_SECONDS
from tests.servers.installed import require_server

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "from cutline.cli.main import main; main()"
COMMAND_SECONDS_MAX = 600
HOST = "127.0.0.1"
PASSPHRASE = "UNMISTAKABLEpassphrase"
CLUSTER = f'[spark]\nmaster = "local-cluster[2,1,1024]"\n{LINES}\n[tools]\npostgresql = '


@dataclass(frozen=True, slots=True)
class Served:
    """A fleet of one server that accepts only TLS with a certificate of the role; `fleet` has no options of TLS."""

    fleet: Fleet
    authority: Authority
    role: str

    def options(self, client: Certificate, **more: str) -> dict[str, str]:
        """The parameters of a session that shows `client`."""
        files = {"sslrootcert": str(self.authority.file), "sslcert": str(client.file), "sslkey": str(client.key)}
        return {"sslmode": "verify-full", **files, **more}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = require_server(15)
    folder = tmp_path_factory.mktemp("clients")
    authority = make_authority(folder)
    certificate = authority.sign("server", alternative=f"IP:{HOST}")
    embedded = start_fleet(
        folder / "fleet", shards=1, backups=0, programs={"s1": server.programs}, settings={"fsync": "off"}
    )
    try:
        (node,) = embedded.primaries
        data, owner = node.data_directory, node.data_directory.stat()
        installed = (("server.crt", certificate.file), ("server.key", certificate.key), ("root.crt", authority.file))
        for name, file in installed:
            (data / name).write_bytes(file.read_bytes())
            (data / name).chmod(0o600)
            os.chown(data / name, owner.st_uid, owner.st_gid)
        # PostgreSQL has no TLS over its socket.
        (port,) = free_ports(1)
        chosen = {"ssl": "on", "ssl_ca_file": "root.crt", "listen_addresses": HOST, "port": port}
        execute(node.dsn("postgres"), *(f"ALTER SYSTEM SET {name} = '{value}'" for name, value in chosen.items()))
        (data / "pg_hba.conf").write_text(f"hostssl all all {HOST}/32 trust clientcert=verify-full\n")
        stop_server(node)
        embedded.start_node(node)
        more = CLUSTER + json.dumps(str(server.programs))
        fleet = configure_fleet(embedded, folder / "fleet.toml", f"file://{folder}/store", more=more)
        served = Served(fleet, authority, str(conninfo_to_dict(fleet.nodes[0].dsn)["user"]))
        yield replace(served, fleet=with_options(served, folder / "served.toml", host=HOST, port=str(port)))
    finally:
        stop_fleet(folder / "fleet", delete=True)


@pytest.fixture(scope="module")
def client(served: Served) -> Certificate:
    return served.authority.sign(served.role)


def with_options(served: Served, path: Path, **options: str) -> Fleet:
    """The fleet.toml with a dsn that has `options`."""
    dsn = json.dumps(make_conninfo(served.fleet.nodes[0].dsn, **options))
    path.write_text(re.sub(r"(?m)^dsn = .*$", lambda _: f"dsn = {dsn}", served.fleet.path.read_text()))
    return load_fleet(path)


def run(fleet: Fleet, *words: str) -> dict[str, Any]:
    """Run the command as a process in the folder of its fleet.toml; return its document, with the exit code."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--fleet", str(fleet.path), "--json", *words],
        capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX, check=False, cwd=fleet.path.parent,
        stdin=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert PASSPHRASE not in done.stdout + done.stderr
    assert done.stdout, done.stderr
    return {**json.loads(done.stdout), "code": done.returncode}


@pytest.mark.skipif(not SOAK_SECONDS, reason="the long form: CUTLINE_SOAK=1")
@pytest.mark.timeout(900)
def test_a_fleet_that_asks_for_certificates_is_snapshotted_and_restored_by_executors(
    served: Served, client: Certificate, tmp_path: Path
) -> None:
    fleet = with_options(served, tmp_path / "fleet.toml", **served.options(client))
    before = sorted_copies(fleet.nodes[0].dsn)
    for words in (
        ["init"],
        ["create", "daily"],
        ["create", "daily", "--incremental"],
        ["restore", "daily", "--replace", "--yes"],
    ):
        document = run(fleet, *words)
        assert document["code"] == 0, document
    assert sorted_copies(fleet.nodes[0].dsn) == before
    # Every process of the executors has another working directory than the command.
    for file in (client.file, client.key):
        (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / file.name).chmod(0o600)
    here = Certificate(Path("/proc/self/cwd") / client.file.name, Path("/proc/self/cwd") / client.key.name)
    lacking = run(with_options(served, tmp_path / "lacking.toml", **served.options(here)), "create", "second")
    assert lacking["code"] == 6, lacking
    assert f"can't read sslcert {here.file}, sslkey {here.key})" in lacking["message"]


def test_without_a_certificate_or_with_that_of_another_role_nothing_is_read(
    served: Served, client: Certificate, tmp_path: Path
) -> None:
    fleet = with_options(served, tmp_path / "a.toml", sslmode="verify-full", sslrootcert=str(served.authority.file))
    document = run(fleet, "init")
    assert (document["code"], "valid client certificate" in document["message"]) == (6, True), document
    other = served.authority.sign("somebody")
    document = run(with_options(served, tmp_path / "b.toml", **served.options(other)), "init")
    assert (document["code"], document["error"]) == (6, "node-unreachable"), document
    foreign = make_authority(tmp_path, "foreign").sign(served.role)
    document = run(with_options(served, tmp_path / "c.toml", **served.options(foreign)), "init")
    assert (document["code"], document["error"]) == (6, "node-unreachable"), document


@pytest.mark.parametrize(
    ("mode", "reason"), [(0o644, "group or world access"), (None, "can't read sslkey")], ids=["open", "missing"]
)
def test_a_key_that_libpq_does_not_take_is_named(
    served: Served, client: Certificate, tmp_path: Path, mode: int | None, reason: str
) -> None:
    key = tmp_path / "client.key"
    if mode:
        key.write_bytes(client.key.read_bytes())
        key.chmod(mode)
    fleet = with_options(served, tmp_path / "fleet.toml", **served.options(Certificate(client.file, key)))
    document = run(fleet, "init")
    assert (document["code"], document["error"]) == (6, "node-unreachable"), document
    assert reason in document["message"]
    assert str(key) in document["message"]


def test_an_encrypted_key_is_refused_at_once_and_its_passphrase_is_not_shown(served: Served, tmp_path: Path) -> None:
    encrypted = served.authority.sign(served.role.upper(), passphrase=PASSPHRASE)
    for number, given in enumerate(({}, {"sslpassword": f"{PASSPHRASE}-wrong"})):
        fleet = with_options(served, tmp_path / f"{number}.toml", **served.options(encrypted, **given))
        document = run(fleet, "init")
        assert (document["code"], document["error"]) == (6, "node-unreachable"), document
        assert "could not load private key file" in document["message"]


def test_an_encrypted_key_in_the_default_place_asks_no_terminal(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encrypted = served.authority.sign(served.role.upper(), passphrase=PASSPHRASE)
    default = tmp_path / ".postgresql"
    default.mkdir()
    (default / "postgresql.crt").write_bytes(encrypted.file.read_bytes())
    (default / "postgresql.key").write_bytes(encrypted.key.read_bytes())
    (default / "postgresql.key").chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    options = {"sslmode": "verify-full", "sslrootcert": str(served.authority.file)}
    fleet = with_options(served, tmp_path / "fleet.toml", **options)
    controller, terminal = os.openpty()
    program = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY); from cutline.cli.main import main; main()"
    command = [sys.executable, "-c", program, "--fleet", str(fleet.path), "--json", "init"]
    done = subprocess.run(
        command, stdin=terminal, capture_output=True, text=True, timeout=60, check=False, start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    os.close(terminal)
    os.close(controller)
    assert (done.returncode, "could not load private key file" in done.stdout) == (6, True), done


def test_a_passphrase_in_the_dsn_is_refused_before_pg_dump_could_show_it(served: Served, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    folder.mkdir()
    plain = served.authority.sign(served.role)
    encrypted = Certificate(plain.file, folder / "client.key")
    encrypt = ["openssl", "pkcs8", "-topk8", "-passout", f"pass:{PASSPHRASE}"]
    subprocess.run([*encrypt, "-in", str(plain.key), "-out", str(encrypted.key)], check=True, timeout=60)
    encrypted.key.chmod(0o600)
    options = served.options(encrypted, sslpassword=PASSPHRASE)
    psycopg.connect(make_conninfo(served.fleet.nodes[0].dsn, **options)).close()
    document = run(with_options(served, tmp_path / "fleet.toml", **options), "init")
    assert (document["code"], document["error"]) == (2, "usage"), document
    assert "the dsn contains sslpassword" in document["message"]
