"""Freeze the base config of a search's trials, so that later edits of config files do not affect any trial.

A template is a composed config with unresolved interpolations. Therefore, if a setting refers to a varied setting, it
follows that setting in every trial. There is one template for each combination of group options that the search varies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

from runner.config.composition import HYDRAS_OWN, Composed, Composer, fill_in
from runner.config.explain import ERRORS, explain
from runner.config.frozen import plain_values, to_config
from runner.config.identity import as_text, canonical, flatten, readable_name
from runner.config.search import SearchConfig, dimension_errors, left_to_space, rewritten, to_options
from runner.config.tree import CONFIG_NAME
from runner.errors import UserError, refuse
from runner.search.points import Dimension, Point, pairs

WANDB = "runner.metrics.wandb.WandB"
_PLAIN = re.compile(r"(?!(?:true|false|null|nan|inf)$)[A-Za-z_][\w./@-]*", re.IGNORECASE)
"""Strings that Hydra reads as strings without quotes."""
MOST_WRONG = 3
"""The maximum number of points whose errors are reported, because a misspelled setting causes the same error in all."""


class TrialComposer(Composer):
    """Compose the trials of a search."""

    def __init__(self, config_dirs: Sequence[str | Path] = (), config_name: str = CONFIG_NAME) -> None:
        super().__init__(config_dirs, config_name)
        self.searching = True
        self.flags = [f"--config-dir={given}" for given in config_dirs]
        self.flags += [] if config_name == CONFIG_NAME else [f"--config-name={config_name}"]

    def is_search(self, overrides: Sequence[str]) -> bool:
        """Return whether a command with several runs is a search, from its overrides or a chosen option's file."""
        if not any(re.match(r"\+*(search|experiment)\b", text) for text in overrides):
            overrides = []
            if self.tree.config_name == CONFIG_NAME:
                return False
        try:
            fixed, dimensions = self._split([text for text in overrides if self.tree.group_of(text)])
            config = self.tree.compose([*fixed, *self.first_options(dimensions)])
            return OmegaConf.select(config, "search.kind") is not None
        except (*ERRORS, UserError):  # the error is reported when the command is composed
            return any(re.match(r"\+*search=", text) for text in overrides)

    def search(self, overrides: Sequence[str]) -> tuple[SearchConfig, list[str], list[Dimension]]:
        """Split a command into its search options, the overrides that all trials share, and the varied settings.

        Raises:
            UserError: the overrides or the search options have errors.
        """
        texts = [rewritten(text) for text in overrides]
        fixed, dimensions = self._split(texts)
        chosen = [*fixed, *self.first_options(dimensions)]
        try:
            options = SearchConfig(**to_options(plain_values(self.tree.compose(chosen).search)))
        except ERRORS:
            self.compose(chosen)  # raises all errors, with explanations
            raise
        refuse(options.option_errors())
        if swept := self._sweep_params([text for text in chosen if self.tree.group_of(text)]):
            raise UserError(
                f"{swept[0]} in a config file (hydra.sweeper.params) is a sweep, and this is a search: write it in "
                "search.space"
            )
        space = left_to_space(flatten(options.space), texts)
        lists = [_listed(key, value) for key, value in space.items() if isinstance(value, list)]
        ranges = [rewritten(f"{key}={value}") for key, value in space.items() if not isinstance(value, list)]
        single, more = self._split(ranges)
        refuse(f"search.space: {text} is one value, not a range or a list: set it outside of search" for text in single)
        refuse(line for each in lists for line in dimension_errors(each))
        return options, fixed, sorted([*dimensions, *lists, *more], key=lambda each: each.key)

    def _split(self, texts: Sequence[str]) -> tuple[list[str], list[Dimension]]:
        fixed, dimensions, errors = list[str](), list[Dimension](), list[str]()
        for text in texts:
            try:
                found = self.tree.dimension(text)
            except ERRORS as error:
                errors.append(explain(error, text, None))
                continue
            if found is None:
                fixed.append(text)
            else:
                dimensions.append(found)
                errors.extend(dimension_errors(found))
        refuse(errors)
        return fixed, dimensions

    def first_options(self, dimensions: Sequence[Dimension]) -> list[str]:
        """Choose the first option of each varied group, so that the remaining config can be composed."""
        return [f"{each.key}={each.values[0]}" for each in dimensions if self.tree.group_of(each.key) and each.values]

    def freeze(self, fixed: Sequence[str], dimensions: Sequence[Dimension], base: Path) -> dict[str, Any]:
        """Compose the base config of the trials, as JSON values.

        Args:
            fixed: the overrides that all trials share.
            dimensions: the settings that the search varies.
            base: the directory to resolve relative paths against.

        Raises:
            UserError: the overrides have errors, listed one per line.
        """
        groups = [each for each in dimensions if self.tree.group_of(each.key)]
        templates = {}
        for values in product(*(each.values for each in groups)):
            chosen = [f"{each.key}={value}" for each, value in zip(groups, values, strict=True)]
            try:
                config = self.tree.compose([*fixed, *chosen])
            except ERRORS:
                self.compose([*fixed, *chosen])  # raises all errors, with explanations
                raise
            choices = dict(config.hydra.runtime.choices)
            values_of = plain_values(config, resolve=False)
            for key, text in list(_texts(values_of, "")):
                if HYDRAS_OWN in text and not key.startswith("hydra."):  # known only in this composition
                    OmegaConf.update(config, key, OmegaConf.select(config, key))
            values_of = plain_values(config, resolve=False)
            title, named_against = self.title_and_base(choices, values_of, base)
            values_of = {key: value for key, value in values_of.items() if key not in ("hydra", "search")}
            made = {"values": values_of, "title": title, "named_against": named_against}
            digest = sha256(canonical(made).encode()).hexdigest()
            templates[json.dumps(chosen)] = {**made, "digest": digest}
        # These overrides are omitted from the names of runs and from the commands that reproduce them.
        unnamed = r"\+*search[.=]|train\.epochs=null|\+*launcher\.(retry_failed|dry_run|slots)="
        shared = [text for text in fixed if not re.match(unnamed, text)]
        chosen_by_file = [] if any(re.match(r"\+*search=", text) for text in fixed) else ["search=none"]
        known = {"flags": [*self.flags, *chosen_by_file], "known": self.tree.groups}
        return {"overrides": shared, **known, "groups": [each.key for each in groups], "templates": templates}

    def compose_point(
        self, frozen: Mapping[str, Any], point: Point, base: Path, repeat: int = 0, search: str = ""
    ) -> Composed:
        """Compose the run of a trial.

        Args:
            frozen: the result of `freeze`.
            point: the values of the trial, by key.
            base: the directory to resolve relative paths against.
            repeat: the number of the repeat, which is added to the seed.
            search: the name of the search, used to group its runs in W&B.

        Raises:
            UserError: the config has errors, listed one per line.
        """
        key = json.dumps([f"{each}={point[each]}" for each in frozen["groups"]])
        template = frozen["templates"][key]
        texts = [f"{each}={value}" for each, value in point.items() if each not in frozen["groups"]]

        def compose(overrides: Sequence[str]) -> DictConfig:
            return self.tree.compose(overrides, template["values"], resolved=False)

        seed = [f"seed={int(template['values']['seed']) + repeat}"] if repeat else []
        _, plain = self._checked([*texts, *seed], compose, template["digest"])
        fill_in(plain, base)
        for node in plain["logger"].values():
            if isinstance(node, dict) and node.get("_target_") == WANDB and search:
                node.setdefault("group", search)
        given = [*frozen["overrides"], *pairs(point), *seed]
        named = template["title"], template["named_against"]
        run_dir = self._run_dir(plain, lambda: readable_name(*named, plain, *self._given(given, frozen["known"])))
        plain["run"]["dir"] = str(run_dir)
        return Composed(to_config(plain), plain, tuple(given), run_dir)

    def check_points(
        self, frozen: Mapping[str, Any], points: Sequence[Point], base: Path, drawn: Collection[str] = ()
    ) -> list[str]:
        """Compose the runs of these points and return their errors.

        Only the first `MOST_WRONG` points with errors are included, each named where necessary. Two points that are the
        same run are also an error.

        Args:
            frozen: the result of `freeze`.
            points: the points of the trials.
            base: the directory to resolve relative paths against.
            drawn: the keys with values drawn from an interval. Errors that differ only in these values are merged into
                one line.
        """
        self.sweeping()
        found: dict[str, str] = {}
        wrong, runs = 0, dict[str, Point]()
        for point in points:
            try:
                run = self.compose_point(frozen, point, base).run_dir.name
                if (twin := runs.setdefault(run, point)) is not point:
                    both = f"({' '.join(pairs(twin))}) and ({' '.join(pairs(point))})"
                    return [f"two trials are the same run {run}: {both}: vary what changes what is trained"]
            except UserError as error:
                wrong += 1
                texts = pairs(point)
                for line in str(error).splitlines():
                    same = line
                    for key, value in point.items():
                        same = same.replace(f"{key}={value}", key) if key in drawn else same
                    found.setdefault(same, line if line.startswith(tuple(texts)) else f"{' '.join(texts)}: {line}")
                if wrong == MOST_WRONG:
                    break
        return list(found.values())


def _texts(node: Any, prefix: str) -> list[tuple[str, str]]:
    """List the dotted key and the value of each string in nested values."""
    if isinstance(node, dict):
        return [found for key, value in node.items() for found in _texts(value, f"{prefix}{key}.")]
    return [(prefix.rstrip("."), node)] if isinstance(node, str) else []


def _listed(key: str, values: Sequence[Any]) -> Dimension:
    """Return the dimension for a list in `search.space`. Its values may have any type that a setting can have."""
    return Dimension(key, tuple(map(_typed, values)))


def _typed(value: Any) -> str:
    """Format a value as it is typed on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(_typed, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{_typed(str(key))}:{_typed(each)}' for key, each in value.items())}}}"
    if isinstance(value, str) and not _PLAIN.fullmatch(value):
        return QuotedString(value, Quote.single).with_quotes()
    return as_text(value)
