"""Records: every JSON document in the store, its key, and how it is written, read and checked.

A *commit* makes a full snapshot or an increment exist. A *chain* is a full snapshot and its increments. A document
contains a digest of its own bytes and is trusted only if that digest matches.
"""
