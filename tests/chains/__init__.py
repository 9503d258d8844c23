"""Chains that tests share: databases of a fleet, their changes between increments, and their restored states."""
