from __future__ import annotations

import json
import traceback
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from cutline.embedded.folder import describe
from cutline.embedded.server import EmbeddedNode
from cutline.fleet.config import FleetFileError, GroupRules, ListenAddress, MetricsRules, Node, Retention, load_fleet
from cutline.storage.location import AUTHORITY_VARIABLES, ENDPOINT_VARIABLES

NODE = '[[node]]\nid = "a"\ndsn = "dbname=a"\n'
BACKUP = '[[node]]\nid = "a-b"\nbackup_of = "a"\ndsn = "dbname=a host=b"\n'
HEAD = 'name = "shop"\nstore = "file:///store"\n'
EVERY_KEY = """
name = "shop"
store = "s3://${BUCKET}/shop"
[store_options]
retry_for = "30min"
key = "${S3_KEY}"
client = {region = "eu", endpoints = ["http://${HOST}:1"]}
[cut]
global_id = "^(?P<global>[^:]+):"
[wal]
max_retained_wal = 20000000
[groups]
include = ["public.*"]
exclude = ["audit.*"]
append_only = ["public.events"]
[metrics]
file = "/var/lib/cutline.prom"
listen = "[::1]:9957"
traces = false
[retention]
last = 3
only_full = "all"
within = "7d"
hourly = 24
daily = 7
weekly = 4
monthly = 12
yearly = 1
max_age = "26h"
quota = "500GB"
gc_grace = "1.5 d"
[spark]
master = "local[2]"
"driver.memory" = "1g"
sql.shuffle.partitions = 4
"spark.sql.ansi.enabled" = true
[[node]]
id = "a"
dsn = "postgresql://u:${PASSWORD}@h/shop"
known_as = ["east", "db:1"]
[[node]]
id = "a-b"
backup_of = "a"
dsn = "dbname=shop user=u"
max_retained_wal = "16MiB"
connections_max = 12
"""


@pytest.fixture
def fleet_file(tmp_path: Path) -> Path:
    return tmp_path / "fleet.toml"


