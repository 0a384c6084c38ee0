"""The content of a checkpoint: the train state, and tensors in files."""
