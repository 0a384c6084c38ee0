"""Answer questions about a data order: samples of a step, the rest of a run, the effect of a new batch shape."""
