"""Write libpq's parameters from the environment into a dsn, because executors have a different environment.

Otherwise an executor without PGSSLMODE or PGHOST might connect without TLS, or to a different server, and nobody would
notice. Source: PostgreSQL manual, "Environment Variables" and "SSL Support" of libpq.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

# The parameters that determine the server, the user and the protection; nodes.connections sets all others.
TRANSFERRED = frozenset(
    {
        "host",
        "hostaddr",
        "port",
        "dbname",
        "user",
        "password",
        "passfile",
        "require_auth",
        "channel_binding",
        "sslmode",
        "sslnegotiation",
        "sslcert",
        "sslkey",
        "sslcertmode",
        "sslrootcert",
        "sslcrl",
        "sslcrldir",
        "sslsni",
        "ssl_min_protocol_version",
        "ssl_max_protocol_version",
        "requirepeer",
        "gssencmode",
        "krbsrvname",
        "gsslib",
        "target_session_attrs",
        "load_balance_hosts",
    }
)
# The variables whose values libpq sends to every server, where they override the settings in `options` (libpq's
# fe-protocol3.c, EnvironmentOptions). No parameter of a dsn overrides them.
SETTINGS = ("PGDATESTYLE", "PGTZ", "PGGEQO")
FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl", "passfile")
DEFAULT_AUTHORITIES = ".postgresql/root.crt"


def with_environment(dsn: str) -> str:
    """Return `dsn` with the parameters that libpq takes from this process's environment and from the service file.

    With sslmode=require, libpq verifies the server's certificate if it finds a file of root certificates. In this case
    the mode becomes verify-ca, which fails on machines where the file is missing.
    """
    given = {name: str(value) for name, value in conninfo_to_dict(dsn).items() if value is not None}
    parameters = given | {name: value for name, value in _defaults(given).items() if name not in given}
    if parameters.get("sslmode") == "require" and os.access(_authorities(parameters), os.F_OK):
        parameters["sslmode"] = "verify-ca"
    return dsn if parameters == given else make_conninfo("", **parameters)


def forget_settings() -> None:
    """Remove the SETTINGS from this process's environment, so that they change no session, nor one of pg_dump."""
    for name in SETTINGS:
        os.environ.pop(name, None)


def missing_files(dsn: str) -> str:
    """Name the files in `dsn` that this machine can't read, as the end of a message; "" if it can read all of them."""
    given = conninfo_to_dict(dsn)
    named = [(name, str(given[name])) for name in FILES if given.get(name)]
    lacking = [f"{name} {path}" for name, path in named if path != "system" and not os.access(path, os.R_OK)]
    return f" ({socket.gethostname()} can't read {', '.join(lacking)})" if lacking else ""


def _defaults(given: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters that libpq adds to `given`, from the service if one is named, then from the environment."""
    service = given.get("service") or os.environ.get("PGSERVICE")
    # What kind of server an application looks for says nothing about a host that the dsn names (fleet.config).
    unused = {"target_session_attrs"} if service is None and given.keys() & {"host", "hostaddr"} else set[str]()
    with _service(service):
        options = psycopg.pq.Conninfo.get_defaults()
    defaults: dict[str, str] = {}
    for option in options:
        name = option.keyword.decode()
        is_set = option.envvar is not None and bool(os.environ.get(option.envvar.decode()))
        is_changed = service is not None and option.val != option.compiled
        # Without a user, libpq takes the operating system's user, which differs between machines.
        if name in TRANSFERRED - unused and option.val and (is_set or is_changed or name == "user"):
            defaults[name] = os.fsdecode(option.val)
    return defaults


@contextmanager
def _service(name: str | None) -> Iterator[None]:
    before = os.environ.get("PGSERVICE")
    if name is None or name == before:
        yield
        return
    os.environ["PGSERVICE"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["PGSERVICE"]
        else:
            os.environ["PGSERVICE"] = before


def _authorities(parameters: Mapping[str, str]) -> Path:
    named = parameters.get("sslrootcert")
    return Path(named) if named else Path(os.environ.get("HOME", "/nonexistent")) / DEFAULT_AUTHORITIES
