"""Restores into targets that are not the shards of the snapshot."""
