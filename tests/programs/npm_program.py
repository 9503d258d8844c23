"""A program of an npm package, installed into a folder of its own."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.programs.cached import INSTALL_SECONDS_MAX, NotInstallableError, cached_path, check_installed, locked
from tests.s3.server import LOG_CHARACTERS_MAX


@dataclass(frozen=True, slots=True)
class NpmProgram:
    """The program `name` of an npm package, which needs node when it runs."""

    package: str
    version: str
    name: str

    def path(self) -> Path:
        """The path of the program once it is installed."""
        return cached_path(self.package, self.version) / "node_modules" / ".bin" / self.name

    def install(self) -> Path:
        """Install the package unless that is done, and return the program; raises NotInstallableError."""
        target = cached_path(self.package, self.version)
        if self.path().exists():
            return self.path()
        npm = shutil.which("npm")
        if npm is None:
            raise NotInstallableError("there is no npm on the PATH")
        with locked(target.with_name(f"{target.name}.lock")), tempfile.TemporaryDirectory(dir=target.parent) as folder:
            if not target.exists():
                # No script of a package is run: the server needs none.
                done = subprocess.run(
                    [npm, "install", "--prefix", folder, "--ignore-scripts", "--no-audit", "--no-fund",
                     f"{self.package}@{self.version}"],
                    capture_output=True, text=True, check=False, timeout=INSTALL_SECONDS_MAX,
                    stdin=subprocess.DEVNULL, cwd=folder,
                )  # fmt: skip
                check_installed(done.returncode, done.stderr[-LOG_CHARACTERS_MAX:])
                # The folder itself is deleted at the end of the block.
                target.mkdir()
                (Path(folder) / "node_modules").rename(target / "node_modules")
        return self.path()
