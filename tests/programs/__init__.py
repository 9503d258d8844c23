"""Programs of servers that are not Python packages: built or installed once per user, into the user's cache folder."""
