"""Commands that show runs without changing them."""
