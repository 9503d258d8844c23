"""Check running databases: primaries against their standbys, and against the newest cut of a snapshot.

A *round* reads a bounded part of each shard while its nodes export snapshots. A page is a *suspect* if it differs
between a primary and a standby; only snapshots in a known order *prove* a difference. A row was *written since* the cut
if it is among the changes after the cut. Nothing is stopped or changed. Rows are skipped, never
passed, if they can't be proven equal or different.
"""
