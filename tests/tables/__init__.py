"""Tables of every kind, what is in them and what is done to them: SQL that a test gives a server."""
