"""Explain errors of Hydra and OmegaConf in one line each, with the key, its value and the allowed values.

A composition stops at its first error. To find all errors, `Diagnosis` applies the overrides one at a time.
"""

from __future__ import annotations

import contextlib
import copy
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from runner.config.frozen import READ_ERRORS
from runner.config.hints import expected, type_of
from runner.config.identity import as_text
from runner.config.schema import Command
from runner.config.search import RANGES, SHOWN, rewritten
from runner.config.tree import ConfigTree
from runner.errors import UserError, nearest

# Exceptions that a composition can raise.
ERRORS = (HydraException, *READ_ERRORS)

# Hydra settings that control where and how an application runs, and what to use instead. Hydra's other settings, such
# as those for logging, have no effect either, but users rarely set them.
REPLACED = {
    "hydra.run": "set the run directory with run.dir=..., or run.root=... and run.name=...",
    "hydra.sweep": "run directories are created in run.root=...",
    "hydra.launcher": "Hydra's launchers are not used: choose where the run executes with launcher=local or "
    "launcher=slurm",
    "hydra.sweeper": "Hydra's sweepers are not used: a sweep is -m with comma-separated values, range(...) or "
    "choice(...), such as -m seed=1,2, or hydra.sweeper.params in an experiment; a search is " + SHOWN,
    "hydra.mode": "start a sweep with -m",
    "hydra.job.chdir": "a run writes to its run directory, run.dir=..., and the current directory stays what it is",
    "hydra.job.env_set": "set variables in the shell, or for the jobs of a cluster in launcher.setup",
    "hydra.callbacks": "classes of your own are called between steps with callbacks.NAME._target_=...",
    "run.directory": "it is where the command is given",
    "run.typed": "it follows from the paths in data.sources",
    "run.changed_by": "it follows from the classes of the callbacks",
}


# Setting names in other trainers, and the corresponding names here.
OF_OTHERS = {
    **dict.fromkeys(("accumulate_grad_batches", "gradient_accumulation_steps"), "train.grad_accum_steps"),
    **dict.fromkeys(("gradient_clip_val", "max_grad_norm", "grad_clip"), "train.clip_norm"),
    **dict.fromkeys(("batch_size", "per_device_train_batch_size"), "train.batch_size"),
    **dict.fromkeys(("max_epochs", "num_train_epochs", "epochs"), "train.epochs"),
    **dict.fromkeys(("max_steps", "limit_train_batches", "num_steps"), "train.steps"),
    **dict.fromkeys(("val_check_interval", "eval_steps"), "eval.every_steps"),
    **dict.fromkeys(("every_n_train_steps", "save_steps"), "checkpoint.every_steps"),
    **dict.fromkeys(("ckpt_path", "resume_from_checkpoint"), "init_from"),
    **dict.fromkeys(("lr", "learning_rate"), "optimizer.lr"),
    "check_val_every_n_epoch": "eval.every_epochs",
    "limit_val_batches": "eval.batches",
    "save_total_limit": "checkpoint.keep_last",
    "devices": "launcher.ranks",
    "tags": "run.tags",
    "notes": "run.notes",
}


def unused_setting(override: str) -> str | None:
    """Return one line for an override of a Hydra setting that would have no effect, or None for any other override."""
    instead = _replaced(override.partition("=")[0].lstrip("+~"))
    return f"{override} has no effect here: {instead}" if instead else None


def unused_in_files(changes: Mapping[str, Any]) -> list[str]:
    """Return one line for each Hydra setting in the config files, because these settings have no effect.

    Args:
        changes: the settings, as returned by `ConfigTree.hydra_changes`.
    """
    shown = {key: value.name if isinstance(value, Enum) else as_text(value) for key, value in changes.items()}
    return [f"{key}={value} in a config file has no effect here: {_replaced(key)}" for key, value in shown.items()]


def _replaced(key: str) -> str | None:
    """Return the replacement for a Hydra setting or group of settings, or None for any other setting."""
    names = key.replace("/", ".").split(".")
    return REPLACED.get(".".join(names[:2])) or REPLACED.get(".".join(names[:3]))


