"""Connect the ranks of a run: what they exchange, and how they notice that a rank fails or hangs."""
