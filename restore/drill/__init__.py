"""Drill: restore into servers made for it, ask the restored databases what fleet.toml expects, and remove the servers.

No node of the fleet is contacted. An *assertion* is a query with its expected result, a `[[drill.assertion]]` of
fleet.toml.
"""
