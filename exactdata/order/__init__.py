"""Define the data order, i.e. which sample is at which position, with pure functions."""
