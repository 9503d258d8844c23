"""A snapshot of one shard, and a database on the same server that it is restored into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutline.fleet.config import Fleet
from cutline.nodes.connections import with_database
from tests.commands.in_process import run_here
from tests.integration.refusing import execute


@dataclass(frozen=True, slots=True)
class SecondDatabase:
    """The snapshot `snp` of `fleet`; the fleet file of the target; the DSNs of the target and of its server."""

    fleet: Fleet
    spark: Any
    file: Path
    dsn: str
    maintenance: str

    def run(self, command: str, *words: str) -> tuple[int, dict[str, Any]]:
        """Run a restore or what resumes it; return its exit code and its document."""
        return run_here(self.fleet, command, "snp", "--to", str(self.file), *words, spark=self.spark)


@contextmanager
def second_database(fleet: Fleet, name: str, folder: Path, spark: Any) -> Iterator[SecondDatabase]:
    """A target for the snapshot of `fleet` in the database `name`, which is dropped at the end."""
    (primary,) = fleet.primaries
    dsn, maintenance = with_database(primary, name).dsn, with_database(primary, "postgres").dsn
    file = folder / "there.toml"
    file.write_text(f'name = "there"\nstore = "file://{folder}/other"\n[[node]]\nid = "s1"\ndsn = "{dsn}"\n')
    try:
        yield SecondDatabase(fleet, spark, file, dsn, maintenance)
    finally:
        execute(maintenance, f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
