"""Save and load the content of a checkpoint: the train state and the tensors."""
