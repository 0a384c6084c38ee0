"""Call the user's callbacks between steps."""
