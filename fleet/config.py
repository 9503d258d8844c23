"""fleet.toml: its schema, variables and rules, and the nodes, store and settings that it describes.

Reading fleet.toml contacts nothing. Every mistake raises a FleetFileError that names the key: functions here raise a
ValueError with the message, and load_fleet converts it.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args
from urllib.parse import urlsplit

import msgspec
import psycopg
from msgspec import UNSET, DecodeError, Meta, Struct, UnsetType, ValidationError, structs
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cutline.fleet import libpq_environment
from cutline.fleet.cores import cores_of, tasks_max
from cutline.fleet.hours import Hours
from cutline.fleet.participants import is_single_name
from cutline.fleet.record import END, Record
from cutline.fleet.units import Duration, Interval, Rate, Size, size_text
from cutline.storage.encryption.fleet_encryption import FleetEncryption
from cutline.storage.encryption.key_source import KeySource
from cutline.storage.errors import UsageError, remember_secret
from cutline.storage.location import StoreLocation, with_environment

# The parameters that libpq itself hides when it shows a connection string.
SECRET_PARAMETERS = frozenset(
    option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults() if option.dispchar == b"*"
)
URI_BEGINNINGS = ("postgresql://", "postgres://")
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class VariableMissingError(ValueError):
    """A variable that fleet.toml names is not in the environment."""


def expand(key: str, text: str) -> str:
    """Return the text with its variables replaced by their values; raise ValueError naming `key` if any is not set."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in os.environ:
            raise VariableMissingError(f"{key} uses ${{{name}}}, which is not set in the environment")
        return os.environ[name]

    return VARIABLE.sub(value, text)


def expand_dsn(key: str, dsn: str) -> str:
    """Return the dsn with its variables replaced inside parameters' values, so that no variable can add parameters.

    If the dsn consists of a single variable, the variable contains the whole dsn.
    """
    if VARIABLE.fullmatch(dsn):
        dsn = expand(key, dsn)
        _parse_dsn(key, dsn)
        return dsn
    # Placeholders without special characters: they mean nothing in a URI or in the keyword form.
    names = [match[1] for match in VARIABLE.finditer(dsn)]
    marks = {f"cutline{number}variable{secrets.token_hex(8)}": name for number, name in enumerate(names)}
    if not marks:
        _parse_dsn(key, dsn)
        return dsn
    remaining = iter(marks)
    given = _parse_dsn(key, VARIABLE.sub(lambda _: next(remaining), dsn))
    for mark, name in marks.items():
        value = expand(key, f"${{{name}}}")
        given = {parameter: text.replace(mark, value) for parameter, text in given.items()}
    return make_conninfo("", **given)


def remember_secrets_of(dsn: str) -> None:
    """Hide the dsn's secrets in errors, except values that another parameter shows anyway, such as `postgres`."""
    given = {name: str(value) for name, value in conninfo_to_dict(dsn).items() if value is not None}
    shown = {text for parameter, text in given.items() if parameter not in SECRET_PARAMETERS}
    for parameter in SECRET_PARAMETERS & given.keys():
        if given[parameter] not in shown:
            remember_secret(given[parameter])


def _parse_dsn(key: str, dsn: str) -> dict[str, str]:
    """Parse the dsn; raise a ValueError that does not show any part of it."""
    try:
        given = {name: str(value) for name, value in conninfo_to_dict(dsn).items() if value is not None}
        if not _is_misread(dsn, given):
            return given
    except psycopg.Error:
        pass
    raise ValueError(f"{key} is not a valid connection string (in a URI, write special characters as %XX)")


def _is_misread(dsn: str, given: Mapping[str, str]) -> bool:
    """Whether libpq takes part of the URI's password for a different parameter, which messages would show.

    In a password, an `@` or `/` ends that part of the URI. After `?`, `@` is only text.
    """
    if not dsn.startswith(URI_BEGINNINGS):
        return False
    # libpq reads everything before the first `@` as user and password, unless it contains a `/`.
    after = re.sub(r"^[^@/]*@", "", dsn.partition("://")[2])
    is_port = re.fullmatch(r"[0-9,]*|cutline[0-9]+variable[0-9a-f]+", given.get("port", ""))
    return "@" in after.partition("?")[0] or not is_port


def expand_all(key: str, value: Any, missing: list[str] | None = None) -> Any:
    """Return the value with `expand` applied to all strings in it.

    With `missing`, a string whose variable is not set stays unchanged, and the message from `expand` is added to
    `missing`.
    """
    if isinstance(value, str):
        try:
            return expand(key, value)
        except VariableMissingError as error:
            if missing is None:
                raise
            missing.append(str(error))
            return value
    if isinstance(value, dict):
        return {name: expand_all(f"{key}.{name}", item, missing) for name, item in value.items()}
    if isinstance(value, list):
        return [expand_all(key, item, missing) for item in value]
    return value


# The default of spark.redaction.regex, with which Spark hides settings, plus other common words.
SECRETIVE = re.compile(
    r"(?i)secret|passw(or)?d|passphrase|token|credential|(access|account|api)[._-]?key|(key|trust)?store[._-]?pass"
    r"|connection[._-]?string"
)
# A secret may look like a path, so the name must say that the value is a path.
NAMES_A_FILE = re.compile(r"(?i)(file|path|dir|directory|location|store)$")
PATH = re.compile(r"(file:)?/")
JAVA_OPTIONS = "JavaOptions"


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values in a table and its subtables, by dotted names."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


SPARK_MASTER = "spark.master"


