"""Every function of PostgreSQL that Cutline calls is tried by init, so that a missing grant is named."""

from __future__ import annotations

import re
from pathlib import Path

from cutline.nodes.problems import FUNCTIONS, STANDBY_FUNCTIONS

ROOT = Path(__file__).parent.parent.parent
# The functions behind the views that Cutline reads.
VIEWS = {
    "pg_get_replication_slots", "pg_lock_status", "pg_prepared_xact", "pg_stat_get_wal_receiver",
    "pg_stat_get_wal_senders",
}  # fmt: skip

# What hints give the operator to run.
SHOWN = {"pg_reload_conf", "pg_wal_replay_resume"}


def test_every_function_that_is_called_is_tried() -> None:
    called = {
        name
        for folder in ("fleet", "nodes", "snapshots", "wal", "check", "restore")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"\bpg_[a-z_]+(?=\()", path.read_text())
    }
    assert called <= {*FUNCTIONS, *STANDBY_FUNCTIONS, *SHOWN}
    assert {name for name in FUNCTIONS if name not in called} == VIEWS
