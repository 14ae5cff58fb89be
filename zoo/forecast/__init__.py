"""Runs that fail slowly, or look as if they would: what forecasts are measured on. `runs` lists them, by family."""
