"""Check: reads a chain back and proves it complete, or names the damage. A check that compared nothing can't pass."""
