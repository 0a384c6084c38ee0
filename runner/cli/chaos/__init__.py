"""`runner chaos`: its command line."""
