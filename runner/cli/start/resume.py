"""Resume runs from their directories: `python -m runner resume RUN... [key=value ...]`.

python -m runner resume outputs/text-seed0-c7d1eabb
python -m runner resume outputs/*                        # a sweep
python -m runner resume RUN train.steps=2000             # a longer run
torchrun --nproc-per-node 4 -m runner resume RUN
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli.base.arguments import add_config_dir, runs_and_settings
from runner.cli.base.console import PROGRAM, Parser, print_errors, say
from runner.config.plain_yaml import read_plain
from runner.errors import ExitStatus, RunDirError, UserError, refuse
from runner.rundir.find import what_to_pass
from runner.rundir.paths import RunDir
from runner.rundir.trust import check_trusted, reading
from runner.system import files

if TYPE_CHECKING:
    from runner.config.composition import Composed, Composer

ABOUT = """\
Resumes runs where they stopped, from the frozen config in each run directory: config files that were edited since make
no difference. A finished run reports that, and a live one is left alone. Runs start where their config says (launcher);
the runs of one command share a launcher.

key=value changes a setting of every RUN, as far as an existing run allows it: train.steps, launcher, logger, checkpoint
and the like may change; data and sampler with run.allow_data_change=true; the model may not."""


def parser() -> Parser:
    """Return the command's argument parser."""
    made = Parser(
        prog=f"{PROGRAM} resume",
        usage=f"{PROGRAM} resume [-h] [-n] [--config-dir DIR] RUN [RUN ...] [key=value ...]",
        description=ABOUT,
        epilog=f"{PROGRAM} status lists run directories.",
    )
    made.add_argument("words", nargs="*", metavar="RUN", help="a run directory, such as outputs/NAME")
    made.add_argument("-n", "--dry-run", action="store_true", help="only print what would be done, and why")
    add_config_dir(made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    Raises:
        UserError: a RUN is not a run directory, or a config has errors. Then no run was started.
    """
    options = parser().parse_intermixed_args(list(arguments))
    words, overrides = runs_and_settings(options.words)
    run_dirs = [Path(word) for word in dict.fromkeys(words)]
    # `outputs/*` also matches files that `runner report` has written.
    if reports := [path for path in run_dirs if files.is_file(path)]:
        run_dirs = [path for path in run_dirs if path not in reports]
        say(f"not run directories, left out: {', '.join(map(str, reports))}")
    if not run_dirs:
        raise UserError(f"pass a run directory: {PROGRAM} resume outputs/NAME; {PROGRAM} status lists them")
    refuse(error for path in run_dirs if (error := _not_a_run(path)))
    from runner.cli.start.start import start_runs
    from runner.config.composition import Composer

    found, unusable = jobs(Composer(options.config_dir), run_dirs, overrides)
    if not found:
        refuse(unusable, RunDirError)
    if unusable:
        print_errors(RunDirError("\n".join(unusable)))
    return start_runs(found, options.dry_run) or int(ExitStatus.FAILED if unusable else ExitStatus.FINISHED)


def jobs(
    composer: Composer, run_dirs: Sequence[Path], overrides: Sequence[str]
) -> tuple[list[Composed], Sequence[str]]:
    """Apply `overrides` to the frozen configs of the runs in `run_dirs`.

    Returns:
        The runs, and an error line for each directory that cannot be used.

    Raises:
        UserError: the configs have errors; the message lists each error once.
    """
    deleting = [text for text in overrides if text.startswith("~")]
    refuse(f"{text}: a value of an existing run cannot be deleted; set one" for text in deleting)
    # A rerun of the command must work even though the frozen config already contains the value.
    texts = [re.sub(r"^\+(?=[^+=]*\.)", "++", text) for text in overrides]
    found: list[Composed] = []
    errors: dict[str, None] = {}
    unusable: list[str] = []
    for run_dir in run_dirs:
        try:
            with reading(RunDir(run_dir)):
                check_trusted(RunDir(run_dir))  # checked before any class named in the config is looked up
                first = _overrides_before(run_dir)
            with _naming_directory(run_dir):
                composed = composer.recompose(run_dir, texts)
        except RunDirError as error:
            unusable.append(str(error))
            continue
        except UserError as error:
            errors |= dict.fromkeys(str(error).splitlines())
            continue
        # code.json lists the overrides of the run's first command, followed by later changes. The last one of a key
        # applies.
        before = [text for text in first if text not in overrides]
        found.append(replace(composed, overrides=(*before, *overrides)))
    refuse(errors)
    return list({job.run_dir: job for job in found}.values()), unusable


@contextmanager
def _naming_directory(run_dir: Path) -> Iterator[None]:
    """Add the directory in which the run was started to the error, if a module is not found."""
    try:
        yield
    except UserError as error:
        if "No module named" not in str(error):
            raise
        directory = read_plain(RunDir(run_dir).config)["run"].get("directory")
        if directory in (None, os.getcwd()):
            raise
        reason = "" if directory in sys.path else ", which is gone, or others can write to it"
        raise type(error)(
            "\n".join(
                f"{line}; the run was started in {directory}{reason}" if "No module named" in line else line
                for line in str(error).splitlines()
            )
        ) from None


def _overrides_before(run_dir: Path) -> list[str]:
    found = files.read_object(RunDir(run_dir).code).get("overrides")
    return [str(text) for text in found] if isinstance(found, list) else []


def _not_a_run(path: Path) -> str | None:
    """Return why `path` is not a run directory, or None if it is one."""
    if files.is_file(RunDir(path).config):
        return None
    if not files.is_dir(path):
        return f"{path}: no such directory; pass a run directory, which has a config.yaml"
    return f"{path} is not a run directory, which has a config.yaml: {what_to_pass(path)}"
