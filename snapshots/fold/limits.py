"""Up to which amounts the driver folds changes by itself. Imports nothing, so that a plan can tell it too."""

CHANGES_MAX = 500_000
# Of more changes it compares the keys, some 100 bytes each.
CHOSEN_CHANGES_MAX = 5_000_000
# The driver holds the changes twice, and Spark's own process once more.
STORED_BYTES_MAX, READ_BYTES_MAX = 16 << 20, 64 << 20
