"""Every kind of damage that a store can have: what `check` must find, and what no reader of a store can detect.

A *kind* is one change of a clean chain's store. Raw kinds change bytes as a disk, a copying tool or a mistake does.
Sealed kinds change contents and recompute every size, digest, seal, count and list above them, as a bug of Cutline's
or somebody with the store's key would. The *fleet* of a kind is `pairs`, whose shards have a standby each, `single`,
whose shards have only a primary, `point`, a restore point without rows, or `merged`, a chain with standbys that begins
with a merge.

`families` declares the kinds, each with the outcome that is expected by reasoning. `world` takes the clean chains,
`damaged` changes a copy of their store, `trial` runs `check` on it and restores whatever it accepts, and `page` writes
docs/damage-matrix.md. `clean` checks chains of random databases, in which a check must find nothing.

    python -m tests.damage_matrix                     try every kind
    python -m tests.damage_matrix --only 'rows *'     try the kinds whose names match
    python -m tests.damage_matrix --write             try every kind; write missed.txt and docs/damage-matrix.md
    python -m tests.damage_matrix --clean 1000        check 1,000 clean snapshots and increments
"""
