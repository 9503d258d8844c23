"""The command `snapshot`: one module per subcommand, rendering, exit codes, the Spark session, the demo.

The only package that prints, exits or builds a Spark session. Imports every other.
"""
