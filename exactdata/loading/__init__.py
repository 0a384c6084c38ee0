"""Load batches from indices: the stateful loader, its workers and its state."""
