"""A store behind TLS, whose certificate a private authority signed; and what the server is asked to encrypt.

Somebody between Cutline and the store has a certificate too, of another authority or for another host.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, load_fleet
from cutline.storage.location import AUTHORITY_VARIABLES
from cutline.storage.open import open_store
from cutline.storage.probe import probe_store
from cutline.storage.s3_client import CertificateFileError
from cutline.storage.s3_create import MULTIPART_BYTES_MIN
from cutline.storage.store import EncryptionIgnoredError, StoreUnreachableError
from tests.certificates.authority import Authority, make_authority
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import configure_fleet, sorted_copies
from tests.integration.conftest import FleetFactory
from tests.run.quick_spark import LINES
from tests.run.soak import SOAK_SECONDS
from tests.s3.proxy import s3_proxy
from tests.s3.server import S3Server, s3_server

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "from cutline.cli.main import main; main()"
COMMAND_SECONDS_MAX = 600
CLUSTER = "local-cluster[2,1,1024]"
RESTORE = ["restore", "daily", "--replace", "--yes"]

HOST = "IP:127.0.0.1"
KMS_KEY = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
ASKED = {"server_side_encryption": "aws:kms", "kms_key_id": KMS_KEY}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def server(authority: Authority) -> Iterator[S3Server]:
    with s3_server(authority.sign("store", alternative=HOST)) as server:
        yield server


@pytest.fixture(autouse=True)
def no_authorities_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in AUTHORITY_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def new_bucket(server: S3Server) -> str:
    return server.bucket(f"tls-{uuid.uuid4().hex[:8]}")


def test_a_store_whose_authority_is_named_passes_the_probe(server: S3Server, authority: Authority) -> None:
    options = server.options | {"ca_file": str(authority.file)}
    assert probe_store(open_store(new_bucket(server), options)) is None


def test_a_server_with_a_certificate_of_another_authority_gets_nothing(server: S3Server, tmp_path: Path) -> None:
    other = make_authority(tmp_path, "another")
    url = new_bucket(server)
    store = open_store(url, server.options | {"ca_file": str(other.file)})
    for ask in (lambda: store.read("a"), lambda: store.create("a", b"rows"), lambda: store.exists("a")):
        with pytest.raises(StoreUnreachableError, match=r"certificate verification failed: \w+ [a-z -]+") as raised:
            ask()
        assert f"(authorities: {other.file})" in raised.value.message
        assert (raised.value.exit_code, "\n" in raised.value.message) == (6, False)
        assert "ca_file" in raised.value.hint
    assert server.client.list_objects_v2(Bucket=url.removeprefix("s3://"))["KeyCount"] == 0


def test_without_a_named_authority_a_private_one_is_not_trusted(server: S3Server) -> None:
    with pytest.raises(StoreUnreachableError, match=r"certificate verification failed: .*included in botocore"):
        open_store(new_bucket(server), server.options).exists("a")


def test_a_certificate_for_another_host_is_refused(authority: Authority) -> None:
    with s3_server(authority.sign("elsewhere", alternative="DNS:elsewhere.example")) as server:
        options = server.options | {"ca_file": str(authority.file)}
        with pytest.raises(StoreUnreachableError, match="certificate verification failed: IP address mismatch"):
            open_store(new_bucket(server), options).exists("a")


def test_a_server_that_does_not_speak_tls_is_named(s3: S3Server) -> None:
    options = s3.options | {"endpoint_url": s3.endpoint_url.replace("http:", "https:")}
    with pytest.raises(StoreUnreachableError, match="no TLS connection: ") as raised:
        open_store(new_bucket(s3), options).exists("a")
    assert raised.value.exit_code == 6


@pytest.mark.parametrize(("content", "problem"), [(None, "No such file or directory"), ("text", "no certificates")])
def test_a_file_without_authorities_is_named_and_no_object_counts_as_missing(
    server: S3Server, tmp_path: Path, content: str | None, problem: str
) -> None:
    file = tmp_path / "ca.pem"
    if content:
        file.write_text(content)
    with pytest.raises(CertificateFileError, match=problem) as raised:
        open_store(new_bucket(server), server.options | {"ca_file": str(file)}).exists("a")
    assert (raised.value.exit_code, str(file) in raised.value.message) == (2, True)


@pytest.mark.skipif(not SOAK_SECONDS, reason="the long form: CUTLINE_SOAK=1")
@pytest.mark.timeout(900)
def test_a_fleet_is_snapshotted_checked_and_restored_through_tls_by_executors_of_their_own(
    server: S3Server, authority: Authority, fleet_factory: FleetFactory, tmp_path: Path
) -> None:
    more = f'[spark]\nmaster = "{CLUSTER}"\n"spark.io.encryption.enabled" = true\n{LINES}'
    options = server.options | {"ca_file": str(authority.file)}
    url = new_bucket(server)
    fleet = configure_fleet(fleet_factory(1), tmp_path / "fleet.toml", url, options, more)
    before = sorted_copies(fleet.primaries[0].dsn)
    for words, code in ((["init"], 0), (["create", "daily"], 0), (["check", "daily"], 4), (RESTORE, 0)):
        assert run(fleet, *words)["code"] == code, words
    assert sorted_copies(fleet.primaries[0].dsn) == before
    # Every process of the executors has another working directory than the command.
    (tmp_path / "ca.pem").write_bytes(authority.file.read_bytes())
    local = options | {"ca_file": "/proc/self/cwd/ca.pem"}
    lacking = configure_fleet_at(fleet, tmp_path / "lacking.toml", options, local)
    for words in ("create second", "check daily", "restore daily --replace --yes"):
        error = run(lacking, *words.split())
        assert (error["code"], error["error"]) == (2, "certificate-file"), error
        assert "can't be used on " in error["message"]
        assert "every machine that runs Spark executors" in error["hint"]


def run(fleet: Fleet, *words: str) -> dict[str, Any]:
    """Run the command as a process in the folder of its fleet.toml; return its document, with the exit code."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--fleet", str(fleet.path), "--json", *words],
        capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX, check=False, cwd=fleet.path.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout, done.stderr
    return {**json.loads(done.stdout), "code": done.returncode}


