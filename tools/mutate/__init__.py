"""Breaks the code on purpose and expects a test to go red: `python -m tools.mutate --help`."""
