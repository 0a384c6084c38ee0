"""Compose and check configs, either from a command's overrides or from a run directory."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from runner.config.arguments import Names, argument_errors
from runner.config.explain import ERRORS, Diagnosis, explain, unused_in_files, unused_setting
from runner.config.fork import replaced_values
from runner.config.frozen import load_plain, over_schema, plain_values, to_config, to_yaml
from runner.config.identity import LENGTH_KEYS, differences, flatten, identity, readable_name
from runner.config.paths import anchor, relocate
from runner.config.schema import Config, config_errors
from runner.config.search import SearchConfig, to_options
from runner.config.sources import GROUPS, complete_sources, name_sources
from runner.config.targets import changing_callbacks, target_errors
from runner.config.tree import CONFIG_NAME, ConfigTree
from runner.errors import UserError, nearest, refuse
from runner.rundir import provenance
from runner.rundir.origin import search_modules
from runner.rundir.paths import RunDir
from runner.search.choice import best_run
from runner.search.directory import is_search
from runner.system import files

HYDRAS_OWN = "${hydra:"  # prefix of interpolations that refer to Hydra's settings for the job
OWN_KEYS = ("run.dir", "run.name")  # location of a run; differs between any two jobs
KEPT_COMMON = 64
"""How many partial configs shared by a sweep's jobs are cached. Each may take megabytes if there are many sources."""


@dataclass(frozen=True)
class Composed:
    """The composed config of one job, as objects and as plain values, with its run directory."""

    config: Config
    plain: dict[str, Any]  # resolved values, with absolute paths and enums by name
    overrides: tuple[str, ...]  # as typed on the command line
    run_dir: Path  # an absolute path
    resumed: bool = False  # read from a run directory; if that is gone, nothing is started

    @cached_property
    def text(self) -> str:
        """Return the text of the run's `config.yaml`."""
        return to_yaml(self.plain)

    @cached_property
    def digest(self) -> str:
        """Return the identity of the run."""
        return identity(self.plain)


