"""Load batches from indices, with worker processes and a state that can be saved."""
