"""`python -m runner --help`: printed without composing anything, and so without importing Hydra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.conf_tree import conf_dir, groups

TEXT = """\
python -m runner [flags] [group=option ...] [key=value ...]

Trains one run. The same command again goes on with it after any kill; once it is finished, it says so.

Examples
  python -m runner                                        a small GPT on real text, in about a minute
  python -m runner experiment=smoke                       the same in a few seconds
  python -m runner data=mixture sampler.temperature=0.7   three sources, mixed
  python -m runner data=mixture sampler=elastic           goes on with any number of ranks
  python -m runner train.steps=2000                       longer: goes on from the end
  python -m runner -m seed=1,2,3 model.width=64,128       a sweep: all combinations
  python -m runner -m launcher=slurm seed=1,2,3           the same as jobs of a cluster; returns at once
  python -m runner launcher=slurm launcher.dry_run=true   what would be submitted
  torchrun --nproc-per-node 4 -m runner                   four ranks on this machine

Groups, one option of each (group=option)

{groups}

Settings (key=value; all of them with their values: --cfg job, explained in the files of the groups)
  seed                     where every random choice comes from
  run.dir                  the run directory; default: outputs/<run.name>-<hash of the config>
  run.name                 the readable part of its name
  train.steps              optimizer steps in all
  train.batch_size         sequences in a forward pass of one rank
  train.grad_accum_steps   forward passes in a step
  data.num_workers         processes that fetch data
  data.sequence_length     tokens in a sequence
  sampler.temperature      evens out (above 1) or sharpens (below 1) the shares of the sources
  sampler.weights          weight by source name: sampler.weights.prose=3
  eval.every_steps         evaluate this often; 0: never
  checkpoint.every_steps   save this often
  checkpoint.keep_last     checkpoints kept
  optimizer.lr             highest learning rate

Flags
  -m, --multirun           a sweep: values separated by commas, range(...), glob(...)
  -c, --cfg job            show the composed config; with --resolve its values, with -p KEY a part
  -i, --info defaults      where each part of it comes from
  --config-dir DIR         further groups and experiments of your own
  --config-name NAME       another primary config
  -sc install=bash         shell completion for the command `runner`: eval "$(runner -sc install=bash)"
  --version, --hydra-help

Other commands
  python -m runner.status outputs    what each run is doing
  python -m runner.doctor            checks of a cluster before anything is submitted
  python -m runner.metrics RUN       results as a table or a picture
  python -m runner.inspect RUN       which samples a step saw
  python -m runner.checkpoints RUN   checkpoints: list, verify
  python -m runner.chaos [...]       proof that a configuration survives being killed
"""


def text(config_dirs: Sequence[str | Path] = ()) -> str:
    """The help, with the groups and options of the shipped configs and of `config_dirs`."""
    found = groups([conf_dir(), *(Path(directory) for directory in config_dirs)])
    width = max(map(len, found))
    lines = [f"  {group:{width}}  {', '.join(options)}" for group, options in found.items()]
    return TEXT.replace("{groups}", "\n".join(lines))


def config_dirs(arguments: Sequence[str]) -> list[str]:
    """The values of `--config-dir` (or `-cd`) among the arguments of a command."""
    found = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        flag, _, value = argument.partition("=")
        if flag in ("--config-dir", "-cd"):
            found.append(value or following)
    return [directory for directory in found if directory]
