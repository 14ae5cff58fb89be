"""What nanproof costs, measured beside the alternatives. Each module is a program: `python -m benchmarks.cpu`."""
