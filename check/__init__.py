"""Read a chain back and prove that it is complete, or name the damage. A check that compares nothing can't pass."""
