"""The limits for folding changes in the driver, without Spark.

This module imports nothing, so that plans can show the limits.
"""

CHANGES_MAX = 500_000
# Above CHANGES_MAX, the driver compares only the keys, if segments are large enough on average to justify a task each.
CHOSEN_CHANGES_MAX, CHANGES_PER_SEGMENT = 5_000_000, 5_000
# The keys of tables with base rows, on all nodes together: they are sent to the tasks that read these rows.
CHOSEN_KEYS_BYTES_MAX = 192 << 20
# The driver holds up to four copies of what it reads (changes, and the base rows that they need): as read, reduced,
# sorted, and as sent to the tasks. It looks for base rows in objects of up to BASE_BYTES_MAX, as stored, which takes
# four seconds on two cores, half as long as the fixed time of Spark's fold.
STORED_BYTES_MAX, READ_BYTES_MAX, BASE_BYTES_MAX = 16 << 20, 64 << 20, 128 << 20
