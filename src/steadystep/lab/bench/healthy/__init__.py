"""Runs in which nothing is wrong: whatever is said or done there is false."""
