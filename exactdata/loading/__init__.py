"""From indices to batches: the stateful loader, its workers, its state."""
