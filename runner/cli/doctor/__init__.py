"""`runner doctor`: what a cluster and a config are, before anything is submitted."""
