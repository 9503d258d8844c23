"""Of which tests a whole run has a part, and how many of them.

A place is a folder, a module or a test with all its variants; a test belongs to the longest place that names it. The
tests of several places are drawn together if they show neighbouring things and each takes many seconds. What needs
servers, and is in no other draw, is drawn by modules: what the tests of a module share is then not made for a few.
"""

from __future__ import annotations

from dataclasses import dataclass

TESTS = "tests/integration"


@dataclass(frozen=True, slots=True)
class Draw:
    """One of `of` tests of these places is run, at least one; with `whole_modules`, one of `of` modules."""

    of: int
    places: tuple[str, ...]
    whole_modules: bool = False


DRAWS = (
    # In every run: the main paths on every version, what PostgreSQL's types come back as, and what the pages say.
    Draw(1, (f"{TESTS}/matrix", f"{TESTS}/exact", f"{TESTS}/test_docs_commands.py")),
    Draw(2, (TESTS,), whole_modules=True),
    # Random databases and histories.
    Draw(
        6,
        (
            "tests/fuzz/test_database.py",
            f"{TESTS}/exact/test_odd_tables.py::test_the_random_history_has_partial_images_and_truncates",
        ),
    ),
    # Of the simulation: commands with one fault, with two, and beside a rival.
    Draw(
        6,
        ("tests/simulation/test_repository.py::test_after_any_fault_at_any_call_of_a_command_every_promise_is_kept",),
    ),
    Draw(
        4,
        ("tests/simulation/test_repository.py::test_after_any_two_faults_around_a_commit_every_promise_is_kept",),
    ),
    Draw(
        8,
        (
            "tests/simulation/test_repository.py"
            "::test_a_command_suspended_at_any_call_while_another_runs_keeps_every_promise",
        ),
    ),
    # Faults in every step.
    Draw(14, (f"{TESTS}/test_fault_walk.py::test_after_a_fault_the_next_command_continues",)),
    Draw(12, (f"{TESTS}/test_lost_commits.py", f"{TESTS}/test_schema_attempts.py")),
    Draw(6, (f"{TESTS}/test_stalled_nodes.py",)),
    Draw(7, (f"{TESTS}/test_store_moved.py",)),
    Draw(16, (f"{TESTS}/damage",)),
    # How archives are read and listed.
    Draw(6, (f"{TESTS}/test_held_archives.py", f"{TESTS}/test_object_lists.py", f"{TESTS}/test_drain_sizes.py")),
    # Restores.
    Draw(40, (f"{TESTS}/restoring",)),
    Draw(6, (f"{TESTS}/restoring/test_restore_walk.py", f"{TESTS}/restoring/test_restore_faults.py")),
    Draw(6, (f"{TESTS}/drill", f"{TESTS}/recovering")),
    Draw(8, (f"{TESTS}/parts",)),
    Draw(6, (f"{TESTS}/routing",)),
    # Executors in other processes: what they are given, and what becomes of their tasks.
    Draw(8, ("tests/spark/test_session.py", "tests/spark/test_session_files.py")),
    Draw(
        10,
        (
            f"{TESTS}/test_cluster_pack.py::test_a_packed_build_runs_on_executors_that_have_nothing",
            f"{TESTS}/test_speculation.py",
            f"{TESTS}/test_executors.py",
            f"{TESTS}/test_cluster_page.py",
            "tests/spark/test_killed_executors.py",
            f"{TESTS}/test_few_connections.py::test_all_cores_work_on_one_node_with_few_connections",
        ),
    ),
    # Processes of Spark with an environment of their own.
    Draw(
        3,
        (
            "tests/spark/test_kubernetes_executors.py::test_the_program_of_the_pod_runs_tasks_with_the_secret_in_a_file",
            f"{TESTS}/test_unnamed_user.py::test_a_check_runs_as_a_user_without_a_name_or_a_home",
            f"{TESTS}/test_no_jvm.py::test_a_check_of_rows_starts_one",
        ),
    ),
    Draw(3, (f"{TESTS}/test_watch.py",)),
    # Whole stories of chains: in buckets, on two versions of PostgreSQL, beside a busy bank.
    Draw(
        6,
        (
            f"{TESTS}/exact/test_encodings.py::test_every_byte_of_every_encoding_comes_back_on_every_version",
            f"{TESTS}/exact/test_encodings.py::test_a_busy_bank_on_two_versions_is_consistent_at_every_cut",
            f"{TESTS}/test_causal_chains.py",
            f"{TESTS}/test_policies.py::test_a_chain_is_created_and_read_with_only_the_permissions_of_the_policies",
            f"{TESTS}/test_main_job.py::test_every_state_of_a_busy_bank_is_restored_consistently",
            f"{TESTS}/test_delete.py::test_pruning_and_deleting_the_last_snapshot_on_s3",
        ),
    ),
    # Databases that are compared after a restore.
    Draw(
        10,
        (
            f"{TESTS}/test_pgbench.py",
            f"{TESTS}/test_money.py",
            f"{TESTS}/test_definitions.py",
            f"{TESTS}/test_many_tables.py",
            f"{TESTS}/test_rules_since.py::test_a_chain_continues_with_tables_that_fleet_toml_now_admits_or_excludes",
        ),
    ),
    # Commands that end before their work does: what they leave, and where the next one goes on.
    Draw(
        6,
        (
            f"{TESTS}/test_points.py::test_a_create_reaches_its_crash_points_with_only_declared_effects_between_them",
            f"{TESTS}/test_drain_killed.py",
            f"{TESTS}/test_drain.py::test_a_drain_that_dies_at_any_write_is_continued",
            f"{TESTS}/test_drain.py::test_a_drain_that_dies_within_a_large_transaction_is_continued_there",
            f"{TESTS}/test_gc.py::test_gc_during_running_creates_loses_nothing",
            f"{TESTS}/test_gc.py::test_objects_of_dead_creates_are_removed_and_the_chain_continues",
        ),
    ),
    Draw(6, (f"{TESTS}/test_cancel_places.py", f"{TESTS}/test_cancel_walk.py")),
    Draw(
        6,
        (
            f"{TESTS}/test_cancel.py::test_a_create_is_seen_and_stopped_from_another_process",
            f"{TESTS}/test_cancel.py::test_a_create_that_was_killed_is_settled",
            f"{TESTS}/test_background.py::test_ctrl_c_ends_the_command_that_has_no_operation_yet",
            f"{TESTS}/test_background.py::test_it_outlives_its_terminal",
            f"{TESTS}/test_demo.py::test_two_interrupts_in_a_row_leave_nothing_either",
            f"{TESTS}/test_demo.py::test_what_a_killed_demo_leaves_is_removed_by_the_next_command",
        ),
    ),
    # What nobody is shown, by any command.
    Draw(
        2,
        (
            f"{TESTS}/test_secrets.py",
            f"{TESTS}/test_passwords.py::test_failures_show_no_password",
        ),
    ),
    # What ends a chain.
    Draw(
        3,
        (
            f"{TESTS}/test_refusals_nodes.py::test_an_upgraded_server_ends_a_chain",
            f"{TESTS}/test_refusals_nodes.py::test_a_lowered_wal_level_is_named_before_the_slot_it_invalidated",
            f"{TESTS}/test_retained.py::test_a_chain_is_warned_about_past_half_of_the_limit_and_lost_past_it",
        ),
    ),
    # Roles that may do little more than they must, and fleets of their own in folders of their own.
    Draw(
        6,
        (
            f"{TESTS}/test_roles.py::test_every_command_runs_as_the_documented_role",
            f"{TESTS}/test_roles.py::test_tasks_that_need_less_have_less",
            f"{TESTS}/test_roles.py::test_without_publishing_a_role_creates_where_a_superuser_ran_init",
            f"{TESTS}/test_restoring_role.py::test_the_documented_role_restores_exactly",
            f"{TESTS}/test_restoring_role.py"
            "::test_owners_and_grantors_of_large_objects_are_compared_before_a_row_is_loaded",
            f"{TESTS}/test_restoring_role.py"
            "::test_what_it_takes_from_the_owner_and_slots_that_it_can_not_drop_are_named_with_statements",
            f"{TESTS}/test_restoring_role.py::test_roles_that_it_creates_are_usable",
            f"{TESTS}/test_embedded_privacy.py::test_a_fleet_starts_in_any_folder",
            f"{TESTS}/test_embedded_fleet.py"
            "::test_a_deleted_node_is_named_and_its_rebuilt_shard_is_a_new_system_without_the_database",
            f"{TESTS}/test_embedded_fleet.py"
            "::test_stopping_a_fleet_leaves_other_fleets_running_and_its_snapshots_in_place",
        ),
    ),
)
