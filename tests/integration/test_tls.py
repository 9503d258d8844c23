"""With a server that uses TLS, nothing goes in plaintext: pg_dump uses TLS if the other sessions do, or is not run.

The servers are of packages, since the wheel's is built without TLS.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import cutline.nodes.programs as clients
from cutline.embedded.fleet import start_fleet, stop_fleet
from cutline.embedded.server import SUPERUSER, stop_server
from cutline.fleet.config import Fleet, Node
from cutline.nodes.connections import NodeUnreachableError, as_connected, program_connection
from cutline.nodes.programs import ProgramsUnfitError, wheel_bin_directory
from cutline.snapshots.create.initialise import initialise
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, sorted_copies
from tests.commands.watching import Watching
from tests.faults.ports import HOST, free_ports
from tests.integration.refusing import execute
from tests.programs.lacking import skip_without
from tests.servers.installed import MORE_FOLDERS, Server, id_of, server_of
from tests.servers.packages import WHOLE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECONDS_MAX = 60
PASSWORD = secrets.token_hex()


def make_certificate(folder: Path, name: str) -> Path:
    """A self-signed certificate for HOST, and its key beside it."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", f"/CN={HOST}", "-addext", f"subjectAltName=IP:{HOST}"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        capture_output=True, timeout=SECONDS_MAX, check=True,
    )  # fmt: skip
    return certificate


@pytest.fixture(scope="module", params=[*WHOLE, *MORE_FOLDERS], ids=id_of)
def server(request: pytest.FixtureRequest) -> Server:
    return server_of(request.param)


@pytest.fixture(scope="module")
def served(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Path]]:
    """A fleet of one server that accepts only TLS, and its certificate."""
    if not shutil.which("openssl"):
        skip_without("openssl", "it makes the certificates")
    folder = tmp_path_factory.mktemp("tls")
    certificate = make_certificate(folder, "server")
    embedded = start_fleet(
        folder / "fleet", shards=1, backups=0, programs={"s1": server.programs}, settings={"fsync": "off"}
    )
    try:
        (node,) = embedded.primaries
        data = node.data_directory
        for suffix, name in ((".crt", "server.crt"), (".key", "server.key")):
            target = data / name
            target.write_bytes(certificate.with_suffix(suffix).read_bytes())
            owner = data.stat()
            target.chmod(0o600)
            os.chown(target, owner.st_uid, owner.st_gid)
        # PostgreSQL has no TLS over its socket.
        (port,) = free_ports(1)
        chosen = {"ssl": "on", "listen_addresses": HOST, "port": port}
        execute(node.dsn("postgres"), f"ALTER ROLE {SUPERUSER} PASSWORD '{PASSWORD}'")
        execute(node.dsn("postgres"), *(f"ALTER SYSTEM SET {name} = '{value}'" for name, value in chosen.items()))
        (data / "pg_hba.conf").write_text(f"hostssl all all {HOST}/32 scram-sha-256\n")
        stop_server(node)
        embedded.start_node(node)
        fleet = configure_fleet(embedded, folder / "fleet.toml", f"file://{folder}/store")
        yield with_options(fleet, host=HOST, port=str(port), password=PASSWORD), certificate
    finally:
        stop_fleet(folder / "fleet", delete=True)


def with_options(fleet: Fleet, **options: str) -> Fleet:
    return replace(fleet, nodes=tuple(replace(one, dsn=make_conninfo(one.dsn, **options)) for one in fleet.nodes))


@pytest.mark.parametrize("sslmode", ["prefer", "verify-full"])
def test_a_fleet_that_accepts_only_tls_is_snapshotted_and_restored(
    served: tuple[Fleet, Path], server: Server, spark: SparkSession, sslmode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By programs of the server's own version: found on the PATH, or named in fleet.toml."""
    fleet, certificate = served
    ours = with_options(fleet, sslmode=sslmode, **({"sslrootcert": str(certificate)} if sslmode != "prefer" else {}))
    if sslmode == "prefer":
        monkeypatch.setattr(clients, "PACKAGED", ())
        monkeypatch.setenv("PATH", f"{server.programs}{os.pathsep}{os.environ['PATH']}")
    else:
        ours = replace(ours, nodes=tuple(replace(node, programs=server.programs) for node in ours.nodes))
    watching = Watching()
    initialise(ours, watching)
    # The wheel's pg_dump can't connect here.
    assert [note for note in watching.notes if "will be dumped by" in note and str(server.programs) in note]
    runs, name = Runs(ours, Ready(spark)), sslmode.replace("-", "")
    runs.full(name)
    target = with_options(ours, dbname=f"bank_{name}")
    runs.restore(name, target)
    (source,), (copy,) = (node.dsn for node in ours.nodes), (node.dsn for node in target.nodes)
    assert sorted_copies(copy) == sorted_copies(source)


def test_a_certificate_of_another_authority_is_refused(served: tuple[Fleet, Path], tmp_path: Path) -> None:
    other = make_certificate(tmp_path, "other")
    with pytest.raises(NodeUnreachableError, match="certificate verify failed"):
        initialise(with_options(served[0], sslmode="verify-full", sslrootcert=str(other)), Watching())


def test_without_a_pg_dump_that_can_use_tls_init_refuses(
    served: tuple[Fleet, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "installed_folders", list)
    with pytest.raises(
        ProgramsUnfitError, match=r"node s1: there is no pg_dump \d+ or newer that can use TLS"
    ) as raised:
        initialise(served[0], Watching())
    assert (raised.value.exit_code, "set postgresql in [tools]" in raised.value.hint) == (3, True)
    named = replace(served[0], nodes=tuple(replace(one, programs=wheel_bin_directory()) for one in served[0].nodes))
    with pytest.raises(ProgramsUnfitError, match=f"in {wheel_bin_directory()}"):
        initialise(named, Watching())


def test_pg_dump_does_not_fall_back_to_plaintext(served: tuple[Fleet, Path]) -> None:
    """Where the server accepts both, libpq would: after a failed handshake, say."""
    with psycopg.connect(served[0].nodes[0].dsn) as connection:
        assert connection.pgconn.ssl_in_use
        strict = Node("a", make_conninfo(served[0].nodes[0].dsn, sslmode="require"))
        assert conninfo_to_dict(as_connected(strict, connection).dsn)["sslmode"] == "require"
    assert "sslmode=require" in program_connection(served[0].nodes[0], needs_tls=True).conninfo
    assert "sslmode=verify-full" in program_connection(Node("a", "host=h sslmode=verify-full"), needs_tls=True).conninfo
