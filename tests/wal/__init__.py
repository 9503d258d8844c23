"""WAL in the tests: messages of pgoutput built by hand, and markers written to real servers."""
