"""Run the tests in several processes, and report times at the end of a run."""
