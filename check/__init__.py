"""Read a chain back and prove that it is complete, or name the damage. A check that compared nothing can't pass."""
