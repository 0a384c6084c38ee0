"""One training step: the task's computation, its updates, the sums over micro-batches and ranks."""
