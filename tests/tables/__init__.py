"""Tables of every kind, their rows and their changes: SQL that a test runs on a server."""
