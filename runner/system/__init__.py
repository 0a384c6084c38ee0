"""The system layer: files, clock, processes, signals, other ranks. Effects go through here and nowhere else."""
