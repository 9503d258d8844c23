"""Check the files of a release, and print how to publish them: the last step of `make release`.

    python -m tests.run.release dist

`dist` contains the wheel, the sdist and, in `from-sdist`, a wheel that was built from the sdist. Nothing is uploaded.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSION = re.compile(r"\d+\.\d+\.\d+")
HEADING = re.compile(r"(?m)^## (\S+)")
# A wheel's list of files and digests, which differs if any file differs.
RECORD = "RECORD"


def main(folder: Path) -> None:
    """Raise SystemExit with the reason if the release is incomplete or inconsistent."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    problem = changelog_problem((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version) or tree_problem(version)
    if problem:
        raise SystemExit(f"error: {problem}")
    wheel, sdist = folder / f"cutline-{version}-py3-none-any.whl", folder / f"cutline-{version}.tar.gz"
    for path in (wheel, sdist):
        if not path.exists():
            raise SystemExit(f"error: {path} was not built")
    if wheel_files(wheel) != wheel_files(folder / "from-sdist" / wheel.name):
        raise SystemExit("error: the wheel that is built from the sdist has other files than the wheel of the tree")
    if secrets := [name for name in sdist_files(sdist) if name.endswith((".key", ".pem"))]:
        raise SystemExit(f"error: the sdist has {', '.join(secrets)}")
    sys.stdout.write(instructions(version, (wheel, sdist)))


def changelog_problem(text: str, version: str) -> str | None:
    """Return the problem of the changelog; None if its first section is that of `version`."""
    if not VERSION.fullmatch(version):
        return f"the version in pyproject.toml is {version}; a release has three numbers"
    first = HEADING.search(text)
    if first is None or first[1] != version:
        found = first[1] if first else "none"
        return f"the version in pyproject.toml is {version}, and the first section of CHANGELOG.md is {found}"
    return None


def tree_problem(version: str) -> str | None:
    """Return the problem of the working tree; None if all is committed and the tag of `version` does not exist."""
    if changed := _git("status", "--porcelain"):
        return f"commit these changes first:\n{changed}"
    if _git("tag", "--list", f"v{version}"):
        return f"version {version} is released: tag v{version} exists; raise the version in pyproject.toml"
    return None


def wheel_files(wheel: Path) -> dict[str, int]:
    """Return the files in a wheel with their checksums."""
    with zipfile.ZipFile(wheel) as archive:
        return {one.filename: one.CRC for one in archive.infolist() if not one.filename.endswith(RECORD)}


def sdist_files(sdist: Path) -> list[str]:
    with tarfile.open(sdist) as archive:
        return archive.getnames()


def instructions(version: str, files: tuple[Path, ...]) -> str:
    lines = [f"version {version} is ready; nothing was uploaded", ""]
    lines += [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}" for path in files]
    lines += ["", "to publish it:", f"  git tag -a v{version} -m 'Cutline {version}' && git push origin v{version}"]
    lines += [f"  twine upload {' '.join(map(str, files))}", ""]
    return "\n".join(lines)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
