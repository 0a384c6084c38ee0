"""Call your code at the boundaries between steps."""
