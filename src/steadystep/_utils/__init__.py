"""One copy of each small idea that several rooms share."""
