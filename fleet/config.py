"""fleet.toml: which nodes there are, where snapshots go, and how the jobs run.

Reading it contacts nothing. Every mistake is a FleetFileError that names the key.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet.durations import seconds_from_text
from fleet.sizes import size_from_text
from storage.errors import UsageError

NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
RETAINED_WAL_KEY = "max_retained_wal"
RETAINED_WAL_BYTES_MAX = 16 * 1024**3
GC_GRACE = "24h"
GLOBAL_ID_FORMS = ("exact", "xa", "citus")


class FleetFileError(UsageError):
    """fleet.toml is missing, unreadable, or says something that can't be."""


@dataclass(frozen=True, slots=True)
class Node:
    """One PostgreSQL database: a primary, or the standby of the primary `backup_of`."""

    id: str
    dsn: str
    backup_of: str | None = None
    # How much WAL a chain's slot may keep on this node.
    retained_wal_bytes_max: int = RETAINED_WAL_BYTES_MAX

    @property
    def shard(self) -> str:
        """The id of the primary whose rows this node holds."""
        return self.backup_of or self.id


@dataclass(frozen=True, slots=True)
class GroupRules:
    """Which tables belong to the fleet's groups: patterns of `schema.table` with `*` and `?`."""

    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    append_only: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Retention:
    """What `prune` keeps, and how long `gc` keeps what is not needed. A rule that is None is not set.

    `keep_full`: the newest so many snapshots; `keep_days`: what has a restore point younger than so many days;
    `keep_increments`: of how many of the newest snapshots the increments are kept. `gc` takes nothing away that is
    younger than its grace period.
    """

    keep_full: int | None = None
    keep_days: int | None = None
    keep_increments: int | None = None
    gc_grace_seconds: float = seconds_from_text(GC_GRACE)


@dataclass(frozen=True, slots=True)
class Fleet:
    """The fleet as fleet.toml describes it; `nodes` in the file's order."""

    path: Path
    name: str
    store_url: str
    store_options: Mapping[str, Any] = field(repr=False)  # may hold secrets
    nodes: tuple[Node, ...]
    global_id: str
    groups: GroupRules
    spark_master: str
    spark_settings: Mapping[str, str]
    retention: Retention = Retention()

    @property
    def primaries(self) -> tuple[Node, ...]:
        """The shards' primaries, in the file's order."""
        return tuple(node for node in self.nodes if node.backup_of is None)

    def node(self, node_id: str) -> Node:
        """The node called `node_id`; KeyError if there is none."""
        for node in self.nodes:
            if node.id == node_id:
                return node
        raise KeyError(node_id)


