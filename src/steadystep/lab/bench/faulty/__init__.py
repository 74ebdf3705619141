"""Runs that are broken on purpose, each in many arms; detection and recovery read the same rows."""
