"""What is held on a fleet's nodes, by PostgreSQL's own views: locks, and WAL that slots retain."""
