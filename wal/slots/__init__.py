"""Slots: the replication slots of a chain, the transactions for which creating them waits, and the WAL they retain."""
