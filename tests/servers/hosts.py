"""Servers that can be reached by socket, over TCP, and over TCP with TLS.

A server of the embedded fleet listens only on its socket. Here each server also gets its own address of the loopback
network, so that the port can stay the same.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psycopg
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.server import PORT, SUPERUSER, EmbeddedNode, stop_server
from cutline.nodes.sessions import in_parallel
from tests.certificates.authority import Authority, make_authority

Way = Literal["socket", "tcp", "tls"]
WAYS: tuple[Way, ...] = ("socket", "tcp", "tls")


@dataclass(frozen=True, slots=True)
class Hosts:
    """The addresses of a fleet's servers by node, its superuser's password, and the authority of its certificates."""

    addresses: Mapping[str, str]
    password: str
    authority: Path

    def dsn(self, node: EmbeddedNode, database: str, way: Way) -> str:
        """Return the connection string of a database on this node."""
        if way == "socket":
            return node.dsn(database)
        how = {"sslmode": "disable"} if way == "tcp" else {"sslmode": "verify-full", "sslrootcert": str(self.authority)}
        where = {"host": self.addresses[node.id], "port": PORT, "user": SUPERUSER, "password": self.password}
        return make_conninfo("", dbname=database, **where, **how)


def make_reachable(fleet: EmbeddedFleet, folder: Path) -> Hosts:
    """Restart the primaries so that they also listen on an address, with optional TLS."""
    authority, password, free = make_authority(folder), secrets.token_hex(), _free_addresses()
    hosts = Hosts({node.id: next(free) for node in fleet.primaries}, password, authority.file)

    def restart(node: EmbeddedNode) -> None:
        address = hosts.addresses[node.id]
        _install(node, authority, address)
        settings = {"ssl": "on", "ssl_cert_file": "host.crt", "ssl_key_file": "host.key", "listen_addresses": address}
        with psycopg.connect(node.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"ALTER ROLE {SUPERUSER} PASSWORD '{password}'".encode())
            for name, value in settings.items():
                connection.execute(f"ALTER SYSTEM SET {name} = '{value}'".encode())
        lines = ("local all all trust", "host all all 127.0.0.0/8 scram-sha-256", "local replication all trust")
        (node.data_directory / "pg_hba.conf").write_text("".join(f"{line}\n" for line in lines))
        stop_server(node)
        fleet.start_node(node)

    in_parallel(restart, fleet.primaries)
    return hosts


def _install(node: EmbeddedNode, authority: Authority, address: str) -> None:
    certificate, owner = authority.sign(f"host-{node.id}", alternative=f"IP:{address}"), node.data_directory.stat()
    for name, file in (("host.crt", certificate.file), ("host.key", certificate.key)):
        target = node.data_directory / name
        target.write_bytes(file.read_bytes())
        target.chmod(0o600)
        os.chown(target, owner.st_uid, owner.st_gid)


def _free_addresses() -> Iterator[str]:
    """Yield random addresses with a free PORT, because other runs choose theirs at the same time."""
    draw = secrets.SystemRandom()
    while True:
        address = f"127.{draw.randrange(1, 255)}.{draw.randrange(255)}.{draw.randrange(1, 255)}"
        with socket.socket() as probe:
            try:
                probe.bind((address, PORT))
            except OSError:
                continue
        yield address
