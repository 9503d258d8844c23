"""Segments: decoded WAL as Parquet objects, and the archive that they form.

A *segment* holds the row changes and transaction events of one node in a range of WAL positions. A node's *archive* is
its segments in order, numbered without gaps.
"""
