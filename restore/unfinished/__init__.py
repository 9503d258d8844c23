"""Unfinished restores: find, check and undo them; also drop the databases that restores have put aside."""
