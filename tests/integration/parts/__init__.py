"""Restores of a part of a snapshot, or in another form: one chain of one shard, and a server without its roles."""
