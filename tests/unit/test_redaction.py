"""No text of an error shows a secret that this process knows, however libpq or a server spells it."""

from __future__ import annotations

import base64
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cutline.fleet.config import FleetFileError, Node, load_fleet, remember_secret_settings
from cutline.nodes.connections import unreachable_error
from cutline.storage.errors import SnapshotError, error_of, redact, report_of

PASSWORD = "Unmistakable%40@ '\\:é/"
FILE = 'name = "x"\nstore = "memory://x"\n[[node]]\nid = "a"\ndsn = "{}"\n'


def load(tmp_path: Path, dsn: str) -> Node:
    path = tmp_path / "fleet.toml"
    path.write_text(FILE.format(dsn.replace("\\", "\\\\")))
    return load_fleet(path).nodes[0]


@pytest.mark.parametrize("spelling", ["uri", "key and value", "variable", "environment", "service"])
def test_an_error_that_quotes_a_password_hides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    monkeypatch.setattr("cutline.storage.errors._secrets", set())
    monkeypatch.setenv("NODE_PASSWORD", PASSWORD)
    if spelling == "environment":
        monkeypatch.setenv("PGPASSWORD", PASSWORD)
    (tmp_path / "services").write_text(f"[shop]\npassword={PASSWORD}\n")
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    dsn = {
        "uri": f"postgresql://u:{quote(PASSWORD, safe='')}@h/shop",
        "key and value": make_conninfo("", host="h", user="u", password=PASSWORD),
        "variable": "host=h password=${NODE_PASSWORD}",
        "environment": "host=h",
        "service": "host=h service=shop",
    }[spelling]
    node = load(tmp_path, dsn)
    assert PASSWORD not in repr(node)
    texts = [PASSWORD, make_conninfo("", password=PASSWORD), f"u:{quote(PASSWORD, safe='')}@h"]
    for text in texts:
        assert "Unmistakable" not in redact(f"before {text} after")
        error = unreachable_error(node, psycopg.OperationalError(f"can't reach {text}"))
        quoting = SnapshotError("it failed", hint=f"use {text}", details={"texts": [text], "more": {"text": text}})
        for one in (error, quoting, error_of(report_of(quoting))):
            assert "Unmistakable" not in f"{one} {one.message} {one.hint} {one.details}"


def test_a_password_that_is_said_in_the_clear_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The password of postgres is often postgres; without this, no message would name the role."""
    monkeypatch.setattr("cutline.storage.errors._secrets", set())
    load(tmp_path, "postgresql://postgres:postgres@h/shop")
    load(tmp_path, "postgresql://u:p@h/shop")
    monkeypatch.setenv("PGPASSWORD", "postgres")
    load(tmp_path, "host=h user=postgres")
    monkeypatch.setenv("PGUSER", "postgres")
    load(tmp_path, "host=h")
    assert redact('ALTER ROLE "postgres" REPLICATION;') == 'ALTER ROLE "postgres" REPLICATION;'


@pytest.mark.parametrize("password", ["snapshot", "123456"])
def test_a_password_that_is_a_word_or_a_number_is_not_hidden_as_a_part_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, password: str
) -> None:
    monkeypatch.setattr("cutline.storage.errors._secrets", set())
    monkeypatch.setenv("PGPASSWORD", password)
    load(tmp_path, "host=h user=u")
    assert redact(f"{password}s _{password} x{password}") == f"{password}s _{password} x{password}"
    assert redact(f"u:{password}@h password={password}") == "u:***@h password=***"


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://u:SECRET@SECRET@h/shop",
        "postgresql://u:SECRET/SECRET@h/shop",
        "postgresql://u:1234/SECRET@h/shop",
        "postgresql://u:SECRET",
        "postgresql://u@h/shop@SECRET",
        "postgres://u:SECRET/shop",
        "postgresql://u:SECRET@SECRET@h/shop?application_name=a@b",
        "postgresql://u:1234/SECRET@h/shop?application_name=a@b",
    ],
)
def test_a_uri_in_which_a_password_is_taken_for_a_host_a_port_or_a_database_is_refused(
    tmp_path: Path, dsn: str
) -> None:
    """libpq's errors name hosts, ports and databases."""
    with pytest.raises(FleetFileError, match="write special characters as %XX") as refused:
        load(tmp_path, dsn)
    assert "SECRET" not in f"{refused.value} {refused.value.hint} {refused.value.__cause__}"


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://u@/shop",
        "postgresql://h:5432,i:5433/shop?user=u&target_session_attrs=any",
        "postgresql://u:p%40@[::1]:5/shop?host=/a%40b",
        "postgresql:///shop?user=backup@tenant&host=h",
        "postgresql:///shop?host=@pg&user=u",
        "postgresql://u:p@h/shop?application_name=a@b",
        "postgresql://u@h/shop?sslkey=/k/a@b.key",
    ],
)
def test_other_uris_are_taken_as_they_are(tmp_path: Path, dsn: str) -> None:
    assert load(tmp_path, dsn).dsn == dsn


def test_an_error_shows_no_secret_of_settings_and_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutline.storage.errors._secrets", set())
    key = base64.b64encode(bytes(range(32))).decode()
    monkeypatch.setenv("STORE_KEY", f" {key}\n")
    path = tmp_path / "fleet.toml"
    path.write_text(
        'name = "x"\nstore = "memory://x"\n[[node]]\nid = "a"\ndsn = "host=h"\n'
        '[store_options]\nsecret = "of-the-store"\n[store_options.client]\ntoken = "of-the-client"\n'
        '[spark]\n"hadoop.fs.s3a.secret.key" = "k3y-k3y"\n"authenticate.secret.file" = "/run/file"\n'
        '"driver.extraJavaOptions" = "-Dx.password=\'of the-jvm\' -Dy=visible"\ny = "visible"\n'
        '[encryption]\nkey_variable = "STORE_KEY"\n'
    )
    encryption = load_fleet(path).encryption
    assert encryption is not None
    assert encryption.read_key()
    for secret in ("of-the-store", "of-the-client", "k3y-k3y", "of the-jvm", key):
        assert redact(f"visible {secret}, /run/file") == "visible ***, /run/file"


@pytest.mark.parametrize(
    "name",
    ["passwd", "passphrase", "credential", "account_key", "account.key", "api-key", "keyStorePass", "trustStore.pass",
     "connection_string", "accessKey", "token", "secret"],
)  # fmt: skip
def test_a_setting_is_a_secret_by_what_its_name_says(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("cutline.storage.errors._secrets", set())
    remember_secret_settings(
        {f"fs.x.{name}": "unmistakable1", "executor.extraJavaOptions": f"-Dx.{name}=unmistakable2"}
    )
    remember_secret_settings({"fs.x.region": "eu-central-1"})
    assert redact("unmistakable1 unmistakable2 eu-central-1") == "*** *** eu-central-1"
