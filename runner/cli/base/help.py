"""Print `python -m runner --help` without composing a config, so that Hydra is not imported."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from runner.cli.base.commands import COMMANDS
from runner.config.search_path import conf_dir, groups, project_dirs

TEXT = """\
python -m runner [flags] [group=option ...] [key=value ...]
python -m runner COMMAND ...

Without a command: trains one run. Rerun the same command to resume it after any kill; once the run is finished, the
command reports that and exits. The script `runner` is the same as `python -m runner`.

Commands (python -m runner COMMAND --help shows the options of each)
{commands}

Examples
  python -m runner                                        a small GPT on real text, in about a minute
  python -m runner experiment=smoke                       the same in a few seconds
  python -m runner data=mixture sampler.temperature=0.7   a mixture of three sources
  python -m runner data=mixture sampler=elastic           resumes exactly with any number of ranks
  python -m runner train.steps=2000                       a longer run, which is another run
  python -m runner -m seed=1,2,3 model.width=64,128       a sweep over all combinations
  python -m runner -m launcher=slurm seed=1,2,3           the same as Slurm jobs; returns at once
  python -m runner -m seed=1,2,3 --dry-run                print what would be started, and why
  python -m runner launcher.ranks=4                       four ranks on this machine, or: torchrun ... -m runner

Groups, one option of each (group=option)
{groups}

Settings (key=value; python -m runner show --settings explains them all)
  seed                     seed of every random choice
  run.dir                  the run directory; default: outputs/<run.name>-<hash of the config>
  run.name                 the readable part of its name
  train.steps              total number of optimizer steps
  train.epochs             passes over the data, instead of steps
  train.batch_size         sequences per forward pass and rank
  train.grad_accum_steps   forward passes per optimizer step
  data.num_workers         processes that load data
  data.sequence_length     tokens per sequence
  sampler.temperature      flattens (above 1) or sharpens (below 1) the shares of the sources
  sampler.weights          weight by source name: sampler.weights.prose=3
  eval.every_steps         steps between evaluations; 0: never
  checkpoint.every_steps   steps between checkpoints
  checkpoint.keep_last     number of checkpoints to keep
  optimizer.lr             peak learning rate

Flags
  -m, --multirun           a sweep: values separated by commas, range(...), glob(...)
  -n, --dry-run            print what would be done about each run, and why; start nothing
  -c, --cfg job            print the composed config; with --resolve as it would be run, with -p KEY a part of it
  -i, --info defaults      print which files it was composed from
  -cd, --config-dir DIR    an additional directory of groups and experiments
  -cn, --config-name NAME  another primary config
  -sc install=SHELL        shell completion (bash, zsh, fish): eval "$(runner -sc install=bash)"
  -h, --help, --version, --hydra-help
"""


def text(config_dirs: Sequence[str | Path] = ()) -> str:
    """Return the help text, including the groups and options of the shipped configs and of `config_dirs`."""
    found = groups([conf_dir(), *(Path(directory) for directory in config_dirs)])
    lines = {group: ", ".join(options) for group, options in found.items()}
    commands = {f"{name} {arguments}": about for name, (_, arguments, about) in COMMANDS.items()}
    return TEXT.replace("{commands}", _columns(commands)).replace("{groups}", _columns(lines))


def _columns(lines: dict[str, str]) -> str:
    width = max(map(len, lines))
    return "\n".join(f"  {name:{width}}  {about}" for name, about in lines.items())


def config_dirs(arguments: Sequence[str]) -> list[str]:
    """Return the values of `--config-dir` (or `-cd`) in a command's arguments."""
    found = []
    for argument, following in pairwise([*arguments, ""]):
        flag, _, value = argument.partition("=")
        if flag in ("--config-dir", "-cd"):
            found.append(value or following)
    return [*(directory for directory in found if directory), *map(str, project_dirs())]
