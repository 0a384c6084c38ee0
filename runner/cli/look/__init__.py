"""Commands that show runs and do not change them."""
