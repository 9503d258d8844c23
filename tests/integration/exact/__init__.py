"""One chain of every kind of table, and each of its states restored and compared with PostgreSQL."""
