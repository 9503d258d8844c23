"""The digest of Cutline's code: a driver and its executors must run the same.

A version number says too little: a build from another commit may hash, place or fold rows in another way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

# The packages whose code runs in executors.
PACKAGES = ("check", "columns", "fleet", "restore", "snapshots", "storage", "wal")


@cache
def build_digest() -> str:
    """The SHA-256 of all modules of the PACKAGES, with their names, as hex digits; from a folder or an archive."""
    found = hashlib.sha256()
    for package in PACKAGES:
        for name, body in sorted(_modules(package, files("cutline") / package)):
            found.update(f"{name}\0{len(body)}\0".encode() + body)
    return found.hexdigest()


def _modules(name: str, folder: Traversable) -> Iterator[tuple[str, bytes]]:
    for one in folder.iterdir():
        if one.name.endswith(".py"):
            yield f"{name}/{one.name}", one.read_bytes()
        elif one.name.isidentifier() and one.is_dir():
            yield from _modules(f"{name}/{one.name}", one)
