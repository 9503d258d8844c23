"""Commands of `snapshot` in the tests: in this process or in one of their own, and what they report while they run."""
