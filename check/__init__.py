"""Check: reads a chain back and proves it complete, or names what is damaged. It can't pass on nothing."""
