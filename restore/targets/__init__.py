"""A restore's targets: their locks, what they must provide, and the databases and records that a restore creates there.

An *obstacle* is an error found by a check before anything is changed. All obstacles are reported at once, each with its
hint. A *swap* gives all restored databases their real names, or none of them.
"""
