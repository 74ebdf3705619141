"""`python -m steadystep`."""

from steadystep.cli.app import main

main()
