"""Operations: each is one run of a command that changes something, from its intent to its outcome.

An operation stores an *intent* before it changes anything, and an *outcome* at the end. An operation without an outcome
is *open*. The next operation that holds the fleet's lock *settles* it, and *decides* once and for all whether it has
committed. A *lease* protects a snapshot from deletion while a restore reads it. An *object list* lists the objects of a
large copy, so that the commit doesn't have to.

A command that runs for more than a few seconds stores *signs of life*. Anybody with access to the store can read them,
and ask the command to stop. No command depends on signs. Check, gc and prune store signs and an outcome, but no intent,
so they never need to be settled.
"""
