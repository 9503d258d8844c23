"""What is held on a fleet's nodes, as PostgreSQL says: locks, and WAL that slots retain."""
