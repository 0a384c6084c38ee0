"""Read the records of runs, compare them, and show them as tables and as one page."""
