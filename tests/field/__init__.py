"""Field runs: whole training programs, each with and without steadystep. `python -m tests.field --help`."""
