"""Output: shared arguments of commands, results as text or JSON, progress, errors and exit codes.

Results go to stdout, everything else to stderr. With `--json`, stdout is exactly one document, and progress is written
as JSON lines. A *flat* row describes one restore point.
"""