def _not_parsed(error: OverrideParseException) -> str:
    if function := re.match(r"[^=]*=\s*([A-Za-z_]\w*)\(", error.override):
        if function[1] == "log" and rewritten(error.override) != error.override:
            return f"{error.override}: a range needs -m and a search: {SHOWN}"
        return f"{error.override}: {function[1]}(...) cannot be parsed; {RANGES}"
    return f"{error.override!r} cannot be parsed ({_first_line(error)}): write key=value, and quote values with spaces"


def _siblings(key: str, config: DictConfig | None) -> list[str]:
    """Return the valid names in place of the last part of the dotted `key`."""
    parent = key.rpartition(".")[0]
    hint = type_of(parent) if parent else Command
    if isinstance(hint, type) and is_dataclass(hint):
        return [each.name for each in fields(hint)]
    node = OmegaConf.select(config, parent) if config is not None else None
    return [str(name) for name in node if name != key.rpartition(".")[2]] if isinstance(node, DictConfig) else []


def explain(error: Exception, override: str | None, config: DictConfig | None) -> str:
    """Explain an error of a composition in one line.

    Args:
        error: the exception that Hydra or OmegaConf raised.
        override: the override that caused the error, if known.
        config: a config composed without that override, used to list the valid options.
    """
    if isinstance(error, OverflowError):
        return _too_large(error, override)
    if override and config is not None and (line := _below_a_value(override, config)):
        return line
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    where = f"{override}: " if override else ""
    if isinstance(error, OverrideParseException):
        return _not_parsed(error)
    if isinstance(error, MissingConfigException):
        return _no_such_option(error, override)
    if str(error).startswith("Ambiguous value") or "requires --multirun" in str(error):
        return f"{where}several values are a sweep, which needs -m; write a list as key=[a,b]"
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        return _unknown(cause, override, config)
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return _invalid(str(cause.full_key), override, cause)
    if match := re.search(r"In '(.+?)': \w+ raised while composing config:\n(.+)\n\s+full_key: (\S+)", str(error)):
        file, message, key = match.groups()
        if instead := _replaced(key):  # an option of a Hydra plugin
            return f"{file}.yaml: {key} has no effect here: {instead}"
        if message.startswith("Key ") and "not in " in message:
            options = _siblings(key, config)
            name = key.rpartition(".")[2]
            hint = _known_elsewhere(key) or nearest(name, options)
            return f"{file}.yaml: {key}: no such option{hint}; there are {', '.join(options)}"
        allowed = expected(key)
        return f"{file}.yaml: {key}: {message}" + (f"; allowed is {allowed}" if allowed else "")
    return where + " ".join(line.strip() for line in str(error if str(error) else cause).splitlines())


def _key(override: str) -> str:
    """Return the dotted key that `override` sets."""
    return override.partition("=")[0].lstrip("+~")


def _too_large(error: OverflowError, override: str | None) -> str:
    """Explain the error for an integer too large for a float setting. OmegaConf does not check the size."""
    found = re.search(r"full_key: (\S+)", str(error))
    key = found.group(1) if found else "a number in it"
    where = key if override is None else override if _key(override).startswith(key) else f"{override}: {key}"
    most = f"{sys.float_info.max:.2g}"
    return f"{where} must be from -{most} to {most}, so that a float can hold it"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _no_such_option(error: MissingConfigException, override: str | None) -> str:
    group, _, option = str(error.missing_cfg_file or "").rpartition("/")
    if not group:
        return f"--config-name {option}: no such config; pass the name of a .yaml file without the extension"
    asked_in = re.match(r"In '(.+?)': ", str(error))
    file = asked_in.group(1) if asked_in else None
    where = f"{file}.yaml: " if file and file != "config" else ""
    if override:
        where = "" if override.lstrip("+~").startswith(group) else f"{override}: "
    if instead := _replaced(group):  # a Hydra plugin that may not be installed
        return f"{where}{group}={option} has no effect here: {instead}"
    options = sorted(str(name) for name in error.options or [])
    if not options:
        return f"{where}{group}={option}: there is no config group {group}"
    return (
        f"{where}{group}={option}: no such option of {group}{nearest(option, options)}; "
        f"the options are {', '.join(options)}; searched in {', '.join(_searched(error, group))}"
    )


