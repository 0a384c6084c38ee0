"""Record a run: metrics, timings, profiles and the runner's entries in the train state."""
