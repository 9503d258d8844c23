"""What manages a server: programs that fail over, managed services, an extension that copies slots; for `init`.

Each is recognised by marks that it leaves on a server: names of slots and sessions, and settings. The facts about them
are from their documentation and sources (docs/operations.md, Failover managers). A mark that the role may not see is
not found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# A name, and the condition that its marks are there. Names of slots are physical slots of standbys.
MARKS = (
    ("patroni", "EXISTS (SELECT FROM pg_stat_activity WHERE application_name ^@ 'Patroni')"),
    (
        "cloudnative-pg",
        "coalesce(current_setting('cnpg.config_sha256', true), '') <> ''"
        " OR EXISTS (SELECT FROM pg_replication_slots WHERE slot_name ^@ '_cnpg_')",
    ),
    (
        "repmgr",
        "EXISTS (SELECT FROM pg_replication_slots WHERE slot_name ^@ 'repmgr_slot_')"
        " OR EXISTS (SELECT FROM pg_stat_activity WHERE application_name = 'repmgr')"
        " OR current_setting('primary_slot_name') ^@ 'repmgr_slot_'",
    ),
    (
        "stolon",
        "EXISTS (SELECT FROM pg_replication_slots WHERE slot_name ^@ 'stolon_')"
        " OR current_setting('primary_slot_name') ^@ 'stolon_'",
    ),
    (
        "pg-auto-failover",
        "EXISTS (SELECT FROM pg_replication_slots WHERE slot_name ^@ 'pgautofailover_standby_')"
        " OR current_setting('primary_slot_name') ^@ 'pgautofailover_standby_'",
    ),
    (
        "pg-failover-slots",
        "coalesce(current_setting('pg_failover_slots.synchronize_slot_names', true), '') <> ''",
    ),
    ("amazon-rds", "current_setting('rds.logical_replication', true) IS NOT NULL"),
    (
        "cloud-sql",
        "coalesce(current_setting('cloudsql.logical_decoding', true),"
        " current_setting('alloydb.logical_decoding', true)) IS NOT NULL",
    ),
    # Empty by default.
    ("azure", "current_setting('azure.extensions', true) IS NOT NULL"),
)
_VALUES = ", ".join(f"('{name}', {condition})" for name, condition in MARKS)
# An array of names.
MANAGERS_EXPRESSION = f"ARRAY(SELECT name FROM (VALUES {_VALUES}) AS mark (name, is_there) WHERE is_there)"

# What follows from a manager, and what to set. Patroni's depends on the databases.
_ADVICE: Mapping[str, tuple[str, str]] = {
    "cloudnative-pg": (
        "CloudNativePG runs the server; an instance that it creates anew has no slot of the chain",
        "see docs/kubernetes.md, section CloudNativePG",
    ),
    "repmgr": (
        "repmgr manages the server; a server that it clones or rewinds (node rejoin --force-rewind) has no slot of the"
        " chain, so it is copied again",
        "leave its standbys' slots to repmgr, and count Cutline's when you set max_replication_slots"
        " (docs/operations.md, Failover managers)",
    ),
    "stolon": (
        "Stolon runs the server, and sets wal_level = replica unless the cluster specification says logical; a keeper"
        " that it resyncs has no slot of the chain, so it is copied again",
        'stolonctl update --patch \'{"pgParameters": {"wal_level": "logical", "hot_standby_feedback": "on"}}\'',
    ),
    "pg-auto-failover": (
        "pg_auto_failover runs the server, and sets wal_level = replica and max_replication_slots = 12 in"
        " postgresql-auto-failover.conf; a server that it rewinds or creates anew has no slot of the chain, so it is"
        " copied again",
        "set wal_level = logical, and more slots if needed, in postgresql.conf, below its line with include",
    ),
    "pg-failover-slots": (
        "pg_failover_slots copies logical slots of the primary to standbys, and drops those that the primary lacks: it"
        " moves or drops Cutline's slots there",
        "name the slots that it should copy in pg_failover_slots.synchronize_slot_names, none that begins with"
        " cutline_, and set pg_failover_slots.drop_extra_slots = off",
    ),
    "amazon-rds": (
        "the server is one of Amazon RDS or Aurora, on which Cutline was not tried; readers of Aurora are no physical"
        " standbys",
        "set rds.logical_replication = 1 in the parameter group, which sets wal_level (docs/operations.md, Failover"
        " managers)",
    ),
    "cloud-sql": (
        "the server is one of Cloud SQL or AlloyDB, on which Cutline was not tried",
        "set the flag cloudsql.logical_decoding (AlloyDB: alloydb.logical_decoding) to on, which sets wal_level",
    ),
    "azure": (
        "the server is one of Azure Database for PostgreSQL, on which Cutline was not tried",
        "set the server parameter wal_level to logical",
    ),
}


def advice_on(manager: str, databases: Iterable[str]) -> tuple[str, str]:
    """Return what follows from a manager of MARKS, and what to do, for nodes with these databases."""
    if manager != "patroni":
        return _ADVICE[manager]
    entries = ", ".join(f"{{type: logical, plugin: pgoutput, database: {one}}}" for one in sorted(set(databases)))
    return (
        "Patroni runs the server, and drops slots that it does not know whenever it restarts a member",
        f"patronictl edit-config, and set ignore_slots: [{entries}] (docs/patroni.md)",
    )
