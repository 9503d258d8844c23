"""How the tests run in several processes, and what a run reports at its end."""
