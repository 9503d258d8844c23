"""Parts of a restore: which of the snapshot's shards and tables are restored, and in which form.

Imports `fleet`, `fleet.tables` and `storage`.
"""
