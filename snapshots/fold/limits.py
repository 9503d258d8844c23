"""Up to which amounts the driver folds changes by itself. Imports nothing, so that plans can show the limits too."""

CHANGES_MAX = 500_000
# Of more changes it compares the keys, if the segments are so large on average that a task for each is worth it.
CHOSEN_CHANGES_MAX, CHANGES_PER_SEGMENT = 5_000_000, 5_000
# Of the keys that it compares those of tables with base rows, of all nodes together: the tasks that read these rows get
# them.
CHOSEN_KEYS_BYTES_MAX = 192 << 20
# The driver holds the changes up to four times: as read, reduced, in order, and as the tasks get them.
STORED_BYTES_MAX, READ_BYTES_MAX = 16 << 20, 64 << 20
