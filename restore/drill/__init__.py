"""Drill: restore into servers made for it, ask the restored databases what fleet.toml expects, and remove the servers.

No node of the fleet is contacted. An *assertion* is a query with its expected result, a `[[drill]]` of fleet.toml.

Imports `embedded`, `fleet`, `fleet.nodes`, `restore`, `restore.obstacles`, `restore.targets`, `snapshots.operations`,
`snapshots.records`, `snapshots.tasks` and `storage`.
"""
