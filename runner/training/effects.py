"""Find settings of a config that have no effect, and jobs that would give the same results.

Both are reported before a run starts. A sweep over a setting without effect would train the same run several times.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from exactdata.order.weights import shares
from runner.config.identity import as_text, identifying_values, length_readers
from runner.config.schedule import WARMUP_STEPS, Decay, PhaseState, unreached_phases
from runner.config.schema import CheckpointConfig, Config, WeightsBy, phase_schedule, rank_invariant

ADD_HELD_OUT = "add held-out data as data.eval_sources.NAME"
UNITS = {WeightsBy.sizes: "samples", WeightsBy.tokens: "tokens"}


def without_effect(config: Config) -> list[str]:
    """Return a line with a remedy for each setting of a checked config that has no effect.

    The shares of `sampler.weights_by=sizes` are unknown before the data are opened, so nothing is reported about them.
    """
    return [*mixing_without_effect(config), *_schedule(config), *_others(config)]


def mixing_without_effect(config: Config) -> list[str]:
    """Return the lines of `without_effect` that concern weights and temperatures."""
    if config.data.loader:
        return list(_beside_a_loader(config))
    if config.sampler.kind.value.is_own:
        return []  # a user's class may use any setting
    return [*_weights(config), *_temperatures(config)]


def _beside_a_loader(config: Config) -> Iterator[str]:
    options = config.sampler
    given = {key: getattr(options, key) for key in ("weights", "exclude", "max_epochs") if getattr(options, key)}
    if options.temperature != 1:
        given["temperature"] = options.temperature
    for key, value in given.items():
        yield f"sampler.{key}={as_text(value)} has no effect: data.loader makes its own batches; remove one of them"


def _weights(config: Config) -> Iterator[str]:
    options, sources, by = config.sampler, list(config.data.sources), config.sampler.weights_by
    if options.kind.value.elastic and not options.drop_last:
        yield "sampler.drop_last=false has no effect with sampler=elastic, which leaves no sample out"
    if len(sources) == 1:
        alone = f"{sources[0]} is the only source in data.sources"
        given = {"sampler.weights": options.weights}
        given |= {f"phases.{name}.weights": phase.weights for name, phase in config.phases.items()}
        for key, weights in given.items():
            if weights:
                yield f"{key}={as_text(weights)} has no effect: {alone}"
        if by is not None:
            yield f"sampler.weights_by={by.value} has no effect: {alone}"
    elif by in (WeightsBy.equal, WeightsBy.sizes) and all(name in options.weights for name in sources):
        yield f"sampler.weights_by={by.value} has no effect: sampler.weights names every source; remove one of them"
    elif by in UNITS and any(options.weights.values()) and not all(name in options.weights for name in sources):
        name = next(name for name, weight in options.weights.items() if weight)
        yield (
            f"sampler.weights.{name}={options.weights[name]:g} stands beside the {UNITS[by]} of the other sources "
            f"(sampler.weights_by={by.value}): give it a weight of that size, or leave it out"
        )


def _temperatures(config: Config) -> Iterator[str]:
    """Yield a line for each temperature that leaves the shares unchanged."""
    if not config.sampler.kind.value.mixes:
        return
    schedule, sources = phase_schedule(config), list(config.data.sources)
    base = [schedule.at(0)] if all(phase.start_step for phase in config.phases.values()) else []
    states = {"sampler.temperature": base}
    for name, phase in config.phases.items():
        key = "sampler.temperature" if phase.temperature is None else f"phases.{name}.temperature"
        states.setdefault(key, []).append(schedule.at(phase.start_step))
    for key, several in states.items():
        tempered = [state for state in several if state.temperature != 1]
        if tempered and not any(_is_tempered(state) for state in tempered):
            drawn = [name for name in sources if any(state.weights[name] for state in tempered)]
            why = f"{drawn[0]} is the only source" if len(drawn) == 1 else "the sources have equal weights"
            yield f"{key}={tempered[0].temperature:g} has no effect: {why}; set different weights (sampler.weights)"


def _is_tempered(state: PhaseState) -> bool:
    """Check whether a temperature changes the shares, or may change them once the data are opened."""
    weights = [weight for weight in state.weights.values() if weight]
    return len(set(weights)) > 1 or (len(weights) > 1 and isinstance(weights[0], WeightsBy))


def _schedule(config: Config) -> Iterator[str]:
    options, steps = config.scheduler, config.known_steps
    if steps is not None:
        yield from unreached_phases(config.phases, steps)
    if options.target is not None:
        return
    if options.decay is Decay.constant:
        for name in ("total_steps", "decay_steps"):
            if getattr(options, name) is not None:
                yield f"scheduler.{name}={getattr(options, name)} has no effect with scheduler=constant: remove it"
        warmup = WARMUP_STEPS if options.warmup_steps is None else options.warmup_steps
        if steps is not None and steps < warmup:
            yield (
                f"the warmup of {warmup} steps is longer than the run of {steps}, which ends below the learning rate "
                "of the optimizer: set scheduler.warmup_steps=0, or raise train.steps"
            )
    elif options.decay is not Decay.wsd and options.decay_steps is not None:
        yield f"scheduler.decay_steps={options.decay_steps} has no effect with {options.decay.value}: it is for wsd"


def _others(config: Config) -> Iterator[str]:
    data, checkpoint, usual = config.data, config.checkpoint, CheckpointConfig()
    if data.prefetch_factor is not None and not data.num_workers:
        yield f"data.prefetch_factor={data.prefetch_factor} has no effect without workers: set data.num_workers"
    for name in ("min_interval_s", "max_interval_s"):
        value = getattr(checkpoint, name)
        if value != getattr(usual, name) and not checkpoint.adaptive:
            yield f"checkpoint.{name}={value:g} has no effect without checkpoint.adaptive=true"
    every: dict[str, float | None] = {"eval.every_steps": config.eval.every_steps}
    every |= {f"eval.sets.{name}.every_steps": each.every_steps for name, each in config.eval.sets.items()}
    steps = config.known_steps
    for key, interval in [*every.items(), ("eval.every_epochs", config.eval.every_epochs)]:
        if interval and not data.eval_sources:
            yield f"{key}={interval:g} has no effect: there is nothing to evaluate on; {ADD_HELD_OUT}"
        elif key in every and interval is not None and steps and interval > steps and not config.eval.at_end:
            yield f"{key}={interval:g} has no effect: the run ends after {steps} steps"
    first = min((interval for interval in (config.evaluation_interval, *every.values()) if interval), default=0)
    if config.early_stopping.is_set and steps and first > steps and config.eval.every_epochs is None:
        yield f"early_stopping has no effect: the run ends after {steps} steps, and the first evaluation is at {first}"
    if config.eval.at_start and not data.eval_sources:
        yield f"eval.at_start=true has no effect: there is nothing to evaluate on; {ADD_HELD_OUT}"
    for name in ("metrics", "sets"):
        if getattr(config.eval, name) and not data.eval_sources:
            yield f"eval.{name} has no effect: there is nothing to evaluate on; {ADD_HELD_OUT}"


def effective_digest(config: Config, plain: dict[str, Any]) -> str:
    """Return a digest that is equal only for configs that must give bit-identical results on one machine.

    Such configs have the same identity, or differ only in settings without effect or in the spelling of a value.
    Configs with different digests may still give the same results.
    """
    flat = identifying_values(plain)
    # Objects that use these values get them through interpolation, so the objects' options contain them.
    for key in ("data.sequence_length", "data.vocab_size"):
        flat.pop(key, None)
    if plain["optimizers"]:
        flat = {key: value for key, value in flat.items() if not key.startswith("optimizer.")}
    if not config.data.loader and not config.sampler.kind.value.is_own:
        mixing = ("sampler.weights", "sampler.temperature", "data.weights", "phases.")
        flat = {key: value for key, value in flat.items() if not key.startswith(mixing)}
        flat["phases"] = _mixtures(config)
    if config.scheduler.target is None:
        flat["scheduler.warmup_steps"] = _warmup(config)
        if config.scheduler.decay is Decay.constant:
            for name in ("total_steps", "decay_steps", "min_ratio"):
                flat.pop(f"scheduler.{name}", None)
    if "train.grad_accum_steps" in flat:
        flat["train.grad_accum_steps"] = config.train.grad_accum_steps or 1
    flat["train.rank_invariant"] = rank_invariant(config)
    flat["length"] = [config.known_steps, config.train.epochs] if not length_readers(plain) else None
    flat["sources in order"] = list(plain["data"]["sources"])
    return hashlib.sha256(json.dumps(flat, sort_keys=True, default=str).encode()).hexdigest()


def _warmup(config: Config) -> int | None:
    options = config.scheduler
    total = options.total_steps or config.known_steps
    if options.warmup_steps is not None or options.decay is Decay.constant or total is None:
        return WARMUP_STEPS if options.warmup_steps is None else options.warmup_steps
    return min(WARMUP_STEPS, total - 1)


def _mixtures(config: Config) -> list[Any]:
    """Return [step, shares, learning-rate factor] for each step at which the shares or the factor change."""
    schedule, single = phase_schedule(config), len(config.data.sources) == 1
    last = config.known_steps
    starts = {0, *(phase.start_step for phase in config.phases.values())}
    found: list[Any] = []
    for step in sorted(start for start in starts if last is None or start < last):
        state = schedule.at(step)
        weights: Any = list(state.weights.values())
        if not config.sampler.kind.value.mixes or single:
            mixed: Any = None
        elif any(isinstance(weight, WeightsBy) for weight in weights):
            mixed = [[str(weight) for weight in weights], state.temperature]
        else:
            mixed = shares(weights, state.temperature)
            if config.sampler.weights_by is WeightsBy.tokens:  # token shares differ from sample shares
                mixed = [mixed, "tokens"]
        if not found or found[-1][1:] != [mixed, state.lr_scale]:
            found.append([step, mixed, state.lr_scale])
    return found


def same_results(jobs: Sequence[tuple[str, Config, dict[str, Any]]]) -> list[str]:
    """Return a line for each job that must give the same results as an earlier job.

    Args:
        jobs: the label, the config, and the config as plain values of each job.
    """
    first: dict[str, tuple[str, dict[str, Any]]] = {}
    lines = []
    for name, config, plain in jobs:
        twin, values = first.setdefault(effective_digest(config, plain), (name, plain))
        if values is plain:
            continue
        old, new = identifying_values(values), identifying_values(plain)
        keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
        why = "they have the same settings"
        if keys:
            why = f"they differ only in {', '.join(keys)}, which {'has' if len(keys) == 1 else 'have'} no effect here"
        lines.append(f"({twin}) and ({name}) will give identical results: {why}")
    return lines
