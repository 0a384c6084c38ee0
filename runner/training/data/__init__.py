"""Open the sources, order their samples, and track the consumed samples."""
