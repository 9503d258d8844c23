"""A store with snapshots that has lost its fleet.json: every command says so, and the hint ends it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from cutline.fleet.config import Fleet, load_fleet
from tests.commands.in_process import run_here
from tests.kept.stores import CHAIN, FLEET, KEPT
from tests.s3.server import S3Server

IDENTITY = "fleet.json"
# Those that don't need a node before they read the store.
COMMANDS: list[list[str]] = [
    ["list"], ["show", CHAIN], ["check"], ["check", CHAIN, "--metadata-only"], ["restore", CHAIN, "--yes"],
    ["create", CHAIN, "--incremental"], ["status"], ["history"], ["report", "--html", "r.html"],
    ["prune", "--keep-last", "1", "--yes"], ["gc", "--yes"], ["delete", CHAIN, "--yes"],
]  # fmt: skip


def fleet_of(folder: Path, store: str, options: dict[str, object]) -> Fleet:
    given = "".join(f"{name} = {str(value)!r}\n" for name, value in options.items())
    path = folder / "fleet.toml"
    path.write_text(
        f'name = "{FLEET}"\nstore = "{store}"\n[store_options]\n{given}'
        '[[node]]\nid = "s1"\ndsn = "host=127.0.0.1 port=1 dbname=shop"\n'
        '[[node]]\nid = "s2"\ndsn = "host=127.0.0.1 port=1 dbname=shop2"\n'
    )
    return load_fleet(path)


def refusals(fleet: Fleet) -> dict[str, dict[str, Any]]:
    return {" ".join(words): run_here(fleet, *words)[1] for words in COMMANDS}


def check_refusals(found: dict[str, dict[str, Any]]) -> None:
    assert {words: one["error"] for words, one in found.items()} == dict.fromkeys(found, "identity-lost")
    for document in found.values():
        assert (document["code"], document["details"]["object"]) == (3, IDENTITY)
        assert f"object {IDENTITY} is missing from store" in document["message"]
        assert f"which contains snapshots: {CHAIN}" in document["message"]
        assert document["hint"].startswith(f"put {IDENTITY} back from a copy of the store, or restore its last version")
        assert "mount" not in document["hint"]
        assert "init" not in document["hint"]


def test_in_a_folder_it_is_put_back_from_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "store"
    shutil.copytree(KEPT / "plain", folder)
    fleet = fleet_of(tmp_path, f"file://{folder}", {})
    (folder / IDENTITY).unlink()
    before = sorted(path for path in folder.rglob("*") if path.is_file())
    check_refusals(refusals(fleet))
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == before
    # A folder whose file system is not mounted is another matter.
    folder.rename(tmp_path / "unmounted")
    folder.mkdir()
    code, document = run_here(fleet, "list")
    assert (code, document["error"], "mount its file system" in document["hint"]) == (3, "store-not-initialised", True)
    folder.rmdir()
    (tmp_path / "unmounted").rename(folder)
    shutil.copy(KEPT / "plain" / IDENTITY, folder / IDENTITY)
    assert [one["name"] for one in run_here(fleet, "list")[1]["snapshots"]]


def test_in_a_bucket_with_versions_its_last_version_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: S3Server
) -> None:
    monkeypatch.chdir(tmp_path)
    url = s3.bucket("lost-identity", versioned=True)
    bucket = url.removeprefix("s3://").split("/")[0]
    for path in (KEPT / "plain").rglob("*"):
        if path.is_file():
            key = path.relative_to(KEPT / "plain").as_posix()
            s3.client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())
    fleet = fleet_of(tmp_path, f"s3://{bucket}", s3.options)
    s3.client.delete_object(Bucket=bucket, Key=IDENTITY)
    check_refusals(refusals(fleet))
    (mark,) = s3.client.list_object_versions(Bucket=bucket, Prefix=IDENTITY)["DeleteMarkers"]
    s3.client.delete_object(Bucket=bucket, Key=IDENTITY, VersionId=mark["VersionId"])
    assert [one["name"] for one in run_here(fleet, "list")[1]["snapshots"]]
