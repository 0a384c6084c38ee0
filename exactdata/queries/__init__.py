"""Answer questions about a data order: the samples of a step, the rest of a run, the effect of another batch shape."""
