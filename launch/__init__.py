"""Launchers: start runs as processes of this machine, or as jobs of a Slurm cluster.

A launcher implements `runner.contracts.Launcher`. The config group `launcher` names its class as `_target_`. The code
that it starts is a string, `module:function`. This package knows nothing about training or Hydra.
"""
