"""Views: what is stored, as people look at it and as spreadsheets read it, and how far the nodes are.

Pure functions from listings and reports to text and rows; `cli.output.results` writes them. Only `node_status` asks
nodes itself, and `recovery` writes a file. A *flat* row stands for one restore point.

Imports `cli.folders`, `cli.output`, `fleet`, `fleet.nodes`, `snapshots.activity`, `snapshots.listing`,
`snapshots.metrics`, `snapshots.records`, `storage` and `wal.slots`.
"""
