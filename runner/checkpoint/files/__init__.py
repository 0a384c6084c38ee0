"""Store checkpoints as files: manifests, commits, deletions and pins. This package does not import torch."""
