"""Assign parameters to optimizers and groups using name patterns, and freeze parameters.

Parameters have the same names as in a checkpoint (`runner.checkpoint.tensors.staging.plain_name`), regardless of
wrappers.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer

from runner.checkpoint.tensors.staging import bare, plain_name
from runner.config.optimizers import key_of, optimizer_nodes
from runner.errors import UserError, nearest

Parameters = dict[str, nn.Parameter]

_MAX_NAMED = 3


@dataclass(frozen=True)
class Group:
    """An entry of an optimizer's `groups`.

    Attributes:
        key: key of the group in the config.
        patterns: patterns of parameter names. A name that matches any of them belongs to the group.
        options: the optimizer's options for the group.
        freeze: True if the group's parameters are not trained.
    """

    key: str
    patterns: tuple[str, ...]
    options: dict[str, Any]
    freeze: bool

    @staticmethod
    def all_of(key: str, node: Mapping[str, Any]) -> list[Group]:
        """Return the groups of the optimizer at the config's `key`. They were checked when the config was loaded."""
        return [
            Group(
                f"{key}.groups.{number}",
                _patterns(group["match"]),
                {name: value for name, value in group.items() if name not in ("match", "freeze")},
                bool(group.get("freeze", False)),
            )
            for number, group in enumerate(node.get("groups") or [])
        ]


def named_parameters(model: nn.Module) -> Parameters:
    """Return all parameters of a model, including frozen ones, by plain name, in the order of the model."""
    return {plain_name(name): parameter for name, parameter in bare(model).named_parameters()}


def owned(several: Mapping[str, Mapping[str, Any]], parameters: Parameters) -> dict[str, Parameters]:
    """Return the parameters of each of several optimizers.

    Raises:
        UserError: a pattern matches no parameter, or a trainable parameter belongs to no optimizer or to more than one.
    """
    owner: dict[str, str] = {}
    for name, node in several.items():
        patterns = _patterns(node["match"]) if "match" in node else (str(name), f"{name}.*")
        matched = _matched(patterns, parameters)
        if "match" in node:
            _check_patterns(f"optimizers.{name}.match", patterns, parameters)
        elif not matched:
            raise UserError(
                f"optimizers.{name} has no match, and the model has no submodule called {name}: set "
                f"optimizers.{name}.match to a pattern of parameter names, such as {_examples(str(name), parameters)}"
            )
        twice = [each for each in matched if each in owner and parameters[each].requires_grad]
        if twice:
            raise UserError(
                f"optimizers.{name} and optimizers.{owner[twice[0]]} both have {_some(twice)}: "
                "let the match of one of them alone name each parameter"
            )
        owner.update(dict.fromkeys(matched, name))
    left = [name for name, parameter in parameters.items() if parameter.requires_grad and name not in owner]
    if left:
        raise UserError(
            f"no optimizer has {_some(left)}: add them to optimizers.NAME.match of one, and freeze them with its "
            "groups if they are not to be trained"
        )
    return {
        name: {each: parameter for each, parameter in parameters.items() if owner.get(each) == name} for name in several
    }


def freeze(model: nn.Module, optimizer: dict[str, Any], several: Mapping[str, Any]) -> None:
    """Freeze the parameters of groups that set `freeze`. Call this before wrapping the model.

    Raises:
        UserError: a pattern matches no parameter, or only parameters that belong to earlier groups.
    """
    parameters = named_parameters(model)
    parts = owned(several, parameters) if several else dict.fromkeys(optimizer_nodes(optimizer, several), parameters)
    for name, node in optimizer_nodes(optimizer, several).items():
        groups = Group.all_of(key_of(name, several), node)
        for group, members in zip(groups, assigned(groups, parts[name]), strict=True):
            if group.freeze:
                for member in members:
                    parameters[member].requires_grad_(False)


def assigned(groups: Sequence[Group], parameters: Collection[str]) -> list[list[str]]:
    """Return the parameter names of each group. A parameter belongs to the first group that matches it.

    Raises:
        UserError: a pattern matches no parameter, or only parameters that belong to earlier groups.
    """
    found: list[list[str]] = []
    taken: dict[str, Group] = {}
    for group in groups:
        _check_patterns(f"{group.key}.match", group.patterns, parameters)
        for pattern in group.patterns:
            matched = _matched((pattern,), parameters)
            if all(name in taken for name in matched):
                raise UserError(
                    f"{group.key}.match={pattern} has no effect: {taken[matched[0]].key} matches {_some(matched)} "
                    "already, and the first match wins; move it before that one"
                )
        own = [name for name in _matched(group.patterns, parameters) if name not in taken]
        taken.update(dict.fromkeys(own, group))
        found.append(own)
    return found


