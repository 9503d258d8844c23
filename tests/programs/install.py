"""Install what the tests of more stores run on: `python -m tests.programs.install`, which `make stores` does.

Go builds MinIO and fake-gcs-server, npm installs Azurite, and pip the two file systems into this environment. What
can't be installed here is named, with the reason, and its tests are skipped.
"""

from __future__ import annotations

import subprocess
import sys

from tests.programs.cached import NotInstallableError
from tests.s3 import minio
from tests.stores import azurite, fake_gcs

PACKAGES = (fake_gcs.PACKAGE, azurite.PACKAGE)
PROGRAMS = (minio.PROGRAM, fake_gcs.PROGRAM, azurite.PROGRAM)


def main() -> None:
    """Install everything that is not there yet."""
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    for program in PROGRAMS:
        try:
            line = str(program.install())
        except NotInstallableError as error:
            line = f"{program.name} {program.version} can't be installed: {error}"
        sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