class Composer:
    """Compose and check configs from one config tree. The arguments and errors are the same as for `ConfigTree`."""

    def __init__(self, config_dirs: Sequence[str | Path] = (), config_name: str = CONFIG_NAME) -> None:
        self.tree = ConfigTree(config_dirs, config_name)
        self._listed: dict[Path, dict[str, list[str]]] = {}  # run directory names by root and identity
        self._bases: dict[tuple[object, ...], dict[str, Any]] = {}
        self._target_errors: dict[str, str | None] = {}
        self._arguments: dict[str, Names | None] = {}
        self._sweep = False
        self.searching = False  # True if the caller handles a search that the command asks for
        self._wrong: dict[tuple[object, ...], str] = {}  # error lines by (composed over, choices, override)
        self._dropping: dict[tuple[tuple[str, ...], str], str] = {}  # error lines by (choices, override), or ""
        self._common: dict[tuple[object, ...], tuple[Mapping[str, Any], DictConfig] | None] = {}

    def compose(self, overrides: Sequence[str], base: Path | None = None) -> Composed:
        """Compose and check one job.

        Args:
            overrides: the overrides as on the command line, without sweeps.
            base: the directory to resolve relative paths against; the current directory by default.

        Raises:
            UserError: the config has errors, listed one per line.
        """
        base, given = Path.cwd() if base is None else base, tuple(overrides)
        fork = fork_of(overrides, base)
        overrides = [text for text in overrides if not _FORK.match(text)]
        if fork is not None:
            return self._branch(*fork, overrides, given, base)
        choices, plain = self._checked(overrides, self.tree.compose)
        fill_in(plain, base)
        run_dir = self._run_dir(plain, lambda: self._readable(choices, plain, base, overrides))
        plain["run"]["dir"] = str(run_dir)
        return Composed(to_config(plain), plain, given, run_dir)

    def _branch(self, trunk: Path, step: int, overrides: Sequence[str], given: tuple[str, ...], base: Path) -> Composed:
        """Compose and check a branch's job: the trunk's frozen config with `overrides` applied.

        Args:
            trunk: the run directory of the trunk, relative to `base`.
            step: the step of the fork, at least 1.
            overrides: all overrides except the one that names the fork.
            given: all overrides of the command.
            base: the directory to resolve relative paths against.

        Raises:
            UserError: the trunk's config cannot be read, or the new config has errors, listed one per line.
        """
        trunk = Path(os.path.abspath(base / trunk.expanduser()))
        refuse(line for text in overrides if (line := _not_for_branches(text)))
        if not files.exists(trunk):
            remedy = "if it was removed, runner resume continues its branches"
            raise UserError(f"fork={trunk}@{step}: {trunk} is not a run directory; {remedy}")
        old = load_plain(trunk)
        relocate(old, trunk)
        search_modules(RunDir(trunk), old["run"]["directory"])
        own = {**old["run"], "dir": None, "name": None, "root": str(trunk.parent)}
        fork = {"run": str(trunk), "step": step, "digest": identity_at(trunk, step), "seed": None, "was": {}}
        fork["trunk"] = old["fork"] if old["fork"]["run"] is not None else {}
        frozen = {**old, "run": own, "fork": fork}
        _, plain = self._checked(overrides, lambda texts: self.tree.compose(texts, frozen), (trunk, step))
        fill_in(plain, base)
        plain["fork"] |= {"was": replaced_values(old, plain), "seed": plain["seed"]}
        title = re.sub(r"-[0-9a-f]{8}$", "", trunk.name)
        base_values = {**old, "fork": plain["fork"]}
        run_dir = self._run_dir(
            plain, lambda: readable_name(f"{title}-at{step}", base_values, plain, *self._given(overrides))
        )
        plain["run"]["dir"] = str(run_dir)
        config = to_config(plain)
        if run_dir == trunk:
            raise UserError(f"run.dir={run_dir} is the trunk itself: choose another one, or leave it out")
        if config.known_steps is not None and config.known_steps <= step:
            raise UserError(
                f"fork={trunk}@{step} with train.steps={config.known_steps} has no steps of its own: "
                "raise train.steps, or fork an earlier step"
            )
        return Composed(config, plain, given, run_dir)

    def recompose(self, run_dir: Path, overrides: Sequence[str]) -> Composed:
        """Compose and check an existing run's job: its frozen config with `overrides` applied.

        If an override chooses a group option, such as `launcher=slurm`, it replaces all frozen values of that group.

        Args:
            run_dir: the run directory, which stays the same.
            overrides: the overrides as on the command line, without sweeps.

        Raises:
            UserError: the frozen config cannot be read, or the new config has errors, listed one per line.
        """
        frozen, run_dir = load_plain(run_dir), Path(os.path.abspath(run_dir))
        relocate(frozen, run_dir)
        search_modules(RunDir(run_dir), frozen["run"]["directory"])
        fixed = [text for text in overrides if re.match(r"[+~]*run\.(dir|root|name)\b", text)]
        refuse(f"{text} cannot move the run {run_dir}: leave it out" for text in fixed)
        _, plain = self._checked(overrides, lambda texts: self.tree.compose(texts, frozen), run_dir)
        fill_in(plain, Path.cwd())
        plain["run"]["dir"] = str(run_dir)
        return Composed(to_config(plain), plain, tuple(overrides), run_dir, resumed=True)

    def expand(self, overrides: Sequence[str]) -> list[list[str]]:
        """Return the overrides of each job of a sweep: all combinations of values. The last key varies fastest.

        Raises:
            UserError: some overrides cannot be parsed; the message lists all of them.
        """
        sweepers = [text for text in overrides if re.match(r"[+~]*hydra[./]sweeper\b", text)]
        refuse(line for text in sweepers[:1] if (line := unused_setting(text)))
        given = self._alternatives(overrides)
        choices = {key: texts for key, texts in given.items() if self.tree.group_of(key)}
        params: dict[tuple[str, ...], list[str]] = {}  # by chosen options, which may define their own sweep
        for chosen in product(*choices.values()):
            params[chosen] = self._sweep_params([text for text in chosen if not unused_setting(text)])
        if len(set(map(tuple, params.values()))) < 2:
            chosen_params = self._alternatives(next(iter(params.values()), []))
            return [list(job) for job in product(*{**chosen_params, **given}.values())]
        jobs: list[list[str]] = []
        for chosen, own in params.items():
            alone = {key: [text] for key, text in zip(choices, chosen, strict=True)}
            jobs += map(list, product(*{**self._alternatives(own), **given, **alone}.values()))
        return jobs

    def swept(self, overrides: Sequence[str]) -> list[str]:
        """Return the sweeps that an experiment defines (`hydra.sweeper.params`), except keys that the command sets."""
        if not any(re.match(r"\+*experiment=", text) for text in overrides):
            return []
        keys = {text.lstrip("+~").partition("=")[0] for text in overrides}
        params = self._sweep_params([text for text in overrides if self.tree.group_of(text)])
        return [text for text in params if text.partition("=")[0] not in keys]

    def _alternatives(self, overrides: Sequence[str]) -> dict[str, list[str]]:
        """Return the list of overrides for each key that is swept.

        Raises:
            UserError: some overrides cannot be parsed; the message lists all of them.
        """
        alternatives: dict[str, list[str]] = {}
        errors = []
        for text in overrides:
            try:
                key, values = self.tree.alternatives(text)
            except ERRORS as error:
                errors.append(explain(error, text, None))
                continue
            if values is None:
                errors.append(
                    f"{text}: an interval cannot be enumerated; use range(...) or a list of values, or search=random"
                )
            else:
                alternatives[key] = values
        refuse(errors)
        return alternatives

    def sweeping(self) -> Composer:
        """Prepare this composer for a sweep, whose jobs differ only in single values, and return it."""
        self._sweep = True
        return self

    def jobs(
        self,
        overrides: Sequence[str],
        watch: Callable[[Collection[list[str]]], Iterable[list[str]]] = iter,
    ) -> list[Composed]:
        """Compose and check all jobs of a sweep.

        Args:
            overrides: the overrides as on the command line.
            watch: a function that yields the jobs one by one. It may show the progress.

        Raises:
            UserError: the configs have errors, or two jobs are the same run. The message lists each error once, with
                the first job that has it.
        """
        first_with: dict[str, str] = {}  # the first job with each error
        jobs = []
        expanded = self.expand(overrides)
        if len(expanded) > 1:
            self.sweeping()
        for number, job in enumerate(watch(expanded), start=1):
            try:
                jobs.append(self.compose(job))
            except UserError as error:
                for line in str(error).splitlines():
                    first_with.setdefault(line, f"job {number} ({' '.join(job)})")
        refuse(f"{job}: {line}" for line, job in first_with.items())
        if not jobs:
            raise UserError("the sweep has no jobs: one of its settings has no values; pass at least one for each")
        seen: dict[object, Composed] = {}
        for composed in jobs:
            twin = seen.setdefault(_place(composed), composed)
            if twin is not composed:
                raise UserError(_same_run(twin, composed))
        return jobs

    def show(self, flags: Sequence[str], overrides: Sequence[str]) -> int:
        """Print the output of Hydra's flags, such as `--cfg job --resolve -p sampler`. Return the exit status.

        Raises:
            UserError: the overrides cannot be composed; the message lists all errors, one per line.
        """
        before = os.environ.get("HYDRA_FULL_ERROR")
        os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise errors instead of printing them and exiting
        try:
            self.tree.run_hydra(flags, overrides)
        except SystemExit as end:
            return int(end.code or 0)
        except ERRORS as error:
            self.compose(overrides)
            raise UserError(" ".join(str(error).split())) from None
        finally:
            if before is None:
                del os.environ["HYDRA_FULL_ERROR"]
        return 0

    def _sweep_params(self, chosen: Sequence[str]) -> list[str]:
        """Return the sweep that a config defines in `hydra.sweeper.params`, in the syntax of Hydra's basic sweeper.

        Args:
            chosen: the overrides that choose group options, without sweeps.

        Raises:
            UserError: a config file chooses a different sweeper, whose parameters are not known here.
        """
        try:
            config = self.tree.compose(chosen)
            params = OmegaConf.select(config, "hydra.sweeper.params")
        except ERRORS:
            return []  # the error is reported when the jobs are composed
        refuse(unused_in_files(self.tree.hydra_changes(config)))
        return [f"{key}={value}" for key, value in params.items()] if params else []

    def _checked(
        self, overrides: Sequence[str], compose: Callable[[Sequence[str]], DictConfig], over: object = None
    ) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Compose and check a config. Return the chosen options of Hydra's groups, and the resolved values.

        Args:
            overrides: the overrides, without sweeps.
            compose: a function that composes overrides into Hydra's config.
            over: identifies the config that the overrides are applied to, if it is not the primary config.

        Raises:
            UserError: the config has errors, listed one per line.
        """
        given, choices = overrides, tuple(filter(self.tree.group_of, overrides))
        unused = {text: line for text in given if (line := unused_setting(text))}
        wrong = {text: line for text in given if (line := self._wrong.get((over, choices, text)))}
        overrides, others = [text for text in given if text not in unused and text not in wrong], list[str]()
        try:
            chosen, plain = self._composed(overrides, compose, over)
            others = [
                *self._dropping_nothing(overrides, compose),
                *_phases_left(overrides, plain),
                *self._all_errors(plain),
            ]
        except UserError as missing:
            others = [str(missing)]
        except ERRORS as error:

            def check(config: DictConfig) -> list[str]:
                unused = unused_in_files(self.tree.hydra_changes(config))
                return [*unused, *self._all_errors(_resolved(config))]

            diagnosis = Diagnosis(self.tree, compose, check)
            found, others = diagnosis.config_errors(overrides, error)
            wrong |= found
            if self._sweep and not any(map(self.tree.group_of, found)):  # the other jobs have the same errors
                self._wrong |= {(over, choices, text): line for text, line in found.items()}
        ordered = sorted(wrong, key=lambda text: (text not in choices, given.index(text)))
        refuse([*unused.values(), *(wrong[text] for text in ordered), *others])
        return chosen, plain

    def _dropping_nothing(self, overrides: Sequence[str], compose: Callable[[Sequence[str]], DictConfig]) -> list[str]:
        """Return one line for each override that deletes a callback, metric or source that does not exist."""
        lines, choices = [], tuple(filter(self.tree.group_of, overrides))
        for text in overrides:
            found = re.fullmatch(r"\+*(callbacks|eval\.metrics|data\.(?:eval_)?sources)\.(\w+)=null", text)
            if found and (not self._sweep or (choices, text) not in self._dropping):
                self._dropping[choices, text] = ""
                there = OmegaConf.select(compose([each for each in overrides if each != text]), found[1]) or {}
                if found[2] not in there:
                    known = ", ".join(map(str, there)) or "none"
                    line = f"{text}: there is no such entry{nearest(found[2], list(there))}; there are {known}"
                    self._dropping[choices, text] = line
            if found:
                lines.append(self._dropping[choices, text])
        return list(filter(None, lines))

    def _varied(
        self, overrides: Sequence[str], compose: Callable[[Sequence[str]], DictConfig], over: object
    ) -> tuple[Mapping[str, Any], DictConfig] | None:
        """Compose a job of a sweep like `_composed`, but compose the parts that jobs have in common only once.

        Hydra applies overrides of values last, after all options have been chosen and merged. This method does the
        same. It returns None after an error, and if Hydra would apply a value in a different order or use facts about
        the job.
        """
        chosen = tuple(filter(self.tree.group_of, overrides))
        if not self._sweep or any("{" in text for text in chosen) or any(HYDRAS_OWN in text for text in overrides):
            return None
        try:
            if (over, chosen) not in self._common:
                if len(self._common) == KEPT_COMMON:
                    self._common.clear()
                self._common[over, chosen] = self._common_to(compose(chosen))
            common = self._common[over, chosen]
            if common is None:
                return None
            config = copy.deepcopy(common[1])
            for text in overrides:
                if text not in chosen:
                    self.tree.apply(text, config)
            config = _without_hydra(config)
        except ERRORS:
            return None  # the error is reported when the job is composed
        return common[0], config

    def _common_to(self, composed: DictConfig) -> tuple[Mapping[str, Any], DictConfig] | None:
        """Return the chosen options, and the config without Hydra's node; None if values refer to that node."""
        if unused_in_files(self.tree.hydra_changes(composed)):
            return None
        choices = dict(composed.hydra.runtime.choices)
        with open_dict(composed):  # modified in place, because in a copy a top-level value would lose its type
            del composed["hydra"]
        return None if HYDRAS_OWN in OmegaConf.to_yaml(composed) else (choices, composed)

    def _composed(
        self, overrides: Sequence[str], compose: Callable[[Sequence[str]], DictConfig], over: object
    ) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Compose a config as Hydra does. Return the chosen options and the resolved values.

        Raises:
            ERRORS: an override is wrong.
            UserError: values are missing; the message lists all of them, one per line.
        """
        if (varied := self._varied(overrides, compose, over)) is not None:
            choices, config = varied
        else:
            composed = compose(overrides)
            refuse(unused_in_files(self.tree.hydra_changes(composed)))
            choices, config = dict(composed.hydra.runtime.choices), _without_hydra(composed)
        values = plain_values(_complete(config))
        search = values.pop("search", {})
        if not self.searching:
            refuse(_lines_on_search(search, overrides))
        plain = over_schema(values)
        drop_sources(plain, overrides)
        return choices, plain

    def _all_errors(self, plain: dict[str, Any]) -> list[str]:
        """Return every error of a resolved config, one line each. Values and `_target_` names are checked."""
        targets, arguments = target_errors(plain, self._target_errors), argument_errors(plain, self._arguments)
        return [*config_errors(to_config(plain)), *targets, *arguments]

    def _run_dir(self, plain: dict[str, Any], readable: Callable[[], str]) -> Path:
        """Return the run directory: an existing one that ends with the identity, or a new one with a readable name."""
        if plain["run"]["dir"] is not None:
            return Path(plain["run"]["dir"])
        root, digest = Path(plain["run"]["root"]), identity(plain)
        name = f"{plain['run']['name'] or readable()}-{digest}"
        if files.exists(root / name):
            return root / name
        if root not in self._listed:
            self._listed[root] = _by_identity(root)
        same = self._listed[root].get(digest, [])
        found = [root / other for other in sorted(same) if files.is_file(root / other / "config.yaml")]
        return found[0] if found and plain["run"]["name"] is None else root / name

    def _given(self, overrides: Sequence[str], groups: Collection[str] | None = None) -> tuple[list[str], list[str]]:
        """Return the keys that the overrides set, and the group options that they choose.

        Args:
            overrides: the overrides of the command.
            groups: the names of the config groups; by default, those of this tree.
        """
        keys, options = [], []
        titled = "experiment" if any(re.match(r"[+]*experiment=", text) for text in overrides) else "data"
        for text in overrides:
            key, _, value = text.lstrip("+~").partition("=")
            group = self.tree.group_of(text, groups)
            if group is None:
                keys.append(key)
            elif group not in ("experiment", "search", titled) and "/" not in value:
                options.append(f"{key}={value}")
        return keys, options

    def _readable(self, choices: Mapping[str, Any], plain: dict[str, Any], base: Path, overrides: Sequence[str]) -> str:
        return readable_name(*self.title_and_base(choices, plain, base), plain, *self._given(overrides))

    def title_and_base(
        self, choices: Mapping[str, Any], plain: dict[str, Any], base: Path
    ) -> tuple[str, dict[str, Any]]:
        """Return the prefix of a run's name, and the config whose differences from the run's make up the rest of it.

        Args:
            choices: the chosen option of each group.
            plain: the run's config. It supplies the values that are missing in the other config.
            base: the directory to resolve relative paths against.
        """
        experiment, data = choices.get("experiment"), choices.get("data")
        named = [(group, name) for group in GROUPS for name in plain["data"][group]]
        key = experiment, data, *named
        if key not in self._bases:
            chosen = [f"{k}={v}" for k, v in (("experiment", experiment), ("data", data)) if v is not None]
            config = self.tree.compose(chosen)
            name_sources(config, plain)
            self._bases[key] = _resolved(config, flatten(plain))
            drop_sources(self._bases[key], chosen)
            anchor(self._bases[key], base)
        title = str(experiment or data or self.tree.config_name).replace("/", "_")
        return title, self._bases[key]


def _lines_on_search(search: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Return the errors in the search settings of a command that starts a single run.

    With `search=none`, only settings on the command line are checked. Settings from an experiment file are ignored.
    """
    if search.get("kind") is not None:
        return [f"search={search['kind']} begins many runs: add -m, or set search=none for one run"]
    lines, keys = SearchConfig(**to_options(search)).option_errors(), {text.partition("=")[0] for text in overrides}
    return [line for line in lines if "search=none" not in overrides or line.partition("=")[0] in keys]