def configure_fleet_at(fleet: Fleet, path: Path, old: Mapping[str, object], new: Mapping[str, object]) -> Fleet:
    """The same fleet.toml with another ca_file."""
    text = fleet.path.read_text()
    path.write_text(text.replace(str(old["ca_file"]), str(new["ca_file"])))
    return load_fleet(path)


@pytest.mark.parametrize("size", [10, MULTIPART_BYTES_MIN], ids=["put", "parts"])
def test_every_object_is_encrypted_by_the_key_that_was_asked_for(s3: S3Server, size: int) -> None:
    url = new_bucket(s3)
    store = open_store(url, s3.options | ASKED)
    for key in ("a", "b"):
        store.create(key, b"x" * size)
        head = s3.client.head_object(Bucket=url.removeprefix("s3://"), Key=key)
        assert (head["ServerSideEncryption"], head["SSEKMSKeyId"]) == ("aws:kms", KMS_KEY)


@pytest.mark.parametrize("way", ["create", "create_in_parts"])
def test_a_server_that_ignores_the_encryption_is_refused(s3: S3Server, way: str) -> None:
    with s3_proxy(s3.endpoint_url) as proxy:
        proxy.dropped_headers = frozenset({"x-amz-server-side-encryption"})
        store: Any = open_store(new_bucket(s3), s3.options | ASKED | {"endpoint_url": proxy.endpoint_url})
        with pytest.raises(EncryptionIgnoredError, match="is stored unencrypted, although") as raised:
            getattr(store, way)("a", b"rows")
        assert raised.value.exit_code == 3
        with pytest.raises(EncryptionIgnoredError):
            probe_store(store)


def test_init_refuses_a_server_that_ignores_the_encryption(
    s3: S3Server, shared_fleet: EmbeddedFleet, tmp_path: Path
) -> None:
    with s3_proxy(s3.endpoint_url) as proxy:
        proxy.dropped_headers = frozenset({"x-amz-server-side-encryption"})
        options = s3.options | ASKED | {"endpoint_url": proxy.endpoint_url}
        fleet = configure_fleet(shared_fleet, tmp_path / "fleet.toml", new_bucket(s3), options)
        code, document = run_here(fleet, "init")
    assert (code, document["error"]) == (3, "encryption-ignored"), document
