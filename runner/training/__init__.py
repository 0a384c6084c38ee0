"""One attempt at a run: built, restored, trained, recorded."""
