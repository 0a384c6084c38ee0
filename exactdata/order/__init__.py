"""Define the data order as pure functions: which sample is at which position."""
