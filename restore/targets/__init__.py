"""Where a restore goes: the targets, their locks and requirements, and the databases and records that it makes there.

An *obstacle* is an error that a check found before anything was changed; all obstacles are reported at once, each with
its own hint. A *swap* gives restored databases their real names, all of them or none.
"""
