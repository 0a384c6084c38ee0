"""What runs have come to: their records read at once, compared, and shown as tables and as one page."""
