"""Chains that tests share: the databases of a fleet, their changes between increments, and the restored states."""
