"""Demo: the whole story on an embedded fleet, and an embedded fleet to try the commands on."""