def test_a_file_with_every_key_is_read(fleet_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BUCKET": "b", "S3_KEY": "k", "HOST": "h", "PASSWORD": "p$"}.items():
        monkeypatch.setenv(name, value)
    for name in (*ENDPOINT_VARIABLES, *AUTHORITY_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    fleet_file.write_text(EVERY_KEY)
    fleet = load_fleet(fleet_file)
    assert (fleet.name, fleet.store.url, fleet.path) == ("shop", "s3://b/shop", fleet_file)
    client = {"region": "eu", "endpoints": ["http://h:1"]}
    assert fleet.store.options == {"retry_for": 1800.0, "key": "k", "client": client}
    assert fleet.nodes == (
        Node(
            "a", "user=u password=p$ dbname=shop host=h", retained_wal_bytes_max=20_000_000, known_as=("east", "db:1")
        ),
        Node("a-b", "dbname=shop user=u", "a", retained_wal_bytes_max=16_777_216, connections_max=12),
    )
    assert [node.shard for node in fleet.nodes] == ["a", "a"]
    assert fleet.primaries == fleet.nodes[:1]
    assert fleet.node("a-b") is fleet.nodes[1]
    assert fleet.global_id == "^(?P<global>[^:]+):"
    assert fleet.groups == GroupRules(("public.*",), ("audit.*",), ("public.events",))
    assert fleet.retention == Retention(
        3, "all", 604800, 24, 7, 4, 12, 1, max_age_seconds=93600, quota_bytes=500 * 10**9, gc_grace_seconds=129600
    )
    assert fleet.metrics == MetricsRules(Path("/var/lib/cutline.prom"), ListenAddress("::1", 9957), traces=False)
    assert fleet.spark_master == "local[2]"
    assert fleet.spark_settings == {
        "spark.driver.memory": "1g",
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.ansi.enabled": "true",
    }
    with pytest.raises(KeyError):
        fleet.node("nobody")


@pytest.mark.parametrize(
    ("text", "host"), [("9957", "127.0.0.1"), (":9957", "127.0.0.1"), ("0.0.0.0:9957", "0.0.0.0"), ("vm:9957", "vm")]
)
def test_metrics_are_served_on_this_machine_unless_a_host_is_named(fleet_file: Path, text: str, host: str) -> None:
    fleet_file.write_text(f'{HEAD}[metrics]\nlisten = "{text}"\n{NODE}')
    assert load_fleet(fleet_file).metrics == MetricsRules(listen=ListenAddress(host, 9957))


@pytest.mark.parametrize("dsn", ["host=h dbname=shop password=${PASSWORD}", "postgresql://h/shop?password=${PASSWORD}",
    "postgresql://:${PASSWORD}@h/shop", "host=h password='${PASSWORD}' dbname=shop"])  # fmt: skip
@pytest.mark.parametrize("value", [
    " host=elsewhere", "' host=elsewhere", "p%", "%41", "a@elsewhere/b?host=elsewhere",
    "\\' host=elsewhere '", "${PASSWORD}",
])  # fmt: skip
def test_a_variable_of_a_dsn_is_a_value_and_never_text(
    fleet_file: Path, monkeypatch: pytest.MonkeyPatch, dsn: str, value: str
) -> None:
    monkeypatch.setenv("PASSWORD", value)
    fleet_file.write_text(f"{HEAD}[[node]]\nid = 'a'\ndsn = {json.dumps(dsn)}\n")
    given = conninfo_to_dict(load_fleet(fleet_file).nodes[0].dsn)
    del given["user"]
    assert given == {"host": "h", "dbname": "shop", "password": value}


def test_a_dsn_that_is_one_variable_is_taken_as_a_whole(fleet_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSN", "postgresql://u@h/shop")
    fleet_file.write_text(f'{HEAD}[[node]]\nid = "a"\ndsn = "${{DSN}}"\n')
    assert load_fleet(fleet_file).nodes == (Node("a", "postgresql://u@h/shop"),)


@pytest.mark.parametrize("dsn", ["postgresql://u:SECRET%@h", "dbname", "postgresql://u:SECRET%zz@h", "nosuch=SECRET"])
def test_a_malformed_dsn_is_refused_without_showing_it(
    fleet_file: Path, monkeypatch: pytest.MonkeyPatch, dsn: str
) -> None:
    for written in (dsn, "${DSN}"):
        monkeypatch.setenv("DSN", dsn)
        fleet_file.write_text(f"{HEAD}[[node]]\nid = 'a'\ndsn = {json.dumps(written)}\n")
        with pytest.raises(FleetFileError, match="node a: dsn is not a valid connection string") as raised:
            load_fleet(fleet_file)
        assert raised.value.exit_code == 2
        assert "SECRET" not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize(("text", "size_bytes"), [
    ("1", 1), ('"1 B"', 1), ('"64KiB"', 65_536), ('"64 kB"', 64_000), ('"500MB"', 500_000_000),
    ('"16GiB"', 17_179_869_184),
    ('"16gib"', 17_179_869_184), ('"1.5TB"', 1_500_000_000_000), ('"2 TiB"', 2_199_023_255_552),
])  # fmt: skip
def test_a_size_is_a_number_of_bytes_or_a_text_with_a_unit(fleet_file: Path, text: str, size_bytes: int) -> None:
    fleet_file.write_text(f"{HEAD}[retention]\nquota = {text}\n{NODE}")
    assert load_fleet(fleet_file).retention.quota_bytes == size_bytes


@pytest.mark.parametrize(("limits", "place"), [
    ("[wal]\nmax_retained_wal = '1 MiB'\n" + NODE, "wal.max_retained_wal is 1,048,576 bytes"),
    (NODE + "max_retained_wal = 16777215\n", "node a: max_retained_wal is 16,777,215 bytes"),
])  # fmt: skip
def test_a_limit_that_up_to_date_slots_would_pass_is_refused(fleet_file: Path, limits: str, place: str) -> None:
    fleet_file.write_text(HEAD + limits)
    with pytest.raises(FleetFileError, match=f"{place}, but a server keeps WAL in files of 16.0 MiB") as raised:
        load_fleet(fleet_file)
    assert "set at least 16MiB" in raised.value.message
    assert raised.value.exit_code == 2


def test_a_minimal_file_has_every_default(fleet_file: Path) -> None:
    fleet_file.write_text(HEAD + NODE)
    fleet = load_fleet(fleet_file)
    assert (fleet.global_id, fleet.spark_master, fleet.groups) == ("exact", "local[*]", GroupRules())
    assert fleet.nodes[0].retained_wal_bytes_max == 16 << 30
    assert (fleet.store.options, fleet.spark_settings) == ({}, {})


def test_the_embedded_fleets_own_file_is_read(tmp_path: Path) -> None:
    describe(tmp_path, [EmbeddedNode("s1", tmp_path / "1"), EmbeddedNode("s1-b1", tmp_path / "2", "s1")])
    fleet = load_fleet(tmp_path / "fleet.toml")
    assert [(node.id, node.backup_of) for node in fleet.nodes] == [("s1", None), ("s1-b1", "s1")]


@pytest.mark.parametrize(("text", "message"), [
    (HEAD, "there is no `node`"),
    ('store = "x"\n' + NODE, "there is no `name`"),
    ('name = "x"\n' + NODE, "there is no `store`"),
    (HEAD + "node = []\n", "expected list of length >= 1 - at `node`"),
    ('name = 1\nstore = "x"\n' + NODE, "expected text, got integer - at `name`"),
    ('name = ""\nstore = "x"\n' + NODE, "expected text of length >= 1 - at `name`"),
    (HEAD + 'color = "red"\n' + NODE, "unknown key `color`"),
    (HEAD + '[watch]\nevry = "5 min"\n' + NODE, "unknown key `evry` in `watch`: did you mean `every`?"),
    (HEAD + NODE + 'dns = "x"\n', "unknown key `dns` in the 1st [[node]]: did you mean `dsn`?"),
    (HEAD + '[cut]\nglobal = "xa"\n' + NODE, "unknown key `global` in `cut`"),
    (HEAD + "[wal]\nbytes = 1\n" + NODE, "unknown key `bytes` in `wal`"),
    (HEAD + "[groups]\nonly = []\n" + NODE, "unknown key `only` in `groups`"),
    (HEAD + NODE + 'host = "x"\n', "unknown key `host` in the 1st [[node]]"),
    (HEAD + 'cut = "xa"\n' + NODE, "expected table, got text - at `cut`"),
    (HEAD + '[store_options]\nkey = "${NOT_SET_ANYWHERE}"\n' + NODE, "store_options.key uses ${NOT_SET_ANYWHERE}"),
    (HEAD + NODE.replace("dbname=a", "password=${NOT_SET_ANYWHERE}"), "node a: dsn uses ${NOT_SET_ANYWHERE}"),
    ('name = "x"\nstore = "${NOT_SET_ANYWHERE}"\n' + NODE, "store uses ${NOT_SET_ANYWHERE}"),
    (HEAD + NODE + NODE.replace("dbname=a", "dbname=b"), "two nodes have the id a"),
    (HEAD + NODE + NODE.replace('"a"', '"b"'), "nodes a and b have the same dsn"),
    (HEAD + BACKUP, "no node is a primary"),
    (HEAD + NODE + BACKUP.replace('backup_of = "a"', 'backup_of = "c"'), "backup_of names c, which is not a primary"),
    (HEAD + NODE + BACKUP + BACKUP.replace('"a-b"', '"x"').replace('"a"', '"a-b"').replace("host=b", "host=c"),
     "node x: backup_of names a-b, which is not a primary"),
    (HEAD + NODE + BACKUP + 'known_as = ["x"]\n', "node a-b: known_as belongs to the primary, a"),
    (HEAD + NODE + 'known_as = ["x, y"]\n', "node a: known_as contains 'x, y', which is not a single name"),
    (HEAD + NODE + 'known_as = ["a-b"]\n' + BACKUP, "node a: known_as contains a-b, which also names node a-b"),
    (HEAD + NODE + 'known_as = ["x"]\n' + NODE.replace('"a"', '"b"').replace("dbname=a", "dbname=b") +
     'known_as = ["x"]\n', "node b: known_as contains x, which also names node a"),
    (HEAD + '[[node]]\nid = "a b"\ndsn = "x"\n', "at `id` of the 1st [[node]]"),
    (HEAD + '[[node]]\nid = "a"\n', "the 1st [[node]] lacks the key `dsn`"),
    (HEAD + NODE + '[[node]]\ndsn = "x"\n', "the 2nd [[node]] lacks the key `id`"),
    (HEAD + NODE * 12 + "[[node]]\n", "the 13th [[node]] lacks the key `id`"),
    (HEAD + NODE + "known_as = ['x', 1]\n", "got integer - at item 2 of `known_as` of the 1st [[node]]"),
    (HEAD + "[[copy]]\nto = 1\n" + NODE, "got integer - at `to` of the 1st [[copy]]"),
    (HEAD + NODE + "[watch]\nevery = '1m'\n", "'1m' is not a duration such as 24h, 30min or 7d: write 1min"),
    (HEAD + '[[node]]\nid = "a"\ndsn = 5\n', "expected text, got integer - at `dsn` of the 1st [[node]]"),
    (HEAD + '[cut]\nglobal_id = "("\n' + NODE, "cut.global_id must be exact, xa, citus or a valid regex"),
    (HEAD + '[cut]\nglobal_id = "(.*)"\n' + NODE, "has no group named global"),
    (HEAD + "[wal]\nmax_retained_wal = 0\n" + NODE, "a size must be positive - at `wal.max_retained_wal`"),
    (HEAD + "[wal]\nmax_retained_wal = true\n" + NODE, "a size is a number of bytes, or a string such as"),
    (HEAD + "[wal]\nmax_retained_wal = '0 GiB'\n" + NODE, "a size must be positive - at `wal.max_retained_wal`"),
    (HEAD + "[wal]\nmax_retained_wal = '16 barrels'\n" + NODE,
     "'16 barrels' is not a size such as 16GiB or 500MB - at `wal.max_retained_wal`"),
    (HEAD + "[wal]\nmax_retained_wal = '-1GiB'\n" + NODE, "is not a size such as 16GiB"),
    (HEAD + NODE + "max_retained_wal = '16'\n",
     "'16' is not a size such as 16GiB or 500MB - at `max_retained_wal` of the 1st [[node]]"),
    (HEAD + "[spark]\nmaster = 'sc://h'\n" + NODE, "`spark.master` is a Spark Connect server"),
    (HEAD + "[spark]\n'submit.deployMode' = 'cluster'\n" + NODE, "`spark.submit.deployMode` must be client"),
    (HEAD + "[spark]\n'api.mode' = 'connect'\n" + NODE, "`spark.api.mode` selects Spark Connect"),
    (HEAD + "[spark]\n'spark.master' = 4\n" + NODE, "`spark.master` must be a non-empty string"),
    (HEAD + "[spark]\nmaster = 'local'\n'spark.master' = 'yarn'\n" + NODE, "sets `spark.master` twice"),
    (HEAD + "[spark]\n'jars.packages' = ['a:b:1', 'c:d:2']\n" + NODE, "`spark.jars.packages` is a list"),
    (HEAD + "[spark]\nremote = 'sc://h'\n" + NODE, "`spark.remote` selects Spark Connect"),
    (HEAD + "[spark]\nmaster = 'k8s://https://h'\n" + NODE, "`spark.kubernetes.container.image` is missing"),
    (HEAD + NODE + "connections_max = 5\n", "expected integer >= 6 - at `connections_max` of the 1st [[node]]"),
    (HEAD + "[wal]\nretained_bytes_max = 1\n" + NODE, "unknown key `retained_bytes_max` in `wal`"),
    (HEAD + "[metrics]\nfile = 'cutline.prom'\n" + NODE, "`metrics.file` is not an absolute path"),
    (HEAD + "[metrics]\nfile = '~no-such-user/m'\n" + NODE, "`metrics.file`: its ~ names a user without a home folder"),
    (HEAD + "[encryption]\nkey_file = '~no-such-user/key'\n" + NODE, "`encryption.key_file`: its ~ names a user"),
    (HEAD + "[[copy]]\nto = '~no-such-user/second.toml'\n" + NODE, "`copy.to`: its ~ names a user"),
    (HEAD + "[tools]\npostgresql = '~no-such-user/bin'\n" + NODE, "`tools.postgresql`: its ~ names a user"),
    (HEAD + "[drill]\npostgresql = '~no-such-user/bin'\n" + NODE, "`drill.postgresql`: its ~ names a user"),
    (HEAD + "[metrics]\nlisten = '::1:9957'\n" + NODE, "`metrics.listen` is '::1:9957', but must have the form"),
    (HEAD + "[metrics]\nlisten = '127.0.0.1'\n" + NODE, "`metrics.listen` is '127.0.0.1', but must have the form"),
    (HEAD + "[metrics]\nlisten = '127.0.0.1:65536'\n" + NODE, "but must have the form 127.0.0.1:9957"),
    (HEAD + "[metrics]\nlisten = '127.0.0.1:0'\n" + NODE, "but must have the form 127.0.0.1:9957"),
    (HEAD + "[metrics]\ntraces = 1\n" + NODE, "expected boolean, got integer - at `metrics.traces`"),
    (HEAD + "[retention]\nkeep = 1\n" + NODE, "unknown key `keep` in `retention`"),
    (HEAD + "[retention]\nlast = 0\n" + NODE, "expected integer >= 1 - at `retention.last`"),
    (HEAD + "[retention]\ndaily = 'some'\n" + NODE, "'some' - at `retention.daily`"),
    (HEAD + "[retention]\nonly_full = true\n" + NODE, "got boolean - at `retention.only_full`"),
    (HEAD + "[retention]\nwithin = '0'\n" + NODE, "`retention.within` is 0: every restore point is older"),
    (HEAD + "[retention]\nmax_age = '0h'\n" + NODE, "`retention.max_age` is 0: every restore point is older"),
    (HEAD + "[retention]\nquota = 0\n" + NODE, "a size must be positive - at `retention.quota`"),
    (HEAD + "[retention]\ngc_grace = 24\n" + NODE,
     'a duration is a string such as "24h" - at `retention.gc_grace`'),
    (HEAD + "[store_options]\nretry_for = 600\n" + NODE,
     '`store_options.retry_for`: a duration is a string such as "24h"'),
    (HEAD + "[store_options]\nretry_for = 'long'\n" + NODE,
     "`store_options.retry_for`: 'long' is not a duration such as 24h, 30min or 7d"),
    (HEAD + "[retention]\ngc_grace = '1 year'\n" + NODE,
     "'1 year' is not a duration such as 24h, 30min or 7d - at `retention.gc_grace`"),
    (HEAD + '[groups]\nexclude = "a.b"\n' + NODE, "expected list, got text - at `groups.exclude`"),
    (HEAD + "[groups]\ninclude = [1]\n" + NODE, "expected text, got integer - at item 1 of `groups.include`"),
    (HEAD + '[encryption]\nkey_command = "cat key"\n' + NODE, "expected list, got text - at `encryption.key_command`"),
    (HEAD + "[spark]\nmaster = 4\n" + NODE, "`spark.master` must be a non-empty string"),
    (HEAD + "[spark]\nmaster = 'local[0]'\n" + NODE, "`spark.master` is local[0], which has no thread"),
    (HEAD + "[limits]\nstore = '1MB/s'\n[spark]\nmaster = 'spark://m:7077'\n'cores.max' = 'all'\n" + NODE,
     "`spark.cores.max` is 'all', but must be a positive number"),
    (HEAD + "[limits]\nstore = '1MB/s'\n[spark]\nmaster = 'yarn'\n'executor.instances' = 0\n" + NODE,
     "`spark.executor.instances` is '0', but must be a positive number"),
    (HEAD + "[limits]\nstore = '1MB/s'\n[spark]\nmaster = 'local-cluster[0,1,1024]'\n" + NODE,
     "`limits.store` is shared"),
    (HEAD + "[wal]\nmax_retained_wal = '9999PB'\n" + NODE,
     "'9999PB' is more than 8192.0 PiB - at `wal.max_retained_wal`"),
    (HEAD + "[limits]\nread = '" + "9" * 400 + "GB/s'\n" + NODE, "is more than 8192.0 PiB - at `limits.read`"),
    (HEAD + "[wal]\nmax_retained_wal = 9223372036854775808\n" + NODE, "a size must be at most 8192.0 PiB"),
    (HEAD + "[notify]\nsuccess_url = 'https://[::1/x'\n" + NODE, "`notify.success_url` is not an address"),
    (HEAD + "[notify]\nsuccess_url = 'https://h:99999/x'\n" + NODE, "`notify.success_url` is not an address"),
    ("name = \n", "fleet.toml: "),
    (HEAD.replace("store = \"", "store = \"/a\\u0000") + NODE, "a string contains the character NUL"),
    (HEAD + '[store_options]\n"a\\U00000000" = 1\n' + NODE, "a string contains the character NUL"),
    (HEAD + '[groups]\nexclude = ["a", "b\\\\\\u0000"]\n' + NODE, "a string contains the character NUL"),
    (HEAD + "[retention]\nwithin = '36501d'\n" + NODE, "'36501d' is more than 36,500 days - at `retention.within`"),
])  # fmt: skip
def test_every_mistake_is_named(fleet_file: Path, text: str, message: str) -> None:
    fleet_file.write_text(text)
    with pytest.raises(FleetFileError) as error:
        load_fleet(fleet_file)
    assert message in error.value.message
    assert str(fleet_file) in error.value.message
    assert error.value.exit_code == 2
    assert error.value.hint


@pytest.mark.parametrize("key", ["master", "'spark.master'", "spark.master"])
def test_the_master_may_be_named_with_and_without_the_prefix(fleet_file: Path, key: str) -> None:
    fleet_file.write_text(f"{HEAD}[spark]\n{key} = 'spark://m1:7077'\n{NODE}")
    fleet = load_fleet(fleet_file)
    assert (fleet.spark_master, fleet.spark_settings) == ("spark://m1:7077", {}), (
        "a session at this master must have the protection of a cluster"
    )


def test_large_objects_are_copied_if_the_file_says_so(fleet_file: Path) -> None:
    fleet_file.write_text(HEAD + NODE)
    assert not load_fleet(fleet_file).with_large_objects
    fleet_file.write_text(HEAD + NODE + "[groups]\nlarge_objects = true\n")
    assert load_fleet(fleet_file).with_large_objects


def test_what_looks_like_an_escape_of_nul_is_text(fleet_file: Path) -> None:
    """In a comment, a literal string and behind an escaped backslash it is none."""
    exclude = "[groups]  # \\u0000\nexclude = ['a\\x00b', \"a\\\\u0000b\"]\n"
    fleet_file.write_text(HEAD + exclude + NODE)
    assert load_fleet(fleet_file).groups.exclude == (r"a\x00b", r"a\u0000b")


def test_a_path_may_begin_with_the_users_home(fleet_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    more = "[tools]\npostgresql = '~/pg/bin'\n[drill]\npostgresql = '~/pg16/bin'\n[metrics]\nfile = '~/cutline.prom'\n"
    fleet_file.write_text(HEAD + more + NODE)
    fleet = load_fleet(fleet_file)
    assert fleet.nodes[0].programs == Path("/home/x/pg/bin")
    assert fleet.drill.postgresql == "/home/x/pg16/bin"
    assert fleet.metrics.file == Path("/home/x/cutline.prom")


@pytest.mark.parametrize("text", [
    'name = "shop"\n[cut]\nstore = "/x"\n' + NODE,
    'name = "shop"\n[store_options]\nanon = true\nstore = "/x"\n' + NODE,
    '[spark]\nmaster = "local"\nname = "shop"\nstore = "/x"\n' + NODE,
])  # fmt: skip
def test_keys_of_the_fleet_below_a_table_are_told_where_they_belong(fleet_file: Path, text: str) -> None:
    fleet_file.write_text(text)
    with pytest.raises(FleetFileError) as error:
        load_fleet(fleet_file)
    assert "name and store must come before the first table" in error.value.hint


@pytest.mark.parametrize("key", ["name", "store"])
def test_a_second_store_that_is_not_named_by_to_is_told_so(fleet_file: Path, key: str) -> None:
    fleet_file.write_text(f'{HEAD}{NODE}[[copy]]\n{key} = "/second"\n')
    with pytest.raises(FleetFileError, match=rf"unknown key `{key}` in the 1st \[\[copy\]\]") as error:
        load_fleet(fleet_file)
    assert error.value.hint.startswith("each [[copy]] has only `to`: the URL of the second store")


@pytest.mark.parametrize(
    "table", ['[[drill.assertion]]\nnode = "a"\nsql = "x"\n', "[cut]\n", "[spark]\n", "[store_options]\n"]
)
def test_retired_shards_below_a_table_are_told_where_they_belong(fleet_file: Path, table: str) -> None:
    """Also where any key is accepted: nobody would notice that the shards are not retired."""
    fleet_file.write_text(f'{HEAD}{NODE}{table}retired = ["s3"]\n')
    with pytest.raises(FleetFileError, match="`retired`") as error:
        load_fleet(fleet_file)
    assert "retired must come before the first table" in error.value.hint


def test_the_error_for_a_missing_file_says_how_to_name_one(fleet_file: Path) -> None:
    with pytest.raises(FleetFileError) as error:
        load_fleet(fleet_file)
    assert "no fleet file at" in error.value.message
    assert "--fleet" in error.value.hint
    with pytest.raises(FleetFileError) as error:
        load_fleet(fleet_file, hint="name the target")
    assert error.value.hint == "name the target"


def test_a_file_that_is_not_text_is_refused(fleet_file: Path) -> None:
    fleet_file.write_bytes(b"\xff\xfe")
    with pytest.raises(FleetFileError):
        load_fleet(fleet_file)


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FleetFileError, match=f"^{tmp_path}: Is a directory"):
        load_fleet(tmp_path)


def test_a_byte_order_mark_is_no_part_of_the_file(fleet_file: Path) -> None:
    fleet_file.write_bytes(b"\xef\xbb\xbf" + f"{HEAD}{NODE}".encode())
    assert load_fleet(fleet_file).name == "shop"


def test_a_file_may_begin_with_a_byte_order_mark_and_no_other_encoding_is_read(fleet_file: Path) -> None:
    """Notepad writes one; it is no part of the first key."""
    fleet_file.write_bytes(b"\xef\xbb\xbf" + (HEAD + NODE).encode())
    assert load_fleet(fleet_file).name == "shop"
    fleet_file.write_text(HEAD + NODE, encoding="utf-16")
    with pytest.raises(FleetFileError, match=r"fleet.toml is not in UTF-8: byte 1 is 0xff"):
        load_fleet(fleet_file)


@pytest.mark.parametrize("value", ["database", "true", "1"])
def test_a_dsn_does_not_ask_for_replication_itself(fleet_file: Path, value: str) -> None:
    fleet_file.write_text(HEAD + NODE.replace("dbname=a", f"dbname=a replication={value}"))
    with pytest.raises(FleetFileError, match="node a: dsn sets replication: remove it, because Cutline sets it"):
        load_fleet(fleet_file)


def test_of_several_hosts_a_node_is_the_server_of_its_kind(fleet_file: Path) -> None:
    both = "host=x,y dbname=a"
    nodes = NODE.replace("dbname=a", both) + BACKUP.replace("dbname=a host=b", both)
    fleet_file.write_text(
        HEAD + nodes + NODE.replace('"a"', '"c"').replace("dbname=a", f"{both} target_session_attrs=any")
    )
    found = [conninfo_to_dict(node.dsn).get("target_session_attrs") for node in load_fleet(fleet_file).nodes]
    assert found == ["primary", "standby", "any"]
    fleet_file.write_text(HEAD + NODE.replace("dbname=a", "host=x dbname=a"))
    assert "target_session_attrs" not in conninfo_to_dict(load_fleet(fleet_file).nodes[0].dsn)


def test_the_environment_shuts_no_server_out_that_a_dsn_names(
    fleet_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGTARGETSESSIONATTRS", "read-write")
    several = NODE.replace('"a"', '"c"').replace("dbname=a", "host=x,y dbname=c")
    fleet_file.write_text(HEAD + NODE.replace("dbname=a", "host=x dbname=a") + BACKUP + several)
    found = [conninfo_to_dict(node.dsn).get("target_session_attrs") for node in load_fleet(fleet_file).nodes]
    assert found == ["any", "any", "primary"]
    # Here the environment or a service may name several hosts.
    fleet_file.write_text(HEAD + NODE)
    assert conninfo_to_dict(load_fleet(fleet_file).nodes[0].dsn)["target_session_attrs"] == "read-write"


def test_a_file_that_never_ends_is_not_read_to_its_end() -> None:
    with pytest.raises(FleetFileError, match=r"/dev/zero is larger than 16\.0 MiB"):
        load_fleet(Path("/dev/zero"))


def test_retired_shards_are_no_nodes_of_the_fleet(fleet_file: Path) -> None:
    other = '[[node]]\nid = "c"\ndsn = "dbname=c"\n'
    fleet_file.write_text(f'{HEAD}retired = ["a", "gone"]\n{NODE}{BACKUP}{other}')
    fleet = load_fleet(fleet_file)
    assert [node.id for node in fleet.nodes] == ["c"]
    assert [node.id for node in fleet.retired_nodes] == ["a", "a-b"]
    assert fleet.retired == ("a", "gone")
    for names, problem in (('"a", "c"', "names all shards: none is left"), ('"a-b"', "a-b, which is a standby")):
        fleet_file.write_text(f"{HEAD}retired = [{names}]\n{NODE}{BACKUP}{other}")
        with pytest.raises(FleetFileError, match=problem):
            load_fleet(fleet_file)
