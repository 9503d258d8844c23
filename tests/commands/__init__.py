"""Commands of `snapshot`, run where no process of their own is what a test is about."""
