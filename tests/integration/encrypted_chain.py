"""An encrypted store with a chain: what is in it, the same without encryption, and fleets that have another key."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from cutline.fleet.config import Fleet, load_fleet
from tests.commands.snapshot_runs import Runs

NAME = "sealed"


@dataclass(frozen=True, slots=True)
class EncryptedChain:
    """A full snapshot and two increments of one shard with a standby, in an encrypted folder."""

    runs: Runs
    folder: Path
    states: tuple[dict[str, bytes], ...]

    @property
    def store(self) -> Path:
        """The folder of the store."""
        return self.folder / "store"


def files(store: Path) -> list[Path]:
    """The files of a store in a folder."""
    return sorted(path for path in store.rglob("*") if path.is_file())


def contents(store: Path) -> dict[str, bytes]:
    """What is stored, by key."""
    return {str(path.relative_to(store)): path.read_bytes() for path in files(store)}


def without_key(fleet: Fleet, folder: Path) -> Fleet:
    """The fleet with a fleet.toml in `folder` that names no key."""
    path = folder / "keyless.toml"
    path.write_text(re.sub(r"\[encryption\]\nkey_file = .*\n", "", fleet.path.read_text()))
    return load_fleet(path)


def with_key(chain: EncryptedChain, key: str) -> Fleet:
    """The fleet with another key."""
    file, path = chain.folder / "other", chain.folder / "other.toml"
    file.write_text(key)
    file.chmod(0o600)
    text = chain.runs.fleet.path.read_text()
    path.write_text(re.sub(r"(?m)^key_file = .*$", f"key_file = {json.dumps(str(file))}", text))
    return load_fleet(path)


def in_plain(chain: EncryptedChain) -> Fleet:
    """A copy of the store as it would be without encryption."""
    opened, plain = chain.runs.fleet.store.open(), chain.folder / "plain"
    for key in contents(chain.store):
        if not key.startswith("keys/"):
            put(plain / key, opened.read(key))
    keyless = without_key(chain.runs.fleet, chain.folder).path
    keyless.write_text(keyless.read_text().replace(f"file://{chain.store}", f"file://{plain}"))
    return load_fleet(keyless)


def put(path: Path, body: bytes) -> None:
    """Write a file, and make its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
