"""Where runs run: in processes of this machine, or in jobs of a Slurm cluster.

A launcher has the shape of `runner.contracts.Launcher`. The config group `launcher` names its class as `_target_`; what
it starts is named by a string, `module:function`. This package knows nothing about training or Hydra.
"""
