"""The sources, their order, and what the training has consumed of them."""
