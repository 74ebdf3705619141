"""Real packages in the same harness: `make bench-rivals`, in an environment of their own."""
