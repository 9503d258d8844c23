"""Drill: restore into temporary servers, run the assertions from fleet.toml on the databases, and remove the servers.

No node in the fleet is contacted. An *assertion* is a query with its expected result, a `[[drill.assertion]]` in
fleet.toml.
"""
