"""Global ids: the common name of a distributed transaction, from the two-phase gids of its nodes.

`[cut] global_id` in fleet.toml is the rule. A gid that the rule does not match is its own global id.
"""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cutline.columns.bytes_column import texts_array

# The JDBC driver's gids (RecoveredXid.xidToString): format id, which is a signed integer, global transaction id,
# branch qualifier, the last two in base64.
XA = r"^(?P<global>-?\d+_[A-Za-z0-9+/=]+)_[A-Za-z0-9+/=]*$"
# Citus's (Assign2PCIdentifier): citus_<initiating group>_<process>_<transaction number>_<connection number>, all
# of them unsigned.
CITUS = r"^(?P<global>citus_\d+_\d+_\d+)_\d+$"


def global_ids(gids: pa.Array[Any], form: str) -> pa.Array[Any]:
    """The global id of each gid; `form` is exact, xa, citus, or a regular expression with a group named global."""
    if form == "exact" or len(gids) == 0:
        return gids
    builtin = {"xa": XA, "citus": CITUS}.get(form)
    if builtin:
        return pc.coalesce(pc.struct_field(pc.extract_regex(gids, builtin), "global"), gids)
    # Arrow's regular expressions are RE2: no look-around, no unnamed groups. The operator's rule was validated as a
    # Python regular expression, so Python matches it, once per distinct gid.
    encoded = gids.dictionary_encode()
    pattern = re.compile(form)
    names = texts_array(_global_id(pattern, gid) for gid in encoded.dictionary.to_pylist())
    return names.take(encoded.indices)


def _global_id(pattern: re.Pattern[str], gid: str) -> str:
    match = pattern.search(gid)
    return (match and match["global"]) or gid
