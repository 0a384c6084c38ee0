"""Train one step: the task's computation, its updates, and sums over micro-batches and ranks."""