def _searched(error: MissingConfigException, group: str) -> list[str]:
    """List the directories that Hydra searched for an option."""
    found = re.findall(r"path=(?:file://)?(/\S+)", str(error))
    return [f"{directory}/{group}" for directory in dict.fromkeys(found)] or ["conf"]


def _unknown(cause: OmegaConfBaseException, override: str | None, config: DictConfig | None) -> str:
    key = str(cause.full_key or _key(override or ""))
    parent, _, name = key.rpartition(".")
    options = _siblings(key, config)
    close = _known_elsewhere(_key(override or key)) or nearest(name, options)
    if not close and config is not None:
        close = _elsewhere(name, config)
    line = f"{override or key}: no such option{f' in {parent}' if parent else ''}{close}"
    if options:
        line += f"; there {'is' if len(options) == 1 else 'are'} {', '.join(options)}"
    if parent == "data.sources":
        line += "; data=files, data=shards and data=mixture have others, and +data.sources.NAME adds one"
    if parent == "data.eval_sources":
        line += "; +data.eval_sources.NAME adds one"
    if "_target_" in options and override:
        line += f"; to pass its class another argument, write +{override.lstrip('+')}"
    return line


def _known_elsewhere(key: str) -> str:
    """Return ` (here it is 'train.clip_norm')` if the last part of `key` is a setting's name in another trainer."""
    known = OF_OTHERS.get(key.rpartition(".")[2])
    return f" (here it is {known!r})" if known and known != key else ""


def _below_a_value(override: str, config: DictConfig) -> str | None:
    """Return an error line for an override below a single value, e.g. `train.steps.x`, or None for any other."""
    names = _key(override).split(".")
    for count in range(1, len(names)):
        value = OmegaConf.select(config, ".".join(names[:count]))
        if not isinstance(value, DictConfig):
            return None if value is None else _not_a_dictionary(override, ".".join(names[:count]))
    return None


def _not_a_dictionary(override: str, key: str) -> str:
    """Return an error line for an override below `key`, which is a single value."""
    allowed = expected(key)
    return f"{override}: {key} is one value{f', {allowed},' if allowed else ''} with no options below it: set {key}=..."


def _elsewhere(name: str, config: DictConfig) -> str:
    """Return ` (did you mean 'train.steps'?)` if `name` exists in another section, or an empty string."""
    found = [
        f"{group}.{name}"
        for group in sorted(field.name for field in fields(Command))
        if isinstance(node := OmegaConf.select(config, group), DictConfig) and name in node
    ]
    return f" (did you mean {found[0]!r}?)" if found else ""


def _invalid(key: str, override: str | None, cause: OmegaConfBaseException) -> str:
    allowed = expected(key)
    if override and _key(override).startswith(f"{key}.") and allowed not in ("", "a dictionary"):
        return _not_a_dictionary(override, key)
    message = _first_line(cause)
    if (isinstance(cause, ValidationError) or "Cannot merge" in message) and allowed:
        value = (override or "").partition("=")[2]
        enum = allowed.removeprefix("one of ").split(" or ")[0].split(", ") if allowed.startswith("one of") else []
        shown = f"{key}={value}" if override else f"{key}: {message}"
        return f"{shown} must be {allowed}{nearest(value, enum)}"
    return f"{override or key}: {message}"


Check = Callable[[DictConfig], list[str]]
Found = tuple[dict[str, str], set[str], DictConfig]  # error lines by override, groups of these, a config without them


