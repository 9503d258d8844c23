"""Terminal snapshots: what makes a fleet read-only, what undoes it, and who may still write."""
