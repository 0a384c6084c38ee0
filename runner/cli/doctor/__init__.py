"""Check a cluster and a config before anything is submitted: `runner doctor`."""
