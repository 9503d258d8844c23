"""Find, check and undo unfinished restores; also drop the databases that restores set aside."""
