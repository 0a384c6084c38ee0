"""The ranks of a run: what they exchange, and how they notice that one fails or hangs."""
