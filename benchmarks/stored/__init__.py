"""Runs whose results are kept, so that a study can be stopped and continued."""
