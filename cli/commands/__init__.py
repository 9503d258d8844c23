"""Commands: one module per subcommand. Each reads its options, calls a function below `cli`, and renders its report."""