def spark_settings(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in [spark] by their full names; raise ValueError for a list, and for two of the same name."""
    settings: dict[str, Any] = {}
    for name, value in flatten(table).items():
        full_name = name if name.startswith("spark.") else f"spark.{name}"
        if full_name in settings:
            raise ValueError(f"[spark] sets `{full_name}` twice, with `spark.` and without it")
        if isinstance(value, list):
            raise ValueError(f"`{full_name}` is a list: write it as one text, as Spark's documentation does")
        settings[full_name] = value
    return settings


def remember_secret_settings(settings: Mapping[str, object]) -> None:
    """In errors, hide settings whose names mark them as secrets, as well as such values in JVM options."""
    for name, value in settings.items():
        if isinstance(value, str) and name.endswith(JAVA_OPTIONS):
            for secret in secrets_in_options(value):
                remember_secret(secret)
        elif isinstance(value, str) and _is_secret(name, value):
            remember_secret(value)


def secrets_in_options(options: str) -> Iterator[str]:
    """Yield the values in a JVM's options whose names mark them as secrets: `abc` in `-Dx.password=abc`."""
    try:
        words = shlex.split(options)
    except ValueError:
        words = [options]
    for word in words:
        for equals in re.finditer("=", word):
            name, value = word[: equals.start()], word[equals.end() :]
            if SECRETIVE.search(name):
                if _is_secret(name, value):
                    yield value
                break


def _text_of(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_secret(name: str, value: str) -> bool:
    return bool(SECRETIVE.search(name)) and not (NAMES_A_FILE.search(name) and PATH.match(value))


def has_executors(master: str) -> bool:
    """Whether tasks run outside the driver, as with all masters except `local`, `local[4]` and the like."""
    return re.match(r"local(\[|$)", master) is None


def runs_on_this_machine(master: str) -> bool:
    """Whether driver and executors all run on this machine: `local`, `local[4]`, `local-cluster[2,1,1024]`.

    This matters only for addresses and files. In all other respects a `local-cluster` is treated like a cluster.
    """
    return not has_executors(master) or master.startswith("local-cluster[")


NODE_ID = rf"^[A-Za-z0-9][A-Za-z0-9_.-]{{0,62}}{END}"
RETAINED_WAL_MAX = Size(16 * 1024**3)
# Servers keep and remove WAL in files of this size, by default. A slot that was just advanced still keeps some WAL:
# with a smaller limit, each create would drop such slots. `init` warns of servers with larger files.
RETAINED_WAL_MIN = Size(16 * 1024**2)
# A command itself opens up to five sessions on a node, and needs at least one more for tasks.
CONNECTIONS_MIN = 6
GC_GRACE = Duration.parse("24h")
REREAD = Duration.parse("30d")
ASSERTION_TIMEOUT = Duration.parse("10min")
STANDBY_WAIT = Duration.parse("10s")
RESUME_FROM = Size(10 * 1000**3)
BACKGROUND_FROM = Size(10 * 1000**3)
BACKGROUND_FOR = Duration.parse("5min")
HOOK_TIMEOUT = Duration.parse("5min")
NEVER, DAILY, WEEKLY = Interval.parse("never"), Interval.parse("daily"), Interval.parse("weekly")
HOURLY = Interval.parse("1h")
TOML_WORDS = {
    "array": "list",
    "object": "table",
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
}
# Where msgspec found a problem in a table that may occur several times.
ARRAY_OF_TABLES = re.compile(r"(node|copy|drill\.assertion)\[(\d+)\](?:\.(.*))?")
# TOML's escapes for the NUL character, which must not occur literally.
ESCAPED_NUL = re.compile(r"\\(?:u0000|U00000000|x00)")
Text = Annotated[str, Meta(min_length=1)]


class CutTable(Record, frozen=True):
    """The `[cut]` table of fleet.toml."""

    global_id: Text = "exact"


class WalTable(Record, frozen=True):
    """The `[wal]` table of fleet.toml."""

    max_retained_wal: Size = RETAINED_WAL_MAX


ALL: Literal["all"] = "all"
# How many a rule keeps: a positive number, or all.
KeepCount: TypeAlias = Annotated[int, Meta(ge=1)] | Literal["all"]


class RetentionTable(Record, frozen=True):
    """The `[retention]` table of fleet.toml: the rules (see `Retention`), the alarms and the grace period of `gc`."""

    last: KeepCount | None = None
    only_full: KeepCount | None = None
    within: Duration | None = None
    hourly: KeepCount | None = None
    daily: KeepCount | None = None
    weekly: KeepCount | None = None
    monthly: KeepCount | None = None
    yearly: KeepCount | None = None
    max_age: Duration | None = None
    quota: Size | None = None
    gc_grace: Duration = GC_GRACE
    merge: Interval = NEVER


class GroupsTable(Record, frozen=True):
    """The `[groups]` table of fleet.toml. `large_objects`: full snapshots copy large objects, too."""

    include: tuple[Text, ...] = ("*",)
    exclude: tuple[Text, ...] = ()
    append_only: tuple[Text, ...] = ()
    large_objects: bool = False


class CheckTable(Record, frozen=True):
    """The `[check]` table of fleet.toml: what a check may lack and still pass, and how old a reading may be."""

    allow: tuple[Literal["one-copy"], ...] = ()
    reread: Duration = REREAD


class CopiesTable(Record, frozen=True):
    """The `[copies]` table of fleet.toml: how many standbys of a shard a create needs, and how long it waits for them.

    `require` is a number, "all", or "any" for any number, also none. `base` says where a full snapshot reads the base
    copy of a primary: on the primary itself, or on a standby where that can decode and takes part. An interrupted full
    snapshot of at least `resume_from` bytes of tables can be resumed. With `failover_slots`, PostgreSQL keeps the slots
    of shards without listed standbys on their standbys, too. If a standby with at least `background_from` bytes of
    tables has to be copied again, increments copy its tables after their commits, for about `background_for` each.
    """

    require: Literal["any", "all"] | Annotated[int, Meta(ge=0)] = "any"
    wait: Duration = STANDBY_WAIT
    base: Literal["every-node", "prefer-standby"] = "every-node"
    resume_from: Size = RESUME_FROM
    failover_slots: bool = False
    background_from: Size = BACKGROUND_FROM
    background_for: Duration = BACKGROUND_FOR


class LimitsTable(Record, frozen=True):
    """The `[limits]` table of fleet.toml: rates per node for reading and restoring, and for the whole command.

    `store` is the rate at which a command stores objects; `watch` begins heavy tasks only within the `hours`.
    """

    read: Rate | None = None
    store: Rate | None = None
    restore: Rate | None = None
    hours: Text | None = None


class GlobalsTable(Record, frozen=True):
    """The `[globals]` table of fleet.toml."""

    passwords: bool = False


class WatchTable(Record, frozen=True):
    """The `[watch]` table of fleet.toml."""

    every: Interval
    full: Interval = WEEKLY
    name: Text = "watch-{date}-{time}"
    check: Interval = DAILY
    copy: Interval = HOURLY
    drill: Interval = NEVER
    gc: Interval = WEEKLY
    accept_inconclusive: bool = False


# The names under which the success of commands can be reported; `check --live` has another than `check`, because it
# proves something else.
Reported: TypeAlias = Literal["create", "check", "check-live", "drill", "restore", "copy", "merge", "prune", "gc"]
# Housekeeping is not reported by default: if all commands share an address, it would hide that creates have stopped.
REPORTED: tuple[Reported, ...] = ("create", "check", "check-live", "drill", "restore")


class NotifyTable(Record, frozen=True):
    """The `[notify]` table of fleet.toml. In `success_url`, `{command}` stands for the command's name."""

    command: Annotated[tuple[Text, ...], Meta(min_length=1)] | None = None
    success_url: Text | None = None
    success_of: Annotated[tuple[Reported, ...], Meta(min_length=1)] = REPORTED


class HooksTable(Record, frozen=True):
    """The `[hooks]` table of fleet.toml: programs with their arguments, and how long each may run."""

    before: Annotated[tuple[Text, ...], Meta(min_length=1)] | None = None
    after: Annotated[tuple[Text, ...], Meta(min_length=1)] | None = None
    timeout: Duration = HOOK_TIMEOUT


class ToolsTable(Record, frozen=True):
    """The `[tools]` table of fleet.toml."""

    postgresql: Text | None = None


class EncryptionTable(Record, frozen=True):
    """The `[encryption]` table of fleet.toml, which contains exactly one of the three keys."""

    key_file: Text | None = None
    key_variable: Text | None = None
    key_command: Annotated[tuple[Text, ...], Meta(min_length=1)] | None = None


class MetricsTable(Record, frozen=True):
    """The `[metrics]` table of fleet.toml. If `traces` is None, the environment decides."""

    file: Text | None = None
    listen: Text | None = None
    traces: bool | None = None


class CopyTable(Record, frozen=True):
    """One `[[copy]]` table of fleet.toml: a second store, as a URL, a folder or the fleet file that names it."""

    to: Text


class NodeTable(Record, frozen=True):
    """One `[[node]]` table of fleet.toml."""

    id: Annotated[str, Meta(pattern=NODE_ID)]
    dsn: Text
    backup_of: Text | None = None
    max_retained_wal: Size | None = None
    connections_max: Annotated[int, Meta(ge=CONNECTIONS_MIN)] | None = None
    known_as: tuple[Text, ...] = ()


Value: TypeAlias = bool | int | float | str
# A single value, or rows, each a value or a list of values.
Expected: TypeAlias = Value | tuple[Value | tuple[Value, ...], ...] | UnsetType


class AssertionTable(Record, frozen=True):
    """One `[[drill.assertion]]` of fleet.toml: a query on shard `node`, and the expected rows (none if UNSET)."""

    node: Annotated[str, Meta(pattern=NODE_ID)]
    sql: Text
    expected: Expected = UNSET
    timeout: Duration = ASSERTION_TIMEOUT


class DrillTable(Record, frozen=True):
    """The `[drill]` table of fleet.toml: a drill's servers, and the assertions about the restored databases.

    `postgresql` is the folder of the servers' programs, or None for the wheel's. `extensions` are extensions that a
    superuser creates there, in addition to those that PostgreSQL and Cutline trust.
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
    retired: tuple[Annotated[str, Meta(pattern=NODE_ID)], ...] = ()
    store_options: dict[str, Any] = msgspec.field(default_factory=dict)
    cut: CutTable = CutTable()
    wal: WalTable = WalTable()
    groups: GroupsTable = GroupsTable()
    retention: RetentionTable = RetentionTable()
    spark: dict[str, Any] = msgspec.field(default_factory=dict)
    tools: ToolsTable = ToolsTable()
    encryption: EncryptionTable | None = None
    check: CheckTable = CheckTable()
    copies: CopiesTable = CopiesTable()
    globals: GlobalsTable = GlobalsTable()
    metrics: MetricsTable = MetricsTable()
    drill: DrillTable = DrillTable()
    watch: WatchTable | None = None
    copy: tuple[CopyTable, ...] = ()
    notify: NotifyTable = NotifyTable()
    limits: LimitsTable = LimitsTable()
    hooks: HooksTable = HooksTable()


def decode_fleet_file(text: str) -> FleetFile:
    """Decode fleet.toml; raise msgspec.DecodeError or ValueError, which `toml_problem` describes."""
    # A NUL in a path or dsn would cause an error later, or truncate the text.
    if ESCAPED_NUL.search(text) and _has_nul(msgspec.toml.decode(text)):
        raise ValueError("a string contains the character NUL (\\u0000)")
    return msgspec.toml.decode(text, type=FleetFile, dec_hook=_decode)


def _has_nul(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_nul, [*value, *value.values()]))
    return any(map(_has_nul, value)) if isinstance(value, list) else isinstance(value, str) and "\0" in value


def toml_hint(error: Exception) -> str:
    """Return the hint for an error from `decode_fleet_file`."""
    if isinstance(error, DecodeError) and not isinstance(error, ValidationError):
        return "correct the TOML syntax; strings must be quoted"
    if str(error).endswith("got `array` - at `$.drill`"):
        return "put settings in [drill], and each assertion in its own [[drill.assertion]]; see docs/fleet-file.md"
    if re.search(r"unknown field `(name|store)` - at `\$\.copy", str(error)):
        return "each [[copy]] has only `to`: the URL of the second store, or the path of a fleet file that names it"
    # Keys after a table header belong to that table, and [spark] and [store_options] accept any key.
    if re.search(r"(unknown|required) field `(name|store)`(?! - at `\$\.node)", str(error)):
        return "name and store must come before the first table; docs/fleet-file.md lists every key"
    if re.search(r"unknown field `retired`|`retired` is in \[", str(error)):
        return "retired must come before the first table of the file, such as after name and store"
    return "docs/fleet-file.md lists every key"


def toml_problem(error: Exception) -> str:
    """Describe the problem in TOML's terms: msgspec uses JSON's terms, and names keys by JSONPath (`$.node[0].dsn`)."""
    text = re.sub(r"`\$\.([^`]*)`", _place, str(error))
    text = re.sub(r"^Object contains unknown field (`.*?`)(?: - at (.*))?$", _unknown_key, text)
    text = re.sub(r"^Object missing required field (`.*?`)(?: - at (.*))?$", _missing_key, text)
    text = re.sub(r"`\w+(?: \| \w+)*`", _toml_types, text)
    return text[:1].lower() + text[1:]


def _place(match: re.Match[str]) -> str:
    """Name a place in the file as its author sees it: `$.node[1].dsn` is `dsn` of the 2nd [[node]]."""
    place = ARRAY_OF_TABLES.fullmatch(match[1])
    table, number, key = place.groups() if place else ("", "", match[1])
    of = f"the {_ordinal(int(number) + 1)} [[{table}]]" if table else ""
    texts = [_key_text(key)] if key else []
    return " of ".join([*texts, *([of] if of else [])])


def _key_text(key: str) -> str:
    """Name a key; an item of its list is counted from 1: `include[0]` is item 1 of `include`."""
    name, *items = re.split(r"\[(\d+)\]", key)
    numbers = [item for item in items if item]
    return "".join(f"item {int(number) + 1} of " for number in reversed(numbers)) + f"`{name}`"


def _ordinal(number: int) -> str:
    is_teen = number % 100 in (11, 12, 13)
    return f"{number}{'th' if is_teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def _toml_types(match: re.Match[str]) -> str:
    kinds = [TOML_WORDS.get(kind) for kind in match[0].strip("`").split(" | ") if kind != "null"]
    return " or ".join(kind for kind in kinds if kind) if all(kinds) else match[0]


def _unknown_key(match: re.Match[str]) -> str:
    # Imported here, because it is only needed for a mistake.
    from difflib import get_close_matches

    found = re.search(r"\w+(?=`$|\]\]$)", match[2] or "")
    known = _keys_of(found[0] if found else "")
    similar = [f"`{key}`" for key in get_close_matches(match[1].strip("`"), known, 1)]
    place = f" in {match[2]}" if match[2] else ""
    return f"unknown key {match[1]}{place}" + (f": did you mean {similar[0]}?" if similar else "")


def _keys_of(table: str) -> list[str]:
    """Return the keys of a table of the file, or of the file itself for ""; nothing for other tables."""
    fields = msgspec.structs.fields(FleetFile)
    if not table:
        return [each.encode_name for each in fields]
    kinds = [kind for each in fields if each.encode_name == table for kind in _records_of(each.type)]
    return [each.encode_name for kind in kinds for each in msgspec.structs.fields(kind)]


def _records_of(kind: Any) -> list[type[Record]]:
    """Return the records in a type such as tuple[NodeTable, ...]."""
    if isinstance(kind, type) and issubclass(kind, Record):
        return [kind]
    return [record for part in get_args(kind) for record in _records_of(part)]


def _missing_key(match: re.Match[str]) -> str:
    return f"{match[2]} lacks the key {match[1]}" if match[2] else f"there is no {match[1]}"


def _decode(kind: type[Any], value: Any) -> Any:
    if kind in (Size, Rate, Duration, Interval):
        return kind.from_document(value)
    raise NotImplementedError(kind.__name__)


DEPLOY_MODE = "spark.submit.deployMode"
REMOTE, API_MODE, CLASSIC = "spark.remote", "spark.api.mode", "classic"
# Spark checks the image only when it creates the first executor; if the image is missing, it runs without executors.
IMAGES = ("spark.kubernetes.container.image", "spark.kubernetes.executor.container.image")
# An increment of an idle fleet takes about half a second.
EVERY_SECONDS_MIN = 10
GLOBAL_ID_FORMS = ("exact", "xa", "citus")


def check_global_id(rule: str) -> None:
    """Check `cut.global_id`: the name of a form, or a regex with a group named `global`."""
    if rule in GLOBAL_ID_FORMS:
        return
    try:
        groups = re.compile(rule).groupindex
    except re.error as error:
        raise ValueError(f"cut.global_id must be exact, xa, citus or a valid regex: {error}") from error
    if "global" not in groups:
        raise ValueError(f"cut.global_id: the regex {rule!r} has no group named global: (?P<global>…)")


def check_dsn(key: str, dsn: str, *, is_primary: bool) -> str:
    """Return the dsn; if it names several hosts, add target_session_attrs for the node's kind of server.

    If it names one host, PGTARGETSESSIONATTRS, which an application on this machine may need, does not apply to it: it
    would shut out standbys, or primaries.
    """
    given = {name: str(value) for name, value in conninfo_to_dict(dsn).items() if value is not None}
    if "replication" in given:
        raise ValueError(f"{key} sets replication: remove it, because Cutline sets it where needed")
    # Without target_session_attrs, libpq uses the first host that answers, so sessions might reach different servers.
    hosts = [given[name] for name in ("host", "hostaddr") if given.get(name)]
    if not hosts or "target_session_attrs" in given:
        return dsn
    if any("," in host for host in hosts):
        return make_conninfo(dsn, target_session_attrs="primary" if is_primary else "standby")
    return make_conninfo(dsn, target_session_attrs="any") if os.environ.get("PGTARGETSESSIONATTRS") else dsn


def check_spark_master(master: object) -> str:
    """Return `spark.master`; raise ValueError if jobs can't run there."""
    if not isinstance(master, str) or not master:
        raise ValueError("`spark.master` must be a non-empty string")
    if master.startswith("sc://"):
        raise ValueError(
            "`spark.master` is a Spark Connect server, which can't run Cutline's jobs; name the cluster's master"
        )
    if cores_of(master) == 0:
        raise ValueError(f"`spark.master` is {master}, which has no thread that could run a task")
    return master


def check_spark_settings(master: str, settings: Mapping[str, str]) -> None:
    """Check that the command is the driver, with its own JVM, and that an image is set for executors on Kubernetes."""
    for name in (REMOTE, API_MODE):
        if settings.get(name, CLASSIC).strip().lower() != CLASSIC:
            raise ValueError(f"`{name}` selects Spark Connect, which can't run Cutline's jobs: remove it")
    if settings.get(DEPLOY_MODE, "client").strip().lower() != "client":
        raise ValueError(
            f"`{DEPLOY_MODE}` must be client, because the command itself is the driver; in a cluster, run it in a pod"
            " or a container"
        )
    if master.startswith("k8s://") and not any(settings.get(name) for name in IMAGES):
        raise ValueError(f"`{IMAGES[0]}` is missing: it names the image for executors on {master} (docs/kubernetes.md)")


def check_watch(table: WatchTable | None) -> WatchTable | None:
    """Return the `[watch]` table.

    Raises ValueError if increments are too frequent, or a task runs more often than they do.
    """
    if table is None:
        return None
    if table.every < EVERY_SECONDS_MIN:
        raise ValueError(f"`watch.every` is less than {EVERY_SECONDS_MIN} s")
    for name, interval in (("full", table.full), ("check", table.check), ("drill", table.drill)):
        if 0 < interval < table.every:
            raise ValueError(f"`watch.{name}` runs more often than `watch.every`")
    return table


# A fleet.toml with a thousand nodes is 200 kB. Reading a device or the wrong file might never end.
FILE_BYTES_MAX = 16 << 20
SET_VARIABLE = "set the variable, or correct its name"
NO_FILE_HINT = "name a file with --fleet FILE or SNAPSHOT_FLEET, or write an example to edit: snapshot init --example"
LOOPBACK, PORTS = "127.0.0.1", 65536


class FleetFileError(UsageError):
    """fleet.toml is missing, unreadable or invalid."""


class KnownServer(Struct, frozen=True):
    """Identifies the server that a command first reached through a node's dsn; later sessions must reach it again."""

    system_identifier: str
    in_recovery: bool


@dataclass(frozen=True, slots=True)
class Node:
    """One PostgreSQL database: a primary, or a standby of the primary `backup_of`."""

    id: str
    # The dsn may contain a password, and a traceback shows the repr of objects.
    dsn: str = field(repr=False)
    backup_of: str | None = None
    # How much WAL a chain's slot may retain on this node.
    retained_wal_bytes_max: int = RETAINED_WAL_MAX
    # The most sessions that a command opens on this node at once; None: its tasks use half of the free connections.
    connections_max: int | None = None
    # The folder that contains pg_dump and pg_restore; None: search for them.
    programs: Path | None = None
    # How fast a command reads from this node, and restores into it; None: no limit.
    read_bytes_per_second: int | None = None
    restore_bytes_per_second: int | None = None
    # Other names that distributed transactions have for the shard (fleet.participants).
    known_as: tuple[str, ...] = ()
    # The id in fleet.toml, if the chain that a command works on knows the node by another (fleet.chain_ids).
    listed_as: str = ""
    # None until a session has reached the server.
    server: KnownServer | None = field(default=None, compare=False)

    @property
    def shard(self) -> str:
        """The id of the primary whose rows this node holds."""
        return self.backup_of or self.id

    @property
    def listed_id(self) -> str:
        """The id of the node in fleet.toml."""
        return self.listed_as or self.id


def read_limit(nodes: Iterable[Node]) -> int | None:
    """Return how many bytes per second may be read from each of these nodes: fleet.toml has one limit for all."""
    return min((limit for node in nodes if (limit := node.read_bytes_per_second) is not None), default=None)


def restore_limit(nodes: Iterable[Node]) -> int | None:
    """Return how many bytes per second each of these nodes may get in a restore: fleet.toml has one limit for all."""
    return min((limit for node in nodes if (limit := node.restore_bytes_per_second) is not None), default=None)


class GroupRules(Record, frozen=True):
    """Select the tables that are groups in the fleet, by patterns for `schema.table` with `*` and `?`."""

    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    append_only: tuple[str, ...] = ()


# Rules in the order in which they are shown, and those of them that judge restore points by the times of their cuts.
CALENDAR_RULES = ("hourly", "daily", "weekly", "monthly", "yearly")
TIME_RULES = ("within", *CALENDAR_RULES)
RULES = ("last", "only_full", *TIME_RULES)


class Retention(Struct, frozen=True):
    """What `prune` keeps, when the fleet's snapshots are too old or too large, and how long `gc` keeps garbage.

    Each rule keeps restore points; None: the rule is not set. `last`: this many of the newest snapshots with all their
    increments. `only_full`: the full snapshots of this many of the newest snapshots. `within_seconds`: every restore
    point younger than this. `hourly` to `yearly`: the newest restore point in each of this many of the newest hours,
    days, ISO weeks, months and years (UTC) that have one.

    `max_age_seconds` is the age of the newest restore point that is reported, and `quota_bytes` the size of all
    snapshots that is reported (None: never). Neither deletes anything. `gc` does not remove anything younger than its
    grace period. `watch` merges the chain that it continues once per `merge_seconds` (0: never).
    """

    last: KeepCount | None = None
    only_full: KeepCount | None = None
    within_seconds: float | None = None
    hourly: KeepCount | None = None
    daily: KeepCount | None = None
    weekly: KeepCount | None = None
    monthly: KeepCount | None = None
    yearly: KeepCount | None = None
    max_age_seconds: float | None = None
    quota_bytes: int | None = None
    gc_grace_seconds: float = GC_GRACE
    merge_seconds: float = NEVER

    @property
    def rules(self) -> dict[str, KeepCount | float]:
        """The rules that are set, by their names in fleet.toml; `within` is in seconds."""
        values = {name: self.within_seconds if name == "within" else getattr(self, name) for name in RULES}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def or_default(self) -> Retention:
        """These settings, with the default rules if no rule is set."""
        if self.rules:
            return self
        return structs.replace(
            self, last=DEFAULT_LAST, daily=DEFAULT_DAILY, weekly=DEFAULT_WEEKLY, monthly=DEFAULT_MONTHLY
        )


# The default never asks how old a restore point is: without new ones, nothing is ever removed.
DEFAULT_LAST, DEFAULT_DAILY, DEFAULT_WEEKLY, DEFAULT_MONTHLY = 2, 7, 4, 12


class ListenAddress(Struct, frozen=True):
    """The address on which an endpoint listens."""

    host: str
    port: int


class MetricsRules(Struct, frozen=True):
    """Where metrics go (docs/monitoring.md): to a text file, to the endpoint of `watch`, or nowhere (None).

    `traces`: whether spans are sent; None: the environment decides.
    """

    file: Path | None = None
    listen: ListenAddress | None = None
    traces: bool | None = None


@dataclass(frozen=True, slots=True)
class Fleet:
    """The fleet as fleet.toml describes it; `nodes` are in the order they appear in the file.

    `retired` are the ids of shards that are no longer part of the fleet. Those of their nodes that the file still lists
    are `retired_nodes`, and not among `nodes`.

    Commands without Spark don't need the variables in [spark]: a setting whose variable is not set stays unexpanded,
    and `spark_missing` contains the problem (`check_spark_variables`).
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
    retention: Retention = field(default_factory=Retention)
    # The encryption of `store`; None: objects are stored unencrypted.
    encryption: FleetEncryption | None = None
    drill: DrillTable = field(default_factory=DrillTable)
    # The schedule of `snapshot watch`, the hours in which it begins heavy tasks (None: any), and the command that it
    # runs to report failures.
    watch: WatchTable | None = None
    hours: Hours | None = None
    notify: tuple[str, ...] = ()
    # The address to which the commands in `success_of` send a request after a success, with `{command}` in the place of
    # their name, or "".
    success_url: str = field(default="", repr=False)
    success_of: tuple[str, ...] = REPORTED
    hooks: HooksTable = field(default_factory=HooksTable)
    metrics: MetricsRules = field(default_factory=MetricsRules)
    with_passwords: bool = False
    # Whether full snapshots copy large objects, unless the command says otherwise.
    with_large_objects: bool = False
    # Whether a check may pass although a shard has no second copy to compare with.
    allows_one_copy: bool = False
    # A check that rests on earlier checks passes only if they read everything in this time.
    reread_seconds: float = REREAD
    # The number of standbys of each shard that a create needs; None: all of them.
    standbys_min: int | None = 0
    # How long a create waits for a standby that it may leave out.
    standby_wait_seconds: float = STANDBY_WAIT
    # Whether a full snapshot reads tables on a standby instead of on the primary, where it can.
    spares_primaries: bool = False
    # The size of tables from which an interrupted full snapshot can be resumed.
    resume_bytes_min: int = RESUME_FROM
    # The size of tables from which a standby that has to be copied again is copied after commits, and for how long.
    background_bytes_min: int = BACKGROUND_FROM
    background_seconds: float = BACKGROUND_FOR
    # Whether slots get the FAILOVER property, where `has_failover_slots` says so.
    failover_slots: bool = False
    # The second stores (snapshot copy): URLs, folders and fleet files.
    copies: tuple[str, ...] = ()
    retired: tuple[str, ...] = ()
    retired_nodes: tuple[Node, ...] = ()

    @property
    def primaries(self) -> tuple[Node, ...]:
        """The shards' primaries, in the order they appear in the file."""
        return tuple(node for node in self.nodes if node.backup_of is None)

    def has_failover_slots(self, node: Node) -> bool:
        """Whether a chain's slot on the node gets the FAILOVER property, if the server's version allows it.

        A listed standby has a slot of the same name, which would end the slot synchronization of that standby.
        """
        return self.failover_slots and not (node.backup_of or any(other.backup_of == node.id for other in self.nodes))

    def standbys_needed(self, shard: str) -> int:
        """Return how many standbys of the shard a create needs."""
        listed = sum(node.backup_of == shard for node in self.nodes)
        return listed if self.standbys_min is None else min(self.standbys_min, listed)

    def node(self, node_id: str) -> Node:
        """Return the node with this id; raise KeyError if there is none."""
        for node in self.nodes:
            if node.id == node_id:
                return node
        raise KeyError(node_id)


def load_fleet(path: Path, *, hint: str = NO_FILE_HINT) -> Fleet:
    """Read and validate fleet.toml; raise FleetFileError naming the file and the invalid key.

    `hint` is the hint for a missing file.
    """
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        # Editors on Windows may begin a file with a byte order mark.
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
        raise FleetFileError(f"{path} is larger than {size_text(FILE_BYTES_MAX)}", hint="name a fleet file")
    try:
        return _fleet(path, decode_fleet_file(text))
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        hint = SET_VARIABLE if isinstance(error, VariableMissingError) else toml_hint(error)
        raise FleetFileError(f"{path}: {toml_problem(error)}", hint=hint) from error


def _fleet(path: Path, file: FleetFile) -> Fleet:
    libpq_environment.forget_settings()
    listed = tuple(_node(entry, file) for entry in file.node)
    _check_nodes(listed)
    nodes = _without_retired(listed, file.retired)
    check_global_id(file.cut.global_id)
    if any(table.timeout <= 0 for table in file.drill.assertion):
        raise ValueError("`drill.assertion.timeout` is 0: no assertion could finish in time")
    if file.check.reread <= 0:
        raise ValueError("`check.reread` is 0: no check could rest on an earlier check")
    for table, given in (("spark", file.spark), ("store_options", file.store_options)):
        # These tables accept any key, and nobody would notice that the shards are not retired.
        if "retired" in given:
            raise ValueError(f"`retired` is in [{table}], so it retires no shard")
    missing: list[str] = []
    spark = expand_all("spark", file.spark, missing)
    encryption = FleetEncryption(_key_source(file.encryption), file.name) if file.encryption else None
    if file.globals.passwords and encryption is None:
        raise ValueError(
            "`globals.passwords` needs [encryption]: anyone who can read an unencrypted store could guess the passwords"
        )
    given = spark_settings(spark)
    master = check_spark_master(given.pop(SPARK_MASTER, "local[*]"))
    settings = {name: _text_of(value) for name, value in given.items()}
    # An unexpanded `${NAME}` is not a secret.
    remember_secret_settings({name: value for name, value in settings.items() if not VARIABLE.search(value)})
    check_spark_settings(master, settings)
    return Fleet(
        path=path,
        name=file.name,
        store=_limited(_store(file, encryption), file.limits, master, settings),
        nodes=nodes,
        global_id=file.cut.global_id,
        groups=GroupRules(file.groups.include, file.groups.exclude, file.groups.append_only),
        spark_master=master,
        spark_settings=settings,
        spark_missing=tuple(missing),
        encryption=encryption,
        drill=_drill(file.drill),
        watch=check_watch(file.watch),
        hours=_hours(file.limits.hours),
        notify=file.notify.command or (),
        success_url=_success_url(file.notify.success_url),
        success_of=file.notify.success_of,
        hooks=_hooks(file.hooks),
        metrics=_metrics(file.metrics),
        with_passwords=file.globals.passwords,
        with_large_objects=file.groups.large_objects,
        allows_one_copy="one-copy" in file.check.allow,
        reread_seconds=file.check.reread,
        standbys_min=_standbys_min(file.copies.require),
        standby_wait_seconds=file.copies.wait,
        spares_primaries=file.copies.base == "prefer-standby",
        resume_bytes_min=file.copies.resume_from,
        failover_slots=file.copies.failover_slots,
        background_bytes_min=file.copies.background_from,
        background_seconds=file.copies.background_for,
        copies=tuple(map(_copy_place, file.copy)),
        retention=_retention(file.retention),
        retired=file.retired,
        retired_nodes=tuple(node for node in listed if node not in nodes),
    )


def _retention(table: RetentionTable) -> Retention:
    for name, seconds in (("within", table.within), ("max_age", table.max_age)):
        if seconds is not None and seconds <= 0:
            raise ValueError(f"`retention.{name}` is 0: every restore point is older")
    return Retention(
        last=table.last,
        only_full=table.only_full,
        within_seconds=table.within,
        hourly=table.hourly,
        daily=table.daily,
        weekly=table.weekly,
        monthly=table.monthly,
        yearly=table.yearly,
        max_age_seconds=table.max_age,
        quota_bytes=table.quota,
        gc_grace_seconds=table.gc_grace,
        merge_seconds=table.merge,
    )


def _copy_place(table: CopyTable) -> str:
    place = expand("copy.to", table.to)
    if "://" in place:
        return place
    path = _path("copy.to", place)
    if not path.is_absolute():
        raise ValueError("`copy.to` is neither a URL nor an absolute path")
    return str(path)


def _path(key: str, text: str) -> Path:
    """Return the path, with a home folder in the place of `~`."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"`{key}`: its ~ names a user without a home folder") from None


def _standbys_min(require: str | int) -> int | None:
    if isinstance(require, int):
        return require
    return None if require == "all" else 0


def _metrics(table: MetricsTable) -> MetricsRules:
    file = _path("metrics.file", table.file) if table.file else None
    if file and not file.is_absolute():
        raise ValueError("`metrics.file` is not an absolute path")
    return MetricsRules(file, _listen_address(table.listen) if table.listen else None, table.traces)


def _listen_address(text: str) -> ListenAddress:
    """Parse `[metrics] listen`: `9957`, `host:9957` or `[::1]:9957`; without a host, only this machine can connect."""
    host, _, port = text.rpartition(":")
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < PORTS or (":" in host) != host.startswith("["):
        raise ValueError(f"`metrics.listen` is {text!r}, but must have the form 127.0.0.1:9957")
    return ListenAddress(host.removeprefix("[").removesuffix("]") or LOOPBACK, int(port))


def _key_source(table: EncryptionTable) -> KeySource:
    given = [name for name in ("key_file", "key_variable", "key_command") if getattr(table, name) is not None]
    if len(given) != 1:
        raise ValueError("`encryption` needs exactly one of key_file, key_variable and key_command")
    file = _path("encryption.key_file", table.key_file) if table.key_file else None
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


def _limited(store: StoreLocation, limits: LimitsTable, master: str, settings: Mapping[str, str]) -> StoreLocation:
    """Return the store with the limit on the rate at which it stores objects."""
    if limits.store is None:
        return store
    if (most := tasks_max(master, settings)) is None:
        raise ValueError(
            "`limits.store` is shared by all tasks: limit these with `spark.cores.max`, or with"
            " `spark.executor.instances` (`spark.dynamicAllocation.maxExecutors`) and `spark.executor.cores`"
        )
    return replace(store, bytes_per_second=limits.store, tasks_max=most)


def _hours(text: str | None) -> Hours | None:
    try:
        return None if text is None else Hours.parse(text)
    except ValueError as error:
        raise ValueError(f"`limits.hours`: {error}") from error


def _success_url(text: str | None) -> str:
    if text is None:
        return ""
    url = expand("notify.success_url", text)
    # Whoever knows the address can report successes.
    remember_secret(url)
    if not _is_address(url):
        raise ValueError("`notify.success_url` is not an address that begins with https:// or http://")
    return url


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # An invalid port is an error only when it is read.
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _drill(table: DrillTable) -> DrillTable:
    if table.postgresql is None:
        return table
    return msgspec.structs.replace(table, postgresql=str(_path("drill.postgresql", table.postgresql)))


def _hooks(table: HooksTable) -> HooksTable:
    if table.timeout <= 0:
        raise ValueError("`hooks.timeout` is 0: no hook could end in time")
    return table


def _node(entry: NodeTable, file: FleetFile) -> Node:
    dsn = libpq_environment.with_environment(expand_dsn(f"node {entry.id}: dsn", entry.dsn))
    remember_secrets_of(dsn)
    dsn = check_dsn(f"node {entry.id}: dsn", dsn, is_primary=entry.backup_of is None)
    if entry.max_retained_wal is None:
        retained_bytes_max = _retained_max("wal.max_retained_wal", file.wal.max_retained_wal)
    else:
        retained_bytes_max = _retained_max(f"node {entry.id}: max_retained_wal", entry.max_retained_wal)
    return Node(
        id=entry.id,
        dsn=dsn,
        backup_of=entry.backup_of,
        retained_wal_bytes_max=retained_bytes_max,
        connections_max=entry.connections_max,
        programs=_path("tools.postgresql", file.tools.postgresql) if file.tools.postgresql else None,
        read_bytes_per_second=file.limits.read,
        restore_bytes_per_second=file.limits.restore,
        known_as=entry.known_as,
    )


def _retained_max(place: str, size: Size) -> Size:
    if size < RETAINED_WAL_MIN:
        raise ValueError(
            f"{place} is {size:,} bytes, but a server keeps WAL in files of {size_text(RETAINED_WAL_MIN)},"
            f" also for a slot that needs no more; set at least {RETAINED_WAL_MIN >> 20}MiB: docs/fleet-file.md"
        )
    return size


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
    _check_other_names(nodes)


def _without_retired(nodes: tuple[Node, ...], retired: tuple[str, ...]) -> tuple[Node, ...]:
    """Return the nodes of the shards that are not retired."""
    for node in nodes:
        if node.id in retired and node.backup_of is not None:
            raise ValueError(
                f"`retired` names {node.id}, which is a standby: it names shards by their primaries; a standby is just"
                " removed from the file"
            )
    left = tuple(node for node in nodes if node.shard not in retired)
    if not left:
        raise ValueError("`retired` names all shards: none is left")
    return left


def _check_other_names(nodes: tuple[Node, ...]) -> None:
    shards = {node.id: node.id for node in nodes}
    for node in nodes:
        if node.known_as and node.backup_of is not None:
            raise ValueError(f"node {node.id}: known_as belongs to the primary, {node.backup_of}")
        for name in node.known_as:
            if not is_single_name(name):
                raise ValueError(f"node {node.id}: known_as contains {name!r}, which is not a single name")
            if (other := shards.setdefault(name, node.id)) != node.id:
                raise ValueError(f"node {node.id}: known_as contains {name}, which also names node {other}")


def check_spark_variables(fleet: Fleet) -> None:
    """Raise FleetFileError if a variable in [spark] is not set; commands that may start Spark call this first."""
    if fleet.spark_missing:
        raise FleetFileError(f"{fleet.path}: {fleet.spark_missing[0]}", hint=SET_VARIABLE)


def check_drill(fleet: Fleet) -> None:
    """Raise FleetFileError if an assertion names a node that is not a primary; only drills call this."""
    primaries = [*(node.id for node in fleet.primaries), *fleet.retired]
    for number, assertion in enumerate(fleet.drill.assertion, start=1):
        if assertion.node not in primaries:
            raise FleetFileError(
                f"{fleet.path}: drill.assertion {number}: node names {assertion.node}, which is not a"
                " primary in this file",
                hint=f"name one of: {', '.join(primaries)}",
            )
