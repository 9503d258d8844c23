"""The form of fleet.toml: its tables and keys (docs/fleet-file.md), and what is wrong with one in TOML's words."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import UNSET, DecodeError, Meta, UnsetType, ValidationError

from cutline.fleet.durations import DAYS_MAX, Duration, Interval
from cutline.fleet.record import END, Record
from cutline.fleet.sizes import Size

NODE_ID = rf"^[A-Za-z0-9][A-Za-z0-9_.-]{{0,62}}{END}"
RETAINED_WAL_MAX = Size(16 * 1024**3)
# A command has up to five sessions of its own on a node, and needs one for a task.
CONNECTIONS_MIN = 6
GC_GRACE = Duration.parse("24h")
ASSERTION_TIMEOUT = Duration.parse("10min")
NEVER, DAILY, WEEKLY = Interval.parse("never"), Interval.parse("daily"), Interval.parse("weekly")
TOML_WORDS = {
    "array": "list", "object": "table", "str": "text", "int": "integer", "float": "number", "bool": "boolean",
}  # fmt: skip
# How TOML writes the character, which it does not allow as it is.
ESCAPED_NUL = re.compile(r"\\(?:u0000|U00000000|x00)")
# A text that is not empty.
Text = Annotated[str, Meta(min_length=1)]


class CutTable(Record, frozen=True):
    """`[cut]` of fleet.toml."""

    global_id: Text = "exact"


class WalTable(Record, frozen=True):
    """`[wal]` of fleet.toml."""

    max_retained_wal: Size = RETAINED_WAL_MAX


class RetentionTable(Record, frozen=True):
    """`[retention]` of fleet.toml."""

    keep_full: Annotated[int, Meta(ge=1)] | None = None
    keep_days: Annotated[int, Meta(ge=1, le=DAYS_MAX)] | None = None
    keep_increments: Annotated[int, Meta(ge=0)] | None = None
    gc_grace: Duration = GC_GRACE


class GroupsTable(Record, frozen=True):
    """`[groups]` of fleet.toml."""

    include: tuple[Text, ...] = ("*",)
    exclude: tuple[Text, ...] = ()
    append_only: tuple[Text, ...] = ()


class GlobalsTable(Record, frozen=True):
    """`[globals]` of fleet.toml."""

    passwords: bool = False


class WatchTable(Record, frozen=True):
    """`[watch]` of fleet.toml."""

    every: Interval
    full: Interval = WEEKLY
    name: Text = "watch-{date}-{time}"
    check: Interval = DAILY
    drill: Interval = NEVER
    accept_inconclusive: bool = False


class NotifyTable(Record, frozen=True):
    """`[notify]` of fleet.toml."""

    command: Annotated[tuple[Text, ...], Meta(min_length=1)]


class ToolsTable(Record, frozen=True):
    """`[tools]` of fleet.toml."""

    postgresql: Text | None = None


class EncryptionTable(Record, frozen=True):
    """`[encryption]` of fleet.toml: exactly one of the three."""

    key_file: Text | None = None
    key_variable: Text | None = None
    key_command: Annotated[tuple[Text, ...], Meta(min_length=1)] | None = None


class MetricsTable(Record, frozen=True):
    """`[metrics]` of fleet.toml; `traces` None: as the environment says."""

    file: Text | None = None
    listen: Text | None = None
    traces: bool | None = None


class NodeTable(Record, frozen=True):
    """One `[[node]]` of fleet.toml."""

    id: Annotated[str, Meta(pattern=NODE_ID)]
    dsn: Text
    backup_of: Text | None = None
    max_retained_wal: Size | None = None
    connections_max: Annotated[int, Meta(ge=CONNECTIONS_MIN)] | None = None


Value: TypeAlias = bool | int | float | str
# A value, or rows: each a value alone, or a list of values.
Expected: TypeAlias = Value | tuple[Value | tuple[Value, ...], ...] | UnsetType


class AssertionTable(Record, frozen=True):
    """One `[[drill.assertion]]` of fleet.toml: what a restored database of shard `node` answers; UNSET: no rows."""

    node: Annotated[str, Meta(pattern=NODE_ID)]
    sql: Text
    expected: Expected = UNSET
    timeout: Duration = ASSERTION_TIMEOUT


class DrillTable(Record, frozen=True):
    """`[drill]` of fleet.toml: the servers of a drill, and what is asserted of the restored databases.

    `postgresql` is the folder of their programs, None the wheel's. `extensions` are those that a superuser makes there
    beside the ones that PostgreSQL and Cutline trust.
    """

    postgresql: Text | None = None
    extensions: tuple[Text, ...] = ()
    allow_unconfined: bool = False
    assertion: tuple[AssertionTable, ...] = ()


class FleetFile(Record, frozen=True):
    """fleet.toml as written; docs/fleet-file.md describes every key."""

    name: Text
    store: Text
    node: Annotated[tuple[NodeTable, ...], Meta(min_length=1)]
    store_options: dict[str, Any] = msgspec.field(default_factory=dict)
    cut: CutTable = CutTable()
    wal: WalTable = WalTable()
    groups: GroupsTable = GroupsTable()
    retention: RetentionTable = RetentionTable()
    spark: dict[str, Any] = msgspec.field(default_factory=dict)
    tools: ToolsTable = ToolsTable()
    encryption: EncryptionTable | None = None
    globals: GlobalsTable = GlobalsTable()
    metrics: MetricsTable = MetricsTable()
    drill: DrillTable = DrillTable()
    watch: WatchTable | None = None
    notify: NotifyTable | None = None


def decode_fleet_file(text: str) -> FleetFile:
    """Decode the text of fleet.toml; raise msgspec.DecodeError or ValueError: `toml_problem` says what is wrong."""
    # Neither a path nor a dsn can have it: what uses them would raise, or end there.
    if ESCAPED_NUL.search(text) and _has_nul(msgspec.toml.decode(text)):
        raise ValueError("a text has the character NUL (\\u0000)")
    return msgspec.toml.decode(text, type=FleetFile, dec_hook=_decode)


def _has_nul(value: Any) -> bool:
    """Whether a decoded value, or anything in it, has the character NUL."""
    if isinstance(value, dict):
        return any(map(_has_nul, [*value, *value.values()]))
    return any(map(_has_nul, value)) if isinstance(value, list) else isinstance(value, str) and "\0" in value


def toml_hint(error: Exception) -> str:
    """What to do about an error of `decode_fleet_file`."""
    if isinstance(error, DecodeError) and not isinstance(error, ValidationError):
        return "correct the TOML syntax; texts are quoted"
    if str(error).endswith("got `array` - at `$.drill`"):
        return "[drill] has the settings of drills, and each assertion is a [[drill.assertion]]; see docs/fleet-file.md"
    # Below a table they are that table's, and of [spark] and [store_options] any key may be one.
    if re.search(r"(unknown|required) field `(name|store)`(?! - at `\$\.node)", str(error)):
        return "name and store stand above the first table; docs/fleet-file.md lists every key"
    return "docs/fleet-file.md lists every key"


def toml_problem(error: Exception) -> str:
    """What is wrong, in the words of TOML. msgspec has those of JSON, and names keys by JSONPath: `$.node[0].dsn`."""
    text = str(error).replace("`$.", "`")
    text = re.sub(r"^Object contains unknown field (`.*?`)(?: - at (`.*`))?$", _unknown_key, text)
    text = re.sub(r"^Object missing required field (`.*?`)(?: - at (`.*`))?$", _missing_key, text)
    text = re.sub(r"`\w+(?: \| \w+)*`", _toml_types, text)
    return text[:1].lower() + text[1:]


def _toml_types(found: re.Match[str]) -> str:
    kinds = [TOML_WORDS.get(kind) for kind in found[0].strip("`").split(" | ") if kind != "null"]
    return " or ".join(kind for kind in kinds if kind) if all(kinds) else found[0]


def _unknown_key(found: re.Match[str]) -> str:
    return f"unknown key {found[1]}" + (f" in {found[2]}" if found[2] else "")


def _missing_key(found: re.Match[str]) -> str:
    return f"{found[2]} lacks the key {found[1]}" if found[2] else f"there is no {found[1]}"


def _decode(kind: type[Any], value: Any) -> Any:
    if kind is Size:
        return Size.from_document(value)
    if kind in (Duration, Interval):
        return kind.from_document(value)
    raise NotImplementedError(kind.__name__)
