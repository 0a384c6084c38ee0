"""Start runs as processes on this machine or as Slurm jobs.

A launcher implements `runner.contracts.Launcher`. The config group `launcher` selects one with `_target_`. The code to
start is passed as a string, `module:function`. This package knows nothing about training or Hydra.
"""
