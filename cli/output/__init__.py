"""Output: the arguments that commands share, results as text or JSON, progress, errors and exit codes.

Results go to stdout, everything else to stderr. With `--json` stdout is exactly one document, and progress JSON lines.
A *flat* row stands for one restore point.
"""
