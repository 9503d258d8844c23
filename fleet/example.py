"""The example fleet.toml, which docs/fleet-file.md shows and `snapshot init --example` writes.

Every key shows its default or an example. In the written file, all optional keys are commented out.
"""

from __future__ import annotations

from pathlib import Path

from cutline.storage.errors import RefusedError, UsageError

EXAMPLE = """\
name = "shop"                        # must match the store's fleet.json
store = "s3://backups/shop"          # a folder, or a URL that fsspec supports
retired = ["s0"]                     # shards that have left the fleet for good

[[node]]
id = "s1"
dsn = "host=db1 dbname=shop user=cutline sslmode=verify-full"

[[node]]
id = "s1-b1"
backup_of = "s1"                     # a physical standby of s1
dsn = "host=db1-standby dbname=shop user=cutline sslmode=verify-full"

[[node]]
id = "s2"
dsn = "host=db2 dbname=shop user=cutline sslmode=verify-full"
max_retained_wal = "64GiB"           # this node's own limit
connections_max = 20                 # this node's own limit
known_as = ["west"]                  # this node's own names in distributed transactions

[[node]]
id = "s2-b1"
backup_of = "s2"
dsn = "host=db2-standby dbname=shop user=cutline sslmode=verify-full"

[store_options]                      # passed to fsspec
endpoint_url = "https://s3.internal:9000"
ca_file = "/etc/ssl/internal-ca.pem"
retry_for = "10min"
server_side_encryption = "aws:kms"   # or AES256, aws:kms:dsse: how the server encrypts every object
kms_key_id = "alias/shop"            # its key; by default the account's key for S3

[encryption]                         # without this table, Cutline encrypts nothing
key_file = "/etc/cutline/shop.key"   # or key_variable = "NAME", or key_command = ["program", "argument"]

[tools]
postgresql = "/usr/lib/postgresql/18/bin"  # the pg_dump and pg_restore to use; by default Cutline finds them

[cut]
global_id = "exact"                  # how the parts of a global transaction are recognized

[wal]
max_retained_wal = "16GiB"           # WAL that a node may keep for a chain

[groups]
include = ["*"]
exclude = ["scratch.*"]
append_only = ["public.audit"]       # tables without a replica identity
large_objects = false                # whether full snapshots contain large objects, too

[check]
allow = ["one-copy"]                 # what a check may lack and still pass
reread = "30d"                       # how old a reading may be for `check --since-last` to rest on it

[copies]
require = "any"                      # how many standbys of each shard a create needs: any, all, or a number
wait = "10s"                         # how long a create waits for a standby that it may leave out
base = "every-node"                  # where tables are copied from: also "prefer-standby"
resume_from = "10GB"                 # an interrupted full snapshot of so many bytes or more can be resumed
background_from = "10GB"             # a standby of so many bytes or more is copied again in the background
background_for = "5min"              # how long an increment copies in the background after its commit
failover_slots = false               # whether PostgreSQL (18) keeps slots on standbys that are not listed here

[globals]
passwords = false                    # whether snapshots contain password verifiers

[watch]                              # the schedule of `snapshot watch`
every = "5min"
full = "weekly"
name = "watch-{date}-{time}"         # the names of full snapshots
check = "daily"
drill = "weekly"
copy = "1h"
gc = "weekly"
accept_inconclusive = false          # whether a check or drill that ends with exit code 4 is no failure

[[copy]]                             # a second store, kept up to date by `snapshot copy` and `watch`
to = "/etc/cutline/second.toml"

[notify]
command = ["/usr/local/bin/page-me"]
success_url = "https://hc-ping.com/your-ping-key/{command}"
success_of = ["create", "check", "check-live", "drill", "restore"]   # also: copy, merge, prune, gc

[limits]                             # without this table, commands are as fast as they can be
read = "50MB/s"                      # from each node
store = "100MB/s"                    # of all tasks of a command together
restore = "50MB/s"                   # into each node
hours = "22:00-06:00"                # when a watch begins full snapshots, checks, drills, merges and copies (UTC)

[hooks]                              # programs that get JSON on stdin
before = ["/usr/local/bin/before-cutline"]
after = ["/usr/local/bin/after-cutline"]
timeout = "5min"

[retention]                          # the rules of `snapshot prune` and of `watch`
last = 2                             # the newest snapshots with all their increments
only_full = 8                        # the newest full snapshots
within = "36h"                       # every restore point younger than this
hourly = 24                          # the newest restore point of each of the last hours, days, … that have one (UTC)
daily = 7
weekly = 4
monthly = 12
yearly = 3
max_age = "26h"                      # `list` and `watch` report an older newest restore point
quota = "500GB"                      # `prune` and `watch` report snapshots that take more
merge = "never"                      # how often `watch` lets the chain begin at its newest increment
gc_grace = "24h"                     # `gc` removes only older objects

[metrics]
file = "/var/lib/node_exporter/textfile_collector/cutline.prom"
listen = "127.0.0.1:9957"
traces = false                       # whether commands send OpenTelemetry spans

[spark]
master = "local[*]"
"driver.memory" = "4g"

[drill]                              # by default, a drill uses Cutline's own PostgreSQL
postgresql = "/usr/lib/postgresql/18/bin"
extensions = ["postgis"]             # extensions that only a superuser may create
allow_unconfined = false             # whether to drill where the servers can't be isolated

[[drill.assertion]]                  # a query that each drill runs on its restored database
node = "s1"
sql = "SELECT count(*) > 0 FROM public.orders"
expected = true
timeout = "10min"
"""
FIRST_OPTIONAL = "[store_options]"
HEAD = """\
# The fleet: replace the name, store and nodes, remove the standbys if you have none, then run: snapshot init
# Keys that are commented out are optional, and show their default or an example. docs/fleet-file.md describes them.

"""


class FleetFileExistsError(RefusedError):
    """The file to which the example would be written already exists."""


def example_text() -> str:
    """Return the example with all optional keys commented out."""
    lines, is_optional = list[str](), False
    for line in EXAMPLE.splitlines():
        is_optional = is_optional or line.startswith(FIRST_OPTIONAL)
        is_comment = is_optional or line.startswith("retired") or "this node's own" in line
        lines.append(f"# {line}" if is_comment and line else line)
    return HEAD + "\n".join(lines) + "\n"


def write_example(path: Path) -> None:
    """Write the example to a new file; raise FleetFileExistsError, or UsageError if it can't be written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(example_text())
    except FileExistsError:
        raise FleetFileExistsError(
            f"{path} already exists", hint="nothing was changed; to write the example to a different file: --fleet FILE"
        ) from None
    except OSError as error:
        hint = "name a different file: --fleet FILE"
        raise UsageError(f"{path} can't be written: {error.strerror}", hint=hint) from error
