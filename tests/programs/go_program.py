"""A program built from source by Go's toolchain."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.programs.cached import INSTALL_SECONDS_MAX, NotInstallableError, cached_path, check_installed, locked
from tests.s3.server import LOG_CHARACTERS_MAX


@dataclass(frozen=True, slots=True)
class GoProgram:
    """A program of a Go module; its name is the last part of `module`."""

    module: str
    version: str

    @property
    def name(self) -> str:
        return self.module.rpartition("/")[2]

    def path(self) -> Path:
        """The path of the program once it is built."""
        return cached_path(self.name, self.version)

    def install(self) -> Path:
        """Build the program unless it exists, and return it; raises NotInstallableError."""
        target = self.path()
        if target.exists():
            return target
        go = shutil.which("go")
        if go is None:
            raise NotInstallableError("there is no Go toolchain on the PATH (go)")
        with locked(target.with_name(f"{target.name}.lock")), tempfile.TemporaryDirectory(dir=target.parent) as folder:
            if not target.exists():
                done = subprocess.run(
                    [go, "install", "-ldflags=-s -w", f"{self.module}@{self.version}"],
                    capture_output=True, text=True, check=False, timeout=INSTALL_SECONDS_MAX,
                    stdin=subprocess.DEVNULL, env=os.environ | {"GOBIN": folder}, cwd=folder,
                )  # fmt: skip
                check_installed(done.returncode, done.stderr[-LOG_CHARACTERS_MAX:])
                (Path(folder) / self.name).replace(target)
        return target
