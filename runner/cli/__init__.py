"""The commands of `python -m runner`."""
