"""Rows that end a chain: the server can't print them for decoding, or could not read them back at a restore."""

from __future__ import annotations

from cutline.fleet.messages import NEW_CHAIN
from cutline.nodes.groups import Group
from cutline.nodes.server_errors import KEY_CHARACTERS_MAX, row_hint
from cutline.storage.errors import ChainEnd, RefusedError
from cutline.wal.decoding.changes import ChangeColumns

# PostgreSQL's MaxAllocSize without the byte that ends a string: neither COPY TO nor COPY FROM takes a longer line, its
# newline included. Lines in WAL may be longer: there no character is escaped.
LINE_BYTES_MAX = (1 << 30) - 2
# "Program limit exceeded", as COPY itself says on versions that say so at all.
TOO_LONG = "54000"


class RowUndecodableError(RefusedError):
    """A row was written that a node can't print, or whose line COPY can't read, so that the chain ends before it."""

    def __init__(self, *, node: str, table: str, what: str, row: str, sqlstate: str, slot: str = "") -> None:
        super().__init__(
            f"node {node}: table {table}: {what}{f' ({row})' if row else ''}",
            hint=f"{NEW_CHAIN}; the chain can't go on beyond this row. Before that: {row_hint(sqlstate)}",
            ends_chain=ChainEnd.FOR_GOOD,
            details={"node": node, "group": table, "row": row, **({"slot": slot} if slot else {})},
        )


def refuse_long_lines(node: str, group: Group, part: ChangeColumns) -> None:
    """Raise RowUndecodableError if COPY could not read one of the lines: only a restore would find out."""
    lengths = part.rows.lengths
    row = int(lengths.argmax()) if len(lengths) else 0
    if not len(lengths) or lengths[row] <= LINE_BYTES_MAX:
        return
    begin, end = part.keys.offsets[row : row + 2].tolist()
    fields = bytes(part.keys.data[begin:end]).decode(errors="replace").split("\t")
    names = [column.name for column in group.columns[: group.key_width]]
    key = ", ".join(f"{name} = {value}" for name, value in zip(names, fields, strict=False))
    raise RowUndecodableError(
        node=node,
        table=group.name,
        what=f"a row was written that has {int(lengths[row])} bytes as COPY prints it, more than COPY can read",
        row=key[:KEY_CHARACTERS_MAX] or "the table has no key",
        sqlstate=TOO_LONG,
    )
