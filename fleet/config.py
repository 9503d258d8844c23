"""fleet.toml: the nodes, the store of the snapshots, and how the jobs run.

Reading it contacts nothing. Every mistake raises a FleetFileError that names the key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from cutline.fleet import libpq_environment
from cutline.fleet.durations import Duration
from cutline.fleet.fleet_file import (
    GC_GRACE,
    RETAINED_WAL_MAX,
    DrillTable,
    EncryptionTable,
    FleetFile,
    MetricsTable,
    NodeTable,
    ToolsTable,
    WalTable,
    WatchTable,
    decode_fleet_file,
    toml_hint,
    toml_problem,
)
from cutline.fleet.fleet_rules import check_dsn, check_global_id, check_spark_master, check_spark_settings, check_watch
from cutline.fleet.record import Record
from cutline.fleet.settings import flatten, remember_secret_settings, spark_settings
from cutline.fleet.sizes import size_text
from cutline.fleet.variables import VARIABLE, VariableMissingError, expand, expand_all, expand_dsn, remember_secrets_of
from cutline.storage.encryption.fleet_encryption import FleetEncryption
from cutline.storage.encryption.key_source import KeySource
from cutline.storage.errors import UsageError
from cutline.storage.location import StoreLocation, with_environment

# One of a thousand nodes has 200 kB. A device, or the wrong file, may never end.
FILE_BYTES_MAX = 16 << 20
SET_VARIABLE = "set the variable, or name the right one"
NO_FILE_HINT = "name one with --fleet FILE or SNAPSHOT_FLEET, or try: snapshot demo up demo-fleet"
LOOPBACK, PORTS = "127.0.0.1", 65536


class FleetFileError(UsageError):
    """fleet.toml is missing, unreadable or invalid."""


@dataclass(frozen=True, slots=True)
class KnownServer:
    """What identifies the server that a command has found at a node's dsn: later sessions have to lead there, too."""

    system_identifier: str
    in_recovery: bool


@dataclass(frozen=True, slots=True)
class Node:
    """One PostgreSQL database: a primary, or the standby of the primary `backup_of`."""

    id: str
    # It may hold a password, and a traceback shows what an object's repr shows.
    dsn: str = field(repr=False)
    backup_of: str | None = None
    # How much WAL a chain's slot may retain on this node.
    retained_wal_bytes_max: int = RETAINED_WAL_MAX
    # The most sessions that a command has on this node at a time; None: half of what is free is for its tasks.
    connections_max: int | None = None
    # The folder of pg_dump and pg_restore; None: they are found.
    programs: Path | None = None
    # None: the command has not found it yet.
    server: KnownServer | None = field(default=None, compare=False)

    @property
    def shard(self) -> str:
        """The id of the primary whose rows this node holds."""
        return self.backup_of or self.id


class GroupRules(Record, frozen=True):
    """Which tables are groups of the fleet: patterns for `schema.table`, with `*` and `?`."""

    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    append_only: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Retention:
    """What `prune` keeps, and how long `gc` keeps garbage. A rule that is None is not set.

    `keep_full`: keep this many of the newest snapshots. `keep_days`: keep snapshots with a restore point younger than
    this many days. `keep_increments`: keep the increments of this many of the newest snapshots. `gc` removes nothing
    that is younger than its grace period.
    """

    keep_full: int | None = None
    keep_days: int | None = None
    keep_increments: int | None = None
    gc_grace_seconds: float = GC_GRACE


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where an endpoint listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class MetricsRules:
    """Where metrics go (docs/monitoring.md): the text file, and the endpoint of `watch`; None: there is none.

    `traces`: whether spans are sent; None: as the environment says.
    """

    file: Path | None = None
    listen: ListenAddress | None = None
    traces: bool | None = None


