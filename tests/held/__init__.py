"""What is held on a fleet's nodes: locks, WAL that slots retain, and transactions prepared before a table's copy."""