def _phases_left(overrides: Sequence[str], plain: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for an override that tries to remove all phases, but does not remove those from an experiment."""
    for text in overrides:
        if re.fullmatch(r"\+*phases=(none|\{\})", text):
            given = tuple(other.lstrip("+") for other in overrides)
            left = [name for name in plain["phases"] or {} if not any(o.startswith(f"phases.{name}.") for o in given)]
            if left:
                removed = " ".join(f"~phases.{name}" for name in left)
                yield f"{text} has no effect: phases has {', '.join(left)} from an experiment or a file; {removed}"


_FORK = re.compile(r"\+*fork=")
WEIGHTS = ".safetensors"


def fork_of(overrides: Sequence[str], base: Path) -> tuple[Path, int] | None:
    """Return the trunk's run directory and the step in `fork=RUN@STEP`, or None if there is no such override.

    `fork=SEARCH@best` means the newest checkpoint of the best run of a search.

    Args:
        overrides: the overrides of a command.
        base: the directory to resolve relative paths against.

    Raises:
        UserError: the value does not have this form, or the search has no such run.
    """
    texts = [text.partition("=")[2].strip("'\"") for text in overrides if _FORK.match(text)]
    if not texts or texts[-1] == "null":
        return None
    run, _, step = texts[-1].rpartition("@")
    if step == "best" and is_search(path := base / Path(run).expanduser()):
        found = best_run(path)
        if not (newest := found.newest_step()):
            raise UserError(f"fork={texts[-1]}: the best run of the search, {found.path}, has no checkpoint")
        return found.path, newest
    if not run or not re.fullmatch(r"\d{1,12}", step) or int(step) < 1:
        raise UserError(f"fork={texts[-1]} must be RUN@STEP, such as fork=outputs/NAME@700, with a step of 1 or more")
    return Path(run), int(step)


def drop_sources(plain: dict[str, Any], overrides: Sequence[str]) -> None:
    """Remove sources that are null or were deleted, in place, together with the settings that name them."""
    data, sampler = plain["data"], plain["sampler"]
    gone = [name for name, node in data["sources"].items() if node is None]
    deleted = (text.removeprefix("~data.sources.").partition("=")[0] for text in overrides if text[:1] == "~")
    gone += [name for name in deleted if name not in data["sources"]]
    weights = [phase["weights"] for phase in plain["phases"].values() if isinstance(phase, dict)]
    for node in (data["sources"], data["weights"], sampler["weights"], sampler["max_epochs"], *weights):
        for name in gone:
            if node is not sampler["weights"] or f"sampler.weights.{name}=" not in "".join(overrides):
                node.pop(name, None)
    data["eval_sources"] = {name: node for name, node in data["eval_sources"].items() if node is not None}


def _place(composed: Composed) -> object:
    """Return a key that is equal for jobs of the same run: the directory if the user set it, else root and identity."""
    run = composed.plain["run"]
    named = run["name"] is not None or not composed.run_dir.name.endswith(f"-{composed.digest}")
    return composed.run_dir if named else (run["root"], composed.digest)


def _same_run(twin: Composed, composed: Composed) -> str:
    """Return an error line for two jobs of a sweep that are the same run, including the remedy."""
    both = f"({' '.join(twin.overrides)}) and ({' '.join(composed.overrides)})"
    keys = [change.key for change in differences(twin.plain, composed.plain) if change.key not in OWN_KEYS]
    if twin.digest != composed.digest:
        return f"two jobs of the sweep are the same run {composed.run_dir}: {both}; do not set run.dir in a sweep"
    line = f"two jobs of the sweep are the same run {twin.run_dir}: {both}"
    if not keys:
        return f"{line} have the same settings: leave one of the two out"
    if set(keys) <= set(LENGTH_KEYS):
        return f"{line} differ only in length, and nothing depends on it: pass the longest alone, which has the others"
    return (
        f"{line} differ only in {', '.join(keys)}, which does not change what is trained: leave it out of the sweep, "
        "or give each job a name (run.name=...)"
    )


def identity_at(run_dir: Path, step: int | None) -> str:
    """Return the identity with which a run trained `step`, before any later edit. If None, return the newest one."""
    edits = provenance.edits(run_dir)
    for edit in edits if step is not None else ():
        if isinstance(edit.get("step"), int) and step <= edit["step"] and isinstance(edit.get("before"), str):
            return str(edit["before"])
    return identity(load_plain(run_dir))


def fill_in(plain: dict[str, Any], base: Path) -> None:
    """Fill in derived values, in place: absolute paths, resolved against `base`, and the source of a warm start."""
    plain["run"]["changed_by"] = changing_callbacks(plain)
    anchor(plain, base)
    name_source(plain)


def name_source(plain: dict[str, Any]) -> None:
    """Record the identity of the run that a warm start loads from, in place.

    The identity stays the same when that run is moved. If the source is a file, its path identifies it.

    Raises:
        UserError: the run does not exist.
    """
    node = plain["init_from"]
    if node["path"] is None:
        return
    if node["path"].endswith(WEIGHTS):  # read only when needed, so a run that has a checkpoint does not need this file
        node |= {"run": None, "at": None, "digest": None}
        return
    head, _, last = node["path"].rpartition("@")
    if last == "best" and is_search(Path(head)):
        node["path"] = str(best_run(Path(head)).path)
    path, at = Path(node["path"]), "last"
    if "@" in path.name and not files.is_dir(path):
        run, _, at = node["path"].rpartition("@")
        path = Path(run)  # accepts outputs/NAME/@700 too, because shells complete a directory with a slash
        if path.suffix == WEIGHTS:
            raise UserError(f"init_from={node['path']}: a {WEIGHTS} file has no steps: leave @{at} out")
        if not re.fullmatch(r"\d{1,12}|best|last", at):
            raise UserError(f"init_from={node['path']}: what follows @ must be a step, best or last")
    if not files.is_file(path / "config.yaml"):
        inside = path / f"model{WEIGHTS}"
        remedy = f"pass {inside}" if files.is_file(inside) else "pass a run directory, which has a config.yaml"
        if not files.exists(path):
            remedy += "; if it was removed, runner resume continues the runs that began with it"
        raise UserError(f"init_from={node['path']}: {path} is neither a run nor a {WEIGHTS} file: {remedy}")
    at = at.lstrip("0") or "0" if at.isdigit() else at
    digest = identity_at(path, int(at) if at.isdigit() else None)
    node |= {"path": None, "run": str(path), "at": at, "digest": digest}


def _not_for_branches(override: str) -> str | None:
    """Return an error line for an override that is not allowed for a branch, or None for any other override."""
    if re.match(r"[+~]*fork\b", override):
        return f"{override} is filled in for a branch: fork=RUN@STEP alone says what it is a branch of"
    if re.match(r"[+~]*init_from\b", override):
        return f"{override} has no effect on a branch, which begins with its trunk's weights: leave one of the two out"
    return None


def compose(
    overrides: Sequence[str], config_dirs: Sequence[str | Path] = (), config_name: str = CONFIG_NAME
) -> Composed:
    """Compose a single job from a command's overrides; see `Composer.compose`."""
    return Composer(config_dirs, config_name).compose(overrides)


def _by_identity(root: Path) -> dict[str, list[str]]:
    """Return the names in a directory that end with the identity of a run, grouped by identity."""
    found: dict[str, list[str]] = {}
    with suppress(OSError):
        for name in files.list_dir(root):
            if not name.startswith(".") and "-" in name:
                found.setdefault(name.rpartition("-")[2], []).append(name)
    return found


def _resolved(config: DictConfig, given: dict[str, Any] | None = None) -> dict[str, Any]:
    """Resolve the values of a config composed by Hydra, without Hydra's own node.

    Args:
        config: the config that Hydra composed.
        given: values by dotted key, used where a value is missing or cannot be resolved. For example, an interpolation
            may need an environment variable that an override has made unnecessary.

    Raises:
        UserError: values are missing, and `given` is None.
    """
    values = plain_values(_complete(_without_hydra(config), given))
    return over_schema({key: value for key, value in values.items() if key != "search"})


def _without_hydra(config: DictConfig) -> DictConfig:
    """Copy `config` without Hydra's own node, with its sources completed."""
    copied = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    complete_sources(copied)
    return copied


def _complete(config: DictConfig, given: dict[str, Any] | None = None) -> DictConfig:
    """Return `config`. If `given` is set, use it for missing values; see `_resolved`."""
    flat = flatten(plain_values(config, resolve=False))
    missing = sorted(key for key, value in flat.items() if value == "???")
    if given is None:
        refuse(f"{key} must be given: {key}=..." for key in missing)
    for key in missing:
        OmegaConf.update(config, key, (given or {}).get(key))
    if given is not None and not _resolves(config):
        for key in [key for key in flat if not _resolves(config, key)]:
            OmegaConf.update(config, key, given.get(key))
    return config


def _resolves(config: DictConfig, key: str = "") -> bool:
    """Return whether all values below the dotted `key` can be resolved."""
    try:
        value = OmegaConf.select(config, key)
        if OmegaConf.is_config(value):
            OmegaConf.to_container(value, resolve=True)
    except ERRORS:
        return False
    return True
