"""Frameworks that own the loop. Each adapter is thin: it finds the parts, `watch` does the rest."""
