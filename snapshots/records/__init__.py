"""Records: every document in the store, how it is written, read and checked, and the key that it has.

A *commit* makes a full snapshot or an increment exist. A *chain* is a full snapshot with its increments. Every document
carries a digest of its own bytes and is believed only if that digest fits.

Imports `wal.segments`, `wal.cut`, `fleet` and `storage`.
"""