@dataclass(frozen=True, slots=True)
class Fleet:
    """The fleet as fleet.toml describes it; `nodes` are in the file's order.

    Commands without Spark need no variables of [spark]: a setting whose variable is not set has its name, and
    `spark_missing` says so (`check_spark_variables`).
    """

    path: Path
    name: str
    store: StoreLocation
    nodes: tuple[Node, ...]
    global_id: str
    groups: GroupRules
    spark_master: str
    spark_settings: Mapping[str, str]
    spark_missing: tuple[str, ...] = ()
    retention: Retention = Retention()
    # That of `store`; None: objects are stored as they are written.
    encryption: FleetEncryption | None = None
    # The servers of a drill, and what it asserts of the restored databases.
    drill: DrillTable = field(default_factory=DrillTable)
    # What `snapshot watch` does, and the command that it tells of failures.
    watch: WatchTable | None = None
    notify: tuple[str, ...] = ()
    metrics: MetricsRules = MetricsRules()
    with_passwords: bool = False

    @property
    def primaries(self) -> tuple[Node, ...]:
        """The shards' primaries, in the file's order."""
        return tuple(node for node in self.nodes if node.backup_of is None)

    def node(self, node_id: str) -> Node:
        """The node with this id; raise KeyError if there is none."""
        for node in self.nodes:
            if node.id == node_id:
                return node
        raise KeyError(node_id)


def load_fleet(path: Path, *, hint: str = NO_FILE_HINT) -> Fleet:
    """Read and validate fleet.toml; raise FleetFileError naming the file and the invalid key.

    `hint` says what to do if there is no such file.
    """
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        # Editors on Windows begin a file with a byte order mark.
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        raise FleetFileError(f"no fleet file at {path}", hint=hint) from None
    except UnicodeDecodeError as error:
        raise FleetFileError(
            f"{path} is not in UTF-8: byte {error.start + 1} is 0x{error.object[error.start]:02x}",
            hint="save it in UTF-8, then repeat the command",
        ) from error
    except OSError as error:
        raise FleetFileError(
            f"{path}: {error.strerror or error}", hint="correct the file, then repeat the command"
        ) from error
    if len(content) > FILE_BYTES_MAX:
        raise FleetFileError(f"{path} has more than {size_text(FILE_BYTES_MAX)}", hint="name a fleet file")
    try:
        return _fleet(path, decode_fleet_file(text))
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        hint = SET_VARIABLE if isinstance(error, VariableMissingError) else toml_hint(error)
        raise FleetFileError(f"{path}: {toml_problem(error)}", hint=hint) from error


def _fleet(path: Path, file: FleetFile) -> Fleet:
    nodes = tuple(_node(entry, file.wal, file.tools) for entry in file.node)
    _check_nodes(nodes)
    check_global_id(file.cut.global_id)
    if any(one.timeout <= 0 for one in file.drill.assertion):
        raise ValueError("`drill.assertion.timeout` is 0: an assertion would have no time")
    missing: list[str] = []
    retention, spark = file.retention, expand_all("spark", file.spark, missing)
    encryption = FleetEncryption(_key_source(file.encryption), file.name) if file.encryption else None
    if file.globals.passwords and encryption is None:
        raise ValueError("`globals.passwords` needs [encryption]: who can read a plain store could try them")
    master = check_spark_master(spark.pop("master", "local[*]"))
    settings = spark_settings(spark)
    # The name of a variable that is not set is no secret.
    remember_secret_settings({name: value for name, value in settings.items() if not VARIABLE.search(value)})
    check_spark_settings(master, settings)
    return Fleet(
        path=path,
        name=file.name,
        store=_store(file, encryption),
        nodes=nodes,
        global_id=file.cut.global_id,
        groups=GroupRules(file.groups.include, file.groups.exclude, file.groups.append_only),
        spark_master=master,
        spark_settings=settings,
        spark_missing=tuple(missing),
        encryption=encryption,
        drill=file.drill,
        watch=check_watch(file.watch),
        notify=file.notify.command if file.notify else (),
        metrics=_metrics(file.metrics),
        with_passwords=file.globals.passwords,
        retention=Retention(retention.keep_full, retention.keep_days, retention.keep_increments, retention.gc_grace),
    )


