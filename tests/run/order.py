"""The order in which several processes start the tests, and the tests that stay together.

A process gets one unit at a time: a module, or a folder below tests/integration, whose modules share servers and
chains. Of the folders in DIVIDED, `make rest` and `make all` have parts with servers of their own. A long unit that
begins last would keep one process busy while the others are idle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

import pytest

from tests.run.units import unit_of

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

# The longest units first. Units that mostly wait (for S3 servers, silent nodes, pauses of retries) are early, because
# they take little time from the others. The end of a run names long units that are missing here.
LONG = (
    "tests/integration/test_damage_matrix.py",
    "tests/integration/restoring",
    "tests/integration/exact",
    "tests/integration/matrix",
    "tests/integration/test_fault_walk.py",
    "tests/integration/test_cluster_pack.py",
    "tests/integration/test_speculation.py",
    "tests/integration/test_watch.py",
    "tests/integration/test_other_alphabets.py",
    "tests/integration/test_resumed_full.py",
    "tests/integration/test_background_copies.py",
    "tests/integration/test_promotion_walk.py",
    "tests/integration/test_fingerprint.py",
    "tests/integration/test_failover.py",
    "tests/integration/test_chain_states.py",
    "tests/integration/test_absent_copies.py",
    "tests/integration/test_renewed_copies.py",
    "tests/integration/test_shards_come_and_go.py",
    "tests/integration/test_renamed_nodes.py",
    "tests/integration/test_upgraded_shard.py",
    "tests/integration/test_shared_bases.py",
    "tests/integration/test_merge.py",
    "tests/integration/test_rewritten_copies.py",
    "tests/integration/test_command_processes.py",
    "tests/integration/test_dead_rows.py",
    "tests/integration/test_failover_slots.py",
    "tests/integration/test_removed_wal.py",
    "tests/spark/test_jvm_command.py",
    "tests/integration/test_small_fleet.py",
    "tests/spark/test_killed_executors.py",
    "tests/spark/test_executors_volume.py",
    "tests/integration/test_few_connections.py",
    "tests/integration/test_mutations.py",
    "tests/integration/test_merged_mutations.py",
    "tests/simulation/test_repository.py",
    "tests/integration/test_executors.py",
    "tests/integration/test_roles.py",
    "tests/integration/test_points.py",
    "tests/integration/test_archive_ahead.py",
    "tests/integration/test_free_slots.py",
    "tests/simulation/test_cut.py",
    "tests/simulation/test_failovers.py",
    "tests/simulation/test_repository_mutants.py",
    "tests/simulation/test_shrinking.py",
    "tests/integration/test_background.py",
    "tests/integration/test_live_check.py",
    "tests/integration/test_since_last.py",
    "tests/integration/test_participants.py",
    "tests/integration/test_refusals_tables.py",
    "tests/integration/parts",
    "tests/integration/routing",
    "tests/integration/recovering",
    "tests/integration/drill",
    "tests/integration/test_store_outages.py",
    "tests/integration/test_storage_s3_faults.py",
    "tests/integration/test_storage_versions.py",
    "tests/integration/test_stalled_nodes.py",
    "tests/integration/test_lost_commits.py",
    "tests/fuzz/test_database.py",
    "tests/integration/test_storage_s3.py",
    "tests/integration/test_storage_s3_parts.py",
    "tests/integration/test_storage_s3_reads.py",
    "tests/integration/test_storage_s3_credentials.py",
    "tests/integration/test_storage_clouds.py",
    "tests/integration/test_waits.py",
    "tests/integration/test_kept_store.py",
    "tests/integration/test_merged_renewals.py",
    "tests/integration/test_copying.py",
    "tests/integration/test_idle_increments.py",
    "tests/integration/test_oldest_server.py",
    "tests/integration/test_docs_commands.py",
    "tests/integration/test_restoring_role.py",
    "tests/integration/test_server_globals.py",
    "tests/integration/test_extension_rows.py",
    "tests/integration/test_database_settings.py",
    "tests/integration/test_encryption.py",
    "tests/spark/test_session.py",
    "tests/spark/test_kubernetes_executors.py",
    "tests/integration/test_demo.py",
    "tests/integration/test_drain_killed.py",
    "tests/integration/test_causal_chains.py",
    "tests/integration/test_exact_times.py",
    "tests/integration/test_fencing.py",
    "tests/spark/test_changed_definitions.py",
    "tests/spark/test_rebuilt_in_jobs.py",
    "tests/integration/damage",
    "tests/integration/test_object_lists.py",
    "tests/integration/test_held_archives.py",
    "tests/integration/test_secrets.py",
    "tests/integration/read_only",
    "tests/integration/test_schema_attempts.py",
    "tests/integration/test_drain_sizes.py",
    "tests/integration/test_delete.py",
    "tests/integration/test_tables_since_commit.py",
    "tests/spark/test_who_folds.py",
    "tests/unit/test_python_workers.py",
    "tests/unit/test_hints.py",
    "tests/integration/test_keep.py",
    "tests/integration/test_rules_since.py",
    "tests/integration/test_global_ids.py",
    "tests/integration/test_gc.py",
    "tests/integration/test_metrics_nodes.py",
    "tests/integration/test_policies.py",
    "tests/unit/test_cli_main.py",
    "tests/fuzz/test_decoder.py",
    "tests/spark/test_long_lines.py",
    "tests/integration/test_cancel.py",
    "tests/test_startup.py",
    "tests/integration/test_cut_times.py",
    "tests/integration/test_report.py",
    "tests/integration/test_extensions.py",
    "tests/integration/test_cancel_walk.py",
    "tests/integration/test_fleets_writes.py",
    "tests/integration/test_sandbox.py",
    "tests/integration/test_prepared_ddl.py",
    "tests/integration/test_cancel_places.py",
    "tests/integration/test_store_moved.py",
    "tests/integration/test_refusals_nodes.py",
    "tests/integration/test_failed_copies.py",
    "tests/integration/test_pgbench.py",
    "tests/integration/test_refused_ddl.py",
    "tests/integration/test_bank.py",
    "tests/integration/test_value_memory.py",
    "tests/integration/test_passwords.py",
    "tests/integration/test_unnamed_user.py",
    "tests/integration/test_poolers.py",
    "tests/integration/test_late_standbys.py",
    "tests/integration/test_tls.py",
    "tests/spark/test_session_files.py",
)
# All tests of these folders would keep one process busy for more than an hour.
DIVIDED = {"tests/integration/restoring": 4}
PLACES = {unit: place for place, unit in enumerate(LONG)}


def part_of(nodeid: str, cases: str) -> str:
    """Return the unit of a test, or the part of it if the unit is divided in a run of these `cases`."""
    unit, module = unit_of(nodeid), nodeid.partition("::")[0]
    parts = 1 if cases == "test" else DIVIDED.get(unit, 1)
    return f"{unit} {crc32(module.encode()) % parts}" if parts > 1 else unit


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    from xdist.scheduler import LoadFileScheduling

    class LoadUnitScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return part_of(nodeid, config.getoption("cases"))

    return LoadUnitScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests of long units first, in the same order in every process, as xdist requires."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: PLACES.get(unit_of(item.nodeid), len(PLACES)))
