"""Small reinforcement-learning programs that learn within seconds on a CPU, and ways to collapse them."""
