"""Commands that only look at runs."""
