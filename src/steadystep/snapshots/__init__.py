"""States in memory: what a rollback restores, and the replay buffer."""
