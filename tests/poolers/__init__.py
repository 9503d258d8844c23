"""Connection poolers before the tests' servers."""