def _metrics(table: MetricsTable) -> MetricsRules:
    file = Path(table.file).expanduser() if table.file else None
    if file and not file.is_absolute():
        raise ValueError("`metrics.file` is not an absolute path")
    return MetricsRules(file, _listen_address(table.listen) if table.listen else None, table.traces)


def _listen_address(text: str) -> ListenAddress:
    """The address in `[metrics] listen`: `9957`, `host:9957` or `[::1]:9957`; without a host only this machine."""
    host, _, port = text.rpartition(":")
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < PORTS or (":" in host) != host.startswith("["):
        raise ValueError(f"`metrics.listen` is {text!r}, which is not of the form 127.0.0.1:9957")
    return ListenAddress(host.removeprefix("[").removesuffix("]") or LOOPBACK, int(port))


def _key_source(table: EncryptionTable) -> KeySource:
    given = [name for name in ("key_file", "key_variable", "key_command") if getattr(table, name) is not None]
    if len(given) != 1:
        raise ValueError("`encryption` needs exactly one of key_file, key_variable and key_command")
    file = Path(table.key_file).expanduser() if table.key_file else None
    if file and not file.is_absolute():
        raise ValueError("`encryption.key_file` is not an absolute path")
    return KeySource(file, table.key_variable, table.key_command)


def _store(file: FleetFile, encryption: FleetEncryption | None) -> StoreLocation:
    url, options = expand("store", file.store), expand_all("store_options", file.store_options)
    remember_secret_settings(flatten(options))
    if "retry_for" in options:
        options["retry_for"] = _seconds("store_options.retry_for", options["retry_for"])
    return StoreLocation(url, with_environment(url, options), encryption)


def _seconds(key: str, value: object) -> float:
    try:
        return float(Duration.from_document(value))
    except ValueError as error:
        raise ValueError(f"`{key}`: {error}") from error


def _node(entry: NodeTable, wal: WalTable, tools: ToolsTable) -> Node:
    dsn = libpq_environment.with_environment(expand_dsn(f"node {entry.id}: dsn", entry.dsn))
    remember_secrets_of(dsn)
    dsn = check_dsn(f"node {entry.id}: dsn", dsn, is_primary=entry.backup_of is None)
    return Node(
        id=entry.id,
        dsn=dsn,
        backup_of=entry.backup_of,
        retained_wal_bytes_max=wal.max_retained_wal if entry.max_retained_wal is None else entry.max_retained_wal,
        connections_max=entry.connections_max,
        programs=Path(tools.postgresql) if tools.postgresql else None,
    )


def _check_nodes(nodes: tuple[Node, ...]) -> None:
    ids = [node.id for node in nodes]
    for node_id in ids:
        if ids.count(node_id) > 1:
            raise ValueError(f"two nodes have the id {node_id}")
    dsns: dict[str, str] = {}
    for node in nodes:
        if node.dsn in dsns:
            raise ValueError(f"nodes {dsns[node.dsn]} and {node.id} have the same dsn")
        dsns[node.dsn] = node.id
    primaries = {node.id for node in nodes if node.backup_of is None}
    if not primaries:
        raise ValueError("no node is a primary: all have backup_of")
    for node in nodes:
        if node.backup_of is not None and node.backup_of not in primaries:
            raise ValueError(f"node {node.id}: backup_of names {node.backup_of}, which is not a primary in this file")


def check_spark_variables(fleet: Fleet) -> None:
    """Raise FleetFileError if a variable of [spark] is not set: of a command that may start Spark, at its start."""
    if fleet.spark_missing:
        raise FleetFileError(f"{fleet.path}: {fleet.spark_missing[0]}", hint=SET_VARIABLE)


def check_drill(fleet: Fleet) -> None:
    """Raise FleetFileError if an assertion names a node that is no primary. Only a drill needs them to be right."""
    primaries = [node.id for node in fleet.primaries]
    for number, one in enumerate(fleet.drill.assertion, start=1):
        if one.node not in primaries:
            raise FleetFileError(
                f"{fleet.path}: drill.assertion {number}: node names {one.node}, which is not a primary in this file",
                hint=f"name one of: {', '.join(primaries)}",
            )
