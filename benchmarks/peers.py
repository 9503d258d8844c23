"""PostgreSQL's own tools for the same tasks, run as they would be to back up one node."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shard import EXCLUDED, Shard
from cutline.nodes.programs import run_tool

SLOT = PUBLICATION = "bench_peer"
PUBLISHED = "public.pgbench_accounts, public.pgbench_branches, public.pgbench_tellers"
SECONDS_MAX = 3600


def size_bytes(folder: Path) -> int:
    """Return the size of all files in `folder`, in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@dataclass(slots=True)
class Peers:
    """The tools on one shard; they write to `folder` and keep the last backup for the next increment."""

    shard: Shard
    folder: Path
    backups: int = 0

    def dump(self, name: str) -> Path:
        """Dump all tables that Cutline copies with pg_dump."""
        target = self._clear(name)
        how = ["--format=directory", "--jobs=2", "--compress=gzip:1", f"--exclude-table={EXCLUDED}"]
        run_tool("pg_dump", *how, f"--file={target}", self.shard.dsn, seconds_max=SECONDS_MAX)
        return target

    def restore(self, dump: Path, database: str) -> str:
        """Restore a dump into a new database with pg_restore."""
        dsn = self.shard.create_database(database)
        run_tool("pg_restore", "--jobs=2", "--exit-on-error", f"--dbname={dsn}", str(dump), seconds_max=SECONDS_MAX)
        return dsn

    def follow(self) -> None:
        """Create the slot that pg_recvlogical drains, and take the backup on which the increments build."""
        self.shard.ask(f"CREATE PUBLICATION {PUBLICATION} FOR TABLE {PUBLISHED}")
        # As in Cutline's slots, prepared transactions are decoded at PREPARE.
        self.shard.ask(f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput', false, true)")
        self._base_backup()

    def drain(self) -> Path:
        """Run pg_recvlogical up to the current position, writing to a file."""
        (through,) = self.shard.ask("SELECT pg_current_wal_insert_lsn()::text")
        # pg_recvlogical ends at the first message at or after --endpos. Without this message, it would wait for a
        # keepalive. The commit flushes the message at once: the tool does not wait for the server's next flush, either.
        self.shard.ask("SELECT pg_logical_emit_message(false, 'bench', 'end'), pg_current_xact_id()")
        target = self.folder / "drained"
        target.unlink(missing_ok=True)
        options = {"proto_version": "3", "publication_names": PUBLICATION, "messages": "true"}
        how = [f"--option={name}={value}" for name, value in options.items()]
        what = ["--start", f"--slot={SLOT}", f"--endpos={through}", "--no-loop", f"--file={target}"]
        run_tool("pg_recvlogical", f"--dbname={self.shard.dsn}", *what, *how, seconds_max=SECONDS_MAX)
        return target

    def incremental_backup(self) -> Path:
        """Run pg_basebackup --incremental."""
        before = self.folder / f"backup-{self.backups}" / "backup_manifest"
        return self._base_backup(f"--incremental={before}")

    def _base_backup(self, *more: str) -> Path:
        """Take a physical backup without the WAL needed to restore it, which favours the tool."""
        self.backups += 1
        target = self._clear(f"backup-{self.backups}")
        how = ["--checkpoint=fast", "--wal-method=none", *more]
        run_tool("pg_basebackup", f"--dbname={self.shard.dsn}", f"--pgdata={target}", *how, seconds_max=SECONDS_MAX)
        return target

    def _clear(self, name: str) -> Path:
        target = self.folder / name
        if target.exists():
            shutil.rmtree(target)
        return target
