"""The demo: a demonstration on an embedded fleet, and an embedded fleet to try the commands on."""
