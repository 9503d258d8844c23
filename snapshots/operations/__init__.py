"""Operations: one run of a command that changes something, from its intent to its outcome.

An operation stores an *intent* before it changes anything, and an *outcome* at the end. An operation without an outcome
is *open*. The next operation that holds the fleet's lock *settles* it, and *decides* for good whether it has committed.
A *lease* protects a snapshot from deletion while a restore reads it. An *object list* lists objects of a large copy in
the place of its commit.

A command that runs for longer than a moment stores *signs of life*. Anybody with the store may read them, and ask the
command to stop. Nothing depends on them: without signs all commands do the same. Check, gc and prune have signs and an
outcome, but no intent that somebody would have to settle.
"""
