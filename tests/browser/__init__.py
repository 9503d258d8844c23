"""A real browser, where one is installed, for the pages that Cutline makes."""
