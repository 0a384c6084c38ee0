"""What is in a checkpoint: the train state, and tensors in files."""
