"""A run looked at while it is under way: in the terminal, line by line, or in a browser. No torch."""
