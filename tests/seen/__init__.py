"""What the guard did wrongly in strangers' programs, as equivalent programs of ours: one test per sighting."""
