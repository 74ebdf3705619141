"""Runs a torchtitan program with the shim for CPUs: `with_shim.py PROGRAM`."""

import runpy
import sys

from tests.engines import titan_shim  # noqa: F401

if __name__ == "__main__":
    runpy.run_path(sys.argv[1], run_name="__main__")
