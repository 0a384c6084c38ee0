"""Code of the user's own at the boundaries between steps."""
