"""Output: the arguments that commands share, results as text or JSON, progress, errors and exit codes.

Results go to stdout, everything else to stderr. With `--json` stdout is exactly one document.

Imports everything below `cli`, and no other part of `cli`.
"""