class Diagnosis:
    """Find all config errors in overrides that cannot be composed.

    Args:
        tree: the config tree.
        compose: a function that composes overrides into Hydra's config, or raises one of `ERRORS`.
        check: a function that returns the errors of a config's values. It raises one of `ERRORS`, or UserError for
            missing values.
    """

    def __init__(self, tree: ConfigTree, compose: Callable[[Sequence[str]], DictConfig], check: Check) -> None:
        self.tree = tree
        self.compose = compose
        self.check = check

    def config_errors(self, overrides: Sequence[str], error: Exception) -> tuple[dict[str, str], list[str]]:
        """Return one error line for each wrong override, by override, and the lines of all other errors.

        Args:
            overrides: the overrides of the command.
            error: the exception raised when all overrides were composed.
        """
        choices = [text for text in overrides if self.tree.group_of(text)]
        values = [text for text in overrides if text not in choices]
        try:
            found, failed, config = self._search(choices, values, lambda config: [])
        except ERRORS as broken:
            return {}, [explain(broken if not overrides else error, None, None)]
        try:
            wrong = self._value_errors(config, failed)
        except ERRORS as unresolved:  # it composes but cannot be resolved, e.g. a reference to a missing key
            try:
                found, failed, config = self._search(choices, values, self.check)
                wrong = self._value_errors(config, failed)
            except ERRORS:
                return found, [explain(unresolved, None, None)]
        if not found and not wrong:  # an error in a value that only Hydra sets, e.g. the list of all overrides
            with contextlib.suppress(*ERRORS):
                found, failed, config = self._compose_each([*choices, *values], self.check)
        return found, wrong if found or wrong else [explain(error, None, config)]

    def _search(self, choices: Sequence[str], values: Sequence[str], check: Check) -> Found:
        """Find the overrides that raise an error. Overrides that do not choose options share one composition.

        Args:
            choices: the overrides that choose group options.
            values: the overrides that set values.
            check: a function that raises further errors of a composed config.

        Raises:
            ERRORS: an error occurs even without any override.
        """
        try:
            found, failed, composed = dict[str, str](), set[str](), self._checked(self.compose(choices), check)
        except ERRORS:
            found, failed, composed = self._compose_each(choices, check)
        config, kept = copy.deepcopy(composed), list[str]()
        for override in values:
            if self._may_follow(override, failed):
                continue
            try:
                self.tree.apply(override, config)
                self._checked(config, check)
                kept.append(override)
            except ERRORS as wrong:
                config = copy.deepcopy(composed)  # the value may already be partly set
                for text in kept:
                    self.tree.apply(text, config)
                found[override] = explain(wrong, override, config)
        return found, failed, config

    def _compose_each(self, overrides: Sequence[str], check: Check) -> Found:
        """Find the overrides that raise an error, as `_search` does, but compose once for each override."""
        found, failed, kept = dict[str, str](), set[str](), list[str]()
        config = self._checked(self.compose([]), check)
        for override in overrides:
            if self._may_follow(override, failed):
                continue
            try:
                config = self._checked(self.compose([*kept, override]), check)
                kept.append(override)
            except ERRORS as wrong:
                found[override] = self._not_an_option(wrong, override) or explain(wrong, override, config)
                failed |= {group for group in [self.tree.group_of(override)] if group}
        return found, failed, config

    def _checked(self, config: DictConfig, check: Check) -> DictConfig:
        """Check `config` and return it. Missing values are ignored, because a later override may set them."""
        with contextlib.suppress(UserError):
            check(config)
        return config

    def _may_follow(self, override: str, failed: set[str]) -> bool:
        """Return whether a failed choice of an option may have caused the error of a value."""
        return not self.tree.group_of(override) and (_head(override.lstrip("+~")) in failed or "experiment" in failed)

    def _not_an_option(self, error: Exception, override: str) -> str | None:
        """Return an error line for a choice that is not a name, e.g. `optimizer=null`, or None for any other error."""
        group = self.tree.group_of(override)
        if not group or not (isinstance(error, TypeError) or "Config group override must be" in str(error)):
            return None
        options = self.tree.options.get(group, [])
        unset = ", or leave it out for none" if group == "experiment" else ""
        return f"{override}: choose an option of {group}{unset}; the options are {', '.join(options)}"

    def _value_errors(self, config: DictConfig, failed: set[str]) -> list[str]:
        """Return the errors of the composed values, except those that a failed choice may have caused."""
        unsure = failed | ({"data", "sampler", "phases", "model", "optimizer"} if failed else set())
        try:
            found = self.check(config)
        except UserError as missing:
            found = str(missing).splitlines()
        return [line for line in found if _head(line) not in unsure]


def _head(text: str) -> str:
    return re.split(r"[.=: ]", text, maxsplit=1)[0]
