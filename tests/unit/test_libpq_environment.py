"""What executors on other machines would take from their own environment is in the dsn; nothing here is contacted."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from cutline.fleet.config import Node, load_fleet
from cutline.fleet.libpq_environment import missing_files, with_environment
from cutline.nodes.connections import conninfo, program_connection


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in os.environ:
        if name.startswith("PG"):
            monkeypatch.delenv(name)


def test_protection_from_the_environment_goes_along_and_the_dsn_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert with_environment("host=h user=u") == "host=h user=u"
    monkeypatch.setenv("PGSSLMODE", "verify-full")
    monkeypatch.setenv("PGSSLROOTCERT", "/ca.pem")
    monkeypatch.setenv("PGOPTIONS", "-c x=y")
    file = tmp_path / "fleet.toml"
    file.write_text('name = "f"\nstore = "/s"\n[[node]]\nid = "a"\ndsn = "host=h user=u"\n')
    (node,) = load_fleet(file).nodes
    assert conninfo_to_dict(node.dsn) == {"host": "h", "user": "u", "sslmode": "verify-full", "sslrootcert": "/ca.pem"}
    assert conninfo_to_dict(with_environment("host=h sslmode=disable"))["sslmode"] == "disable"


def test_a_service_comes_before_the_environment_and_stays_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    services = tmp_path / "services"
    services.write_text("[shop]\nhost=from-service\nsslmode=verify-full\n")
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    monkeypatch.setenv("PGHOST", "from-environment")
    monkeypatch.setenv("PGSSLMODE", "disable")
    found = conninfo_to_dict(with_environment("service=shop dbname=d user=u"))
    assert found == {"service": "shop", "dbname": "d", "user": "u", "host": "from-service", "sslmode": "verify-full"}


def test_the_name_that_libpq_takes_goes_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Executors on other machines may run as another user."""
    assert conninfo_to_dict(with_environment("host=h"))["user"] == getpass.getuser()
    monkeypatch.setenv("PGUSER", "from-environment")
    assert conninfo_to_dict(with_environment("host=h"))["user"] == "from-environment"
    (tmp_path / "services").write_text("[shop]\nuser=from-service\n")
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    assert conninfo_to_dict(with_environment("service=shop"))["user"] == "from-service"


def test_a_certificate_that_is_verified_here_is_verified_where_the_authorities_are_missing(tmp_path: Path) -> None:
    assert with_environment("host=h user=u sslmode=require") == "host=h user=u sslmode=require"
    authorities = tmp_path / ".postgresql" / "root.crt"
    authorities.parent.mkdir()
    authorities.touch()
    assert conninfo_to_dict(with_environment("host=h sslmode=require"))["sslmode"] == "verify-ca"
    assert conninfo_to_dict(with_environment("host=h sslmode=prefer"))["sslmode"] == "prefer"
    named = f"host=h user=u sslmode=require sslrootcert={authorities}"
    assert conninfo_to_dict(with_environment(named))["sslmode"] == "verify-ca"
    assert with_environment(f"{named}.gone") == f"{named}.gone"


def test_files_that_this_machine_lacks_are_named(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    assert missing_files(f"host=h sslcert={tmp_path}/there sslrootcert=system") == ""
    assert f"can't read sslkey {tmp_path}/gone)" in missing_files(f"sslcert={tmp_path}/there sslkey={tmp_path}/gone")


def test_openssl_never_asks_for_a_passphrase_and_programs_get_none() -> None:
    node = Node("a", "host=h sslkey=/k sslcert=/c")
    assert conninfo_to_dict(conninfo(node.dsn))["sslpassword"]
    assert "sslpassword" not in conninfo_to_dict(program_connection(node, needs_tls=True).conninfo)
    # libpq takes the key in its default place, too.
    assert conninfo_to_dict(conninfo("host=h"))["sslpassword"]
    assert "sslpassword" not in conninfo_to_dict(program_connection(Node("a", "host=h"), needs_tls=True).conninfo)
    assert conninfo_to_dict(conninfo("host=h sslkey=/k sslpassword=own"))["sslpassword"] == "own"


def test_no_setting_from_the_environment_reaches_a_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Libpq would send them to each server, after the settings that Cutline's sessions and pg_dump need."""
    monkeypatch.setenv("PGTZ", "Asia/Tokyo")
    monkeypatch.setenv("PGDATESTYLE", "German")
    monkeypatch.setenv("PGAPPNAME", "shop")
    file = tmp_path / "fleet.toml"
    file.write_text('name = "f"\nstore = "/s"\n[[node]]\nid = "a"\ndsn = "host=h user=u"\n')
    load_fleet(file)
    assert {name for name in os.environ if name.startswith("PG")} == {"PGAPPNAME"}
