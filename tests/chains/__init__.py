"""Chains that tests look at: a fleet's databases, what is done to them between increments, and what is restored."""
