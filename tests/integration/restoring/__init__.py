"""Restores that end unfinished, and what the next command makes of them: one chain of three shards, and a target."""
