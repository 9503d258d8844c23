"""Commands: one module per subcommand. Each reads its options, calls one function below `cli`, and renders its report.

Imports `cli.output`, `cli.spark` and everything below `cli`.
"""
