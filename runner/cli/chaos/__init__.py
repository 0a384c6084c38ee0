"""The command line of `runner chaos`."""
