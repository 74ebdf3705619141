"""A training program that is killed at chosen moments, and what is needed to start it again and compare."""
