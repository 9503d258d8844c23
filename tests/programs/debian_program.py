"""A program of Debian's packages, unpacked into a folder of its own: that needs apt-get, and no root."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.programs.cached import INSTALL_SECONDS_MAX, NotInstallableError, cached_path, locked
from tests.s3.server import LOG_CHARACTERS_MAX

# The machines for which digests are pinned.
MACHINE = "x86_64"


@dataclass(frozen=True, slots=True)
class DebianPackage:
    """One package, and the digest of its file."""

    name: str
    version: str
    sha256: str


@dataclass(frozen=True, slots=True)
class DebianProgram:
    """The program at `path` within the first of the packages; the others have libraries that it needs."""

    packages: tuple[DebianPackage, ...]
    path: str

    @property
    def name(self) -> str:
        return self.packages[0].name

    def folder(self) -> Path:
        """The folder of the program once it is installed."""
        return cached_path(self.name, self.packages[0].version)

    def environment(self) -> dict[str, str]:
        """What the program needs in its environment."""
        libraries = [str(one) for one in sorted(self.folder().glob("usr/lib/*-linux-gnu"))]
        return {"LD_LIBRARY_PATH": os.pathsep.join(libraries)}

    def install(self) -> Path:
        """Unpack the packages unless that is done, and return the program; raises NotInstallableError."""
        target = self.folder()
        if not (target / self.path).exists():
            with locked(target.with_name(f"{target.name}.lock")):
                if not (target / self.path).exists():
                    self._unpack(target)
        return target / self.path

    def _unpack(self, target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            unpacked = Path(folder) / "unpacked"
            unpack_packages(self.packages, unpacked, Path(folder))
            # Another account runs the server.
            unpacked.chmod(0o755)
            unpacked.rename(target)


def unpack_packages(packages: Iterable[DebianPackage], target: Path, folder: Path) -> None:
    """Download the packages into the folder, and unpack them into another one; raises NotInstallableError."""
    if platform.machine() != MACHINE:
        raise NotInstallableError(f"no package is pinned for {platform.machine()}")
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise NotInstallableError("there is neither apt-get nor dpkg-deb on the PATH")
    for package in packages:
        _run(["dpkg-deb", "-x", str(_download(package, folder)), str(target)], folder)


def _download(package: DebianPackage, folder: Path) -> Path:
    """Download the package; only bytes with the pinned digest are used."""
    command = ["apt-get", "download", f"{package.name}={package.version}"]
    # Without lists of the machine's own, as in a new container, with lists in the folder.
    own = [f"Dir::State::Lists={folder}/lists", f"Dir::Cache={folder}/cache", "Debug::NoLocking=1"]
    options = [word for one in own for word in ("-o", one)]
    (folder / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (folder / "cache" / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    try:
        _run(command, folder)
    except NotInstallableError:
        _run(["apt-get", "update", *options], folder)
        _run([*command, *options], folder)
    (archive,) = folder.glob(f"{package.name}_*.deb")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != package.sha256:
        raise ValueError(f"{archive.name} has the digest {digest}, and {package.sha256} is pinned")
    return archive


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=INSTALL_SECONDS_MAX, stdin=subprocess.DEVNULL,
        cwd=folder, env=os.environ | {"LC_ALL": "C"},
    )  # fmt: skip
    if done.returncode:
        raise NotInstallableError(f"{' '.join(command[:3])}: {(done.stderr or done.stdout)[-LOG_CHARACTERS_MAX:]}")
