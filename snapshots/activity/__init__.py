"""Activity: what the store knows of the commands that are at work, or were.

A command that runs for longer than a moment stores *signs of life*, which say how far it is. Anybody with the store may
read them, and *ask it to stop*. Check and gc, which only read the snapshots, and a prune, whose removals have intents,
have signs and an outcome, but no intent: nobody has to settle them. Nothing here decides anything: without signs all
commands do the same.

Imports `fleet`, `fleet.nodes`, `snapshots.operations`, `snapshots.records` and `storage`.
"""
