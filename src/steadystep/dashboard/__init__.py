"""Many runs as a live page: a small server that reads the logs in one folder and nothing else."""

from steadystep.dashboard.app import make_app
from steadystep.dashboard.library import Library

__all__ = ["Library", "make_app"]