def param_groups(
    key: str, model: nn.Module, members: Parameters, groups: Sequence[Group], decay: float | None
) -> list[Any]:
    """Return an optimizer's parameter groups. The first one has the parameters that no configured group matches.

    Args:
        key: key of the optimizer in the config.
        model: the model.
        members: the optimizer's parameters.
        groups: the configured groups, in the order of the config.
        decay: weight decay that is applied only to matrices, unless a group sets a value. If None, all parameters are
            treated alike.

    Raises:
        UserError: a pattern has no effect, or no parameter is trained.
    """
    found = assigned(groups, members)
    grouped = {name for names in found for name in names}
    parts: list[tuple[dict[str, Any], list[str]]] = [({}, [name for name in members if name not in grouped])]
    parts += [(with_tuples(group.options), names) for group, names in zip(groups, found, strict=True)]
    for group, names in zip(groups, found, strict=True):
        if not group.freeze and not any(members[name].requires_grad for name in names):
            raise UserError(
                f"{group.key} has no effect: the model has frozen {_some(names)}; remove the group, or let the model "
                "train them"
            )
    made: list[dict[str, Any]] = []
    for options, names in parts:
        trained = [members[name] for name in names if members[name].requires_grad]
        if trained and decay is not None and "weight_decay" not in options:
            made += [{**options, **group} for group in decay_groups(model, decay, trained)]
        elif trained:
            made.append({**options, "params": trained})
    if not made:
        raise UserError(f"{key}: the model has no parameter for it that requires a gradient: nothing to train")
    only_parameters = len(made) == 1 and made[0].keys() == {"params"}
    return list(made[0]["params"]) if only_parameters else made


def decay_groups(
    model: nn.Module, weight_decay: float, among: Collection[nn.Parameter] | None = None
) -> list[dict[str, Any]]:
    """Return parameter groups with weight decay for matrices only, not for biases, norms and embeddings.

    Decay is meant for weights whose scale hardly affects the loss. Decaying norms and biases towards 0 changes the
    model's function. An embedding would decay in every step, but would be trained only in steps in which its token
    occurs.

    Args:
        model: the model. Only parameters that require a gradient are included. A tied embedding is treated as an
            embedding.
        weight_decay: weight decay for matrices, at least 0.
        among: include only these parameters. If None, all parameters are included.

    Raises:
        UserError: `weight_decay` is negative, or no parameter requires a gradient.
    """
    if not weight_decay >= 0:
        raise UserError(f"optimizer.weight_decay={weight_decay} must be 0 or more")
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    trained = [p for p in (model.parameters() if among is None else among) if p.requires_grad]
    if not trained:
        raise UserError(f"model {type(model).__name__} has no parameter that requires a gradient: nothing to train")
    matrices = [p for p in trained if p.ndim >= 2 and id(p) not in embeddings]
    others = [p for p in trained if p.ndim < 2 or id(p) in embeddings]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def check_options(groups: Sequence[Group], optimizer: Optimizer) -> None:
    """Check that `optimizer` has the options that its groups set, because optimizers ignore unknown options.

    Raises:
        UserError: a group has an unknown option. The message lists the known options.
    """
    known = list(optimizer.defaults)
    for group in groups:
        for name, value in group.options.items():
            if name not in known:
                raise UserError(
                    f"{group.key}.{name}={value}: {type(optimizer).__name__} has no such option"
                    f"{nearest(name, known)}; it has {', '.join(known)}"
                )


def with_tuples(options: dict[str, Any]) -> dict[str, Any]:
    """Return `options` with `betas` as a tuple of floats, because torch does not accept integer betas."""
    betas = options.get("betas")
    return {**options, "betas": tuple(float(beta) for beta in betas)} if isinstance(betas, list) else options


def _patterns(match: str | list[str]) -> tuple[str, ...]:
    return (match,) if isinstance(match, str) else tuple(match)


def _matched(patterns: Sequence[str], names: Collection[str]) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _check_patterns(key: str, patterns: Sequence[str], names: Collection[str]) -> None:
    for pattern in patterns:
        if not _matched((pattern,), names):
            raise UserError(f"{key}={pattern} matches no parameter; the nearest names are {_examples(pattern, names)}")


def _examples(pattern: str, names: Collection[str]) -> str:
    return ", ".join(difflib.get_close_matches(pattern.strip("*."), list(names), n=_MAX_NAMED, cutoff=0.0))


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