def load_fleet(path: Path) -> Fleet:
    """Read and validate fleet.toml; raise FleetFileError naming the file and the key that is wrong."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FleetFileError(
            f"no fleet file at {path}",
            hint="name one with --fleet FILE or SNAPSHOT_FLEET, or try: snapshot demo up demo-fleet",
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise FleetFileError(f"{path}: {error}", hint="correct the file and repeat") from error
    try:
        return _fleet(path, document)
    except (KeyError, TypeError, ValueError) as error:
        text = f"the key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise FleetFileError(f"{path}: {text}", hint="docs/fleet-file.md lists every key") from error


def _fleet(path: Path, document: dict[str, Any]) -> Fleet:
    _known("", document, {"name", "store", "store_options", "cut", "wal", "groups", "retention", "spark", "node"})
    cut = document.get("cut", {})
    _known("cut.", cut, {"global_id"})
    wal = document.get("wal", {})
    _known("wal.", wal, {RETAINED_WAL_KEY})
    retained = _bytes(f"wal.{RETAINED_WAL_KEY}", wal.get(RETAINED_WAL_KEY, RETAINED_WAL_BYTES_MAX))
    groups = document.get("groups", {})
    _known("groups.", groups, {"include", "exclude", "append_only"})
    spark = {str(key): value for key, value in document.get("spark", {}).items()}
    nodes = tuple(_node(number, entry, retained) for number, entry in enumerate(document["node"], start=1))
    _check_nodes(nodes)
    return Fleet(
        path=path,
        name=_text("name", document["name"]),
        store_url=_expand("store", _text("store", document["store"])),
        store_options=_expand_all("store_options", document.get("store_options", {})),
        nodes=nodes,
        global_id=_global_id(cut.get("global_id", "exact")),
        groups=GroupRules(
            include=_patterns("groups.include", groups.get("include", ["*"])),
            exclude=_patterns("groups.exclude", groups.get("exclude", [])),
            append_only=_patterns("groups.append_only", groups.get("append_only", [])),
        ),
        spark_master=_text("spark.master", spark.pop("master", "local[*]")),
        spark_settings={_spark_key(key): _setting(value) for key, value in _flatten(spark).items()},
        retention=_retention(document.get("retention", {})),
    )


def _retention(table: dict[str, Any]) -> Retention:
    _known("retention.", table, {"keep_full", "keep_days", "keep_increments", "gc_grace"})
    return Retention(
        keep_full=_count("retention.keep_full", table.get("keep_full"), 1),
        keep_days=_count("retention.keep_days", table.get("keep_days"), 1),
        keep_increments=_count("retention.keep_increments", table.get("keep_increments"), 0),
        gc_grace_seconds=_seconds("retention.gc_grace", table.get("gc_grace", GC_GRACE)),
    )


def _count(key: str, value: Any, least: int) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise TypeError(f"{key} must be a number, {least} or more")
    return value


def _node(number: int, entry: dict[str, Any], retained: int) -> Node:
    _known(f"node {number}: ", entry, {"id", "dsn", "backup_of", RETAINED_WAL_KEY})
    node_id = _text(f"node {number}: id", entry["id"])
    if not NODE_ID.fullmatch(node_id):
        raise ValueError(f"node {number}: id {node_id!r} must match {NODE_ID.pattern}")
    backup_of = entry.get("backup_of")
    return Node(
        id=node_id,
        dsn=_expand(f"node {node_id}: dsn", _text(f"node {node_id}: dsn", entry["dsn"])),
        backup_of=None if backup_of is None else _text(f"node {node_id}: backup_of", backup_of),
        retained_wal_bytes_max=_bytes(f"node {node_id}: {RETAINED_WAL_KEY}", entry.get(RETAINED_WAL_KEY, retained)),
    )


def _check_nodes(nodes: tuple[Node, ...]) -> None:
    ids = [node.id for node in nodes]
    for node_id in ids:
        if ids.count(node_id) > 1:
            raise ValueError(f"two nodes are called {node_id}")
    dsns: dict[str, str] = {}
    for node in nodes:
        if node.dsn in dsns:
            raise ValueError(f"nodes {dsns[node.dsn]} and {node.id} have the same dsn")
        dsns[node.dsn] = node.id
    primaries = {node.id for node in nodes if node.backup_of is None}
    if not primaries:
        raise ValueError("no primary among the nodes: every one has backup_of")
    for node in nodes:
        if node.backup_of is not None and node.backup_of not in primaries:
            raise ValueError(f"node {node.id}: backup_of names {node.backup_of}, which is no primary here")


def _known(where: str, table: Any, keys: set[str]) -> None:
    if not isinstance(table, dict):
        raise TypeError(f"{where or 'the file'} must be a table")
    for key in table:
        if key not in keys:
            raise ValueError(f"unknown key {where}{key}; known are {', '.join(sorted(keys))}")


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{key} must be a text")
    return value


def _bytes(key: str, value: Any) -> int:
    if isinstance(value, str):
        try:
            value = size_from_text(value)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise TypeError(f'{key} must be above 0: a number of bytes, or a text such as "16GiB"')
    return value


def _seconds(key: str, value: Any) -> float:
    try:
        return seconds_from_text(_text(key, value))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def _patterns(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise TypeError(f'{key} must be a list of texts such as "public.events" or "audit.*"')
    return tuple(value)


def _global_id(value: Any) -> str:
    text = _text("cut.global_id", value)
    if text in GLOBAL_ID_FORMS:
        return text
    try:
        groups = re.compile(text).groupindex
    except re.error as error:
        raise ValueError(f"cut.global_id is neither exact, xa, citus nor a regex: {error}") from error
    if "global" not in groups:
        raise ValueError(f"cut.global_id: the regex {text!r} has no group named global: (?P<global>…)")
    return text


def _flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _setting(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _expand(key: str, text: str) -> str:
    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in os.environ:
            raise ValueError(f"{key} uses ${{{name}}}, which is not in the environment")
        return os.environ[name]

    return VARIABLE.sub(value, text)


def _expand_all(key: str, value: Any) -> Any:
    if isinstance(value, str):
        return _expand(key, value)
    if isinstance(value, dict):
        return {name: _expand_all(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, list):
        return [_expand_all(key, item) for item in value]
    return value


def _spark_key(key: str) -> str:
    return key if key.startswith("spark.") else f"spark.{key}"
