"""Decoding: pgoutput's messages turned into changes and events, by whole columns.

Every message is checked to have the form of its kind before a field is used. The rows that come out are the bytes that
COPY writes for the same rows.

Imports `columns`, `fleet`, `fleet.nodes`, `fleet.tables`, `wal.cut` and `wal.segments`.
"""
