"""Programs and faults for `watched_faults.py`."""
