"""Commands: one module per subcommand.

Each module reads its options, calls a function below `cli`, and renders its report.
"""
