"""The commands of `python -m runner`: what a shell calls."""
