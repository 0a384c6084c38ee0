"""Check random histories of one run with the elastic sampler against a plain recount of the consumed samples.

    python tests/support/histories.py --minutes 60 --seed 1

A history trains, saves, is interrupted, and resumes: with other ranks, batches and loaders, other weights,
temperatures, segments, caps, sources and exclusions, or from an older state. `Recount` knows nothing of positions,
spans or keys below the interface: it counts through the streams of the sources one sample at a time.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from exactdata import ElasticSampler, StatefulDataLoader
from exactdata.order.ledger import DataLedger
from exactdata.order.weights import SamplerError

POOL = {"code": 23, "prose": 7, "tests": 41, "math": 3, "logs": 12}
WEIGHTS = (0.0, 0.2, 0.5, 1.0, 1.0, 3.0)
CAPS = (1, 2, 1.5, 0.5, 4.35, 2.25)
KINDS = ("sampler", "batches", "loader", "thread")
_LONGEST = 4000  # limit on the positions that a history consumes

Sample = tuple[str, int]


@dataclass
class Settings:
    """The data order that a configuration asks for, in the user's terms."""

    sizes: dict[str, int]
    weights: dict[str, float]
    temperature: float
    caps: dict[str, float]
    segments: list[tuple[int, dict[str, float], float]]
    exclude: list[str] = field(default_factory=list)

    def arguments(self) -> dict[str, Any]:
        return {
            "sizes": self.sizes,
            "weights": self.weights,
            "temperature": self.temperature,
            "max_epochs": self.caps,
            "segments": self.segments,
            "exclude": self.exclude,
        }

    def parts(self) -> list[tuple[int, Part]]:
        """Return the planned parts of the run, each with its first position."""
        base = Part(dict(self.weights), self.temperature, dict(self.caps))
        planned = [
            (start, Part({**self.weights, **weights}, temperature, dict(self.caps)))
            for start, weights, temperature in sorted(self.segments, key=lambda segment: segment[0])
        ]
        return [(0, base), *planned]


@dataclass(frozen=True)
class Part:
    """The settings of a part of the run."""

    weights: dict[str, float]
    temperature: float
    caps: dict[str, float]

    def shares(self, names: list[str]) -> dict[str, float]:
        raw = {name: self.weights[name] ** (1 / self.temperature) for name in names}
        return {name: value / sum(raw.values()) for name, value in raw.items()}


def part_at(parts: list[tuple[int, Part]], position: int) -> Part:
    return max((part for part in parts if part[0] <= position), key=lambda part: part[0])[1]


@dataclass
class Left:
    """Samples that one change excludes: by index in a source, or by key for positions."""

    text: str
    planned: bool  # in the configuration, which may withdraw the exclusion. Otherwise excluded by a call
    samples: dict[str, set[int]] = field(default_factory=dict)
    keys: dict[str, set[int]] = field(default_factory=dict)


class Streams:
    """The streams of the sources as plain lists, drawn from samplers with a single source."""

    def __init__(self, seed: int, shuffle: bool) -> None:
        self._seed, self._shuffle = seed, shuffle
        self._known: dict[str, list[int]] = {}

    def sample(self, name: str, key: int) -> int:
        known = self._known.setdefault(name, [])
        while len(known) <= key:
            size = POOL[name]
            alone = ElasticSampler(
                {name: size}, [1], global_batch_size=1, num_replicas=1, seed=self._seed, shuffle=self._shuffle
            )
            epoch = alone.indices_at(np.arange(len(known), len(known) + size)).tolist()
            assert sorted(epoch) == list(range(size)), f"an epoch of {name} is not a permutation: {epoch}"
            known += epoch
        return known[key]

    def key(self, name: str, index: int, epoch: int) -> int:
        size = POOL[name]
        self.sample(name, (epoch + 1) * size - 1)
        return self._known[name].index(index, epoch * size)


class Recount:
    """Counts what each source must yield next, one sample at a time."""

    def __init__(self, settings: Settings, streams: Streams) -> None:
        self.settings, self.streams = settings, streams
        self.position = 0
        self.next: dict[str, int] = dict.fromkeys(POOL, 0)  # the next key, excluded or not
        self.left_out: list[Left] = []
        self._gone: dict[str, tuple[set[int], set[int]]] = {}  # excluded samples and keys by source, from `left_out`
        self.parts = settings.parts()
        self.consumed: list[Sample] = []
        self._shares: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def copy(self) -> Recount:
        """Return an independent copy. It shares the streams, which never change."""
        return copy.deepcopy(self, {id(self.streams): self.streams})

    def next_key(self, name: str) -> int:
        key = self.next[name]
        if name not in self._gone:
            samples = set().union(*(left.samples.get(name, ()) for left in self.left_out))
            keys = set().union(*(left.keys.get(name, ()) for left in self.left_out))
            self._gone[name] = samples, keys
        samples, keys = self._gone[name]
        while key in keys or self.streams.sample(name, key) in samples:
            key += 1
        return key

    def sources(self) -> list[str]:
        """Return the sources that can be drawn now: with a weight, and with a sample left below the cap."""
        part = part_at(self.parts, self.position)
        drawn = []
        for name, weight in sorted(part.weights.items()):
            cap = part.caps.get(name)
            last = math.inf if cap is None else math.floor(Fraction(str(cap)) * POOL[name])
            if weight > 0 and self.next_key(name) < last:
                drawn.append(name)
        return drawn

    def consume(self, sample: Sample) -> None:
        """Count one sample, which must be the next one of its source."""
        name, index = sample
        names = self.sources()
        assert name in names, f"position {self.position}: {name}:{index}, but only {names} are to be drawn"
        shares = part_at(self.parts, self.position).shares(names)
        if shares != self._shares:
            self._shares, self._counts = shares, dict.fromkeys(shares, 0)
        key = self.next_key(name)
        expected = self.streams.sample(name, key)
        assert index == expected, f"position {self.position}: {name}:{index} instead of {name}:{expected} (key {key})"
        self.next[name] = key + 1
        self._counts[name] += 1
        total = sum(self._counts.values())
        for one, share in shares.items():
            off = abs(self._counts[one] - share * total)
            bound = 1.5 * (len(shares) - 1).bit_length() + 1e-6
            assert off <= bound, f"position {self.position}: {one} is {off} samples off its share {share}"
        self.consumed.append(sample)
        self.position += 1

    def exclude(self, texts: list[str], before: ElasticSampler, planned: bool = True) -> None:
        """Exclude samples from here on, or those at positions in the order `before` the change."""
        made: list[Left] = []
        for text in texts:
            name, _, bounds = text.rpartition(":")
            first, _, last = bounds.partition("-")
            wanted = range(int(first), int(last or first) + 1)
            left = Left(text, planned)
            if name not in ("", "positions"):
                left.samples[name] = set(wanted)
            else:
                end = before.order.total or math.inf
                ahead = np.array([position for position in wanted if self.position <= position < end], np.int64)
                for source, index, epoch in zip(*(part.tolist() for part in before.locate(ahead)), strict=True):
                    left.keys.setdefault(source, set()).add(self.streams.key(source, index, epoch))
            self.left_out.append(left)
            made.append(left)
        self._fill(made)
        self._gone.clear()

    def _fill(self, made: list[Left]) -> None:
        """Add the keys between excluded keys, which stay excluded: in a range, and where two ranges touch."""
        end: float = -math.inf
        firsts: dict[str, int] = {}  # by source, of the ranges that touch so far
        for left in sorted((left for left in made if left.keys), key=lambda left: _bounds(left.text)[1:]):
            _, first, last = _bounds(left.text)
            if first > end + 1:
                firsts = {}
            for name, keys in left.keys.items():
                firsts[name] = min(keys | {firsts[name]} if name in firsts else keys)
                keys |= set(range(firsts[name], max(keys) + 1))
            end = max(end, last)

    def withdraw(self, text: str) -> None:
        self.left_out = [left for left in self.left_out if left.text != text or not left.planned]
        self._gone.clear()

    def change_weights(self, weights: dict[str, float], temperature: float) -> None:
        part = part_at(self.parts, self.position)
        changed = replace(part, weights={**self.settings.weights, **weights}, temperature=temperature)
        if changed != part:
            self.parts = [one for one in self.parts if one[0] != self.position] + [(self.position, changed)]

    def resume(self, settings: Settings) -> None:
        """Continue under other settings, from here on. Drop what was planned and is not planned any more."""
        before, now = part_at(self.settings.parts(), self.position), part_at(settings.parts(), self.position)
        if settings.parts() != self.settings.parts():
            if before == now:
                self.parts = [one for one in self.parts if one[0] <= self.position]
            else:
                self.parts = [one for one in self.parts if one[0] < self.position] + [(self.position, now)]
            self.parts += [one for one in settings.parts() if one[0] > self.position]
        self.settings = settings


class Indices(Dataset[Any]):
    """A dataset that batches its samples, which are their indices."""

    collated = True
    prefetch = "thread"

    def __init__(self, sizes: dict[str, int]) -> None:
        self.size = sum(sizes.values())

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: Any) -> np.ndarray:
        return np.asarray(indices)


class Attempt:
    """One attempt at the run, with all of its ranks in this process."""

    def __init__(self, story: History, kind: str, world: int, batch: int, saved: Any) -> None:
        settings = story.recount.settings
        names = list(settings.sizes)
        self.kind, self.world, self.batch = kind, world, batch
        self._bounds = np.cumsum([settings.sizes[name] for name in names])
        self._names = names
        self.samplers = [story.sampler(settings, world, rank) for rank in range(world)]
        self.ledgers = [DataLedger(names, [settings.sizes[name] for name in names]) for _ in range(world)]
        self.loaders: list[StatefulDataLoader[Any]] = []
        if "load" in kind or "thread" in kind:
            workers = 2 if kind == "thread" else 0
            data = Indices(settings.sizes)
            self.loaders = [
                StatefulDataLoader(data, batch_size=batch, sampler=one, num_workers=workers) for one in self.samplers
            ]
        if saved is not None:
            self._restore(saved)
        self._streams = [self._iterate(rank) for rank in range(world)]
        self.ended = False

    def _restore(self, saved: dict[str, Any]) -> None:
        for rank, sampler in enumerate(self.samplers):
            if self.loaders and "ranks" in saved["data"]:
                loader = self.loaders[rank]
                loader.load_state_dict(loader.deaggregate_state_dict(saved["data"], rank, self.world))
            else:
                state = saved["data"]
                sampler.load_state_dict(state["ranks"][0]["sampler"] if "ranks" in state else state)
        for ledger in self.ledgers:
            ledger.load_state_dict(saved["ledger"])
        self.ledgers[0].verify(self.samplers[0].locate)

    def _iterate(self, rank: int) -> Iterator[list[int]]:
        if self.loaders:
            return (np.asarray(batch).tolist() for batch in iter(self.loaders[rank]))
        if self.kind == "batches":
            return (batch.tolist() for batch in self.samplers[rank].iter_batches(self.batch, drop_last=False))
        return self._one_by_one(iter(self.samplers[rank]))

    def _one_by_one(self, stream: Iterator[int]) -> Iterator[list[int]]:
        while batch := [index for _, index in zip(range(self.batch), stream, strict=False)]:
            yield batch

    def micro_batch(self, position: int) -> list[Sample]:
        """Return the next micro-batches of all ranks, in the order of the positions."""
        parts = [next(stream, []) for stream in self._streams]
        assert len({len(part) for part in parts}) == 1, f"the ranks get {[len(part) for part in parts]} samples"
        self.ended = self.ended or len(parts[0]) < self.batch
        for rank, (part, ledger) in enumerate(zip(parts, self.ledgers, strict=True)):
            ledger.consume(np.array(part, np.int64), position + rank + self.world * np.arange(len(part)))
        total = np.stack([ledger.local() for ledger in self.ledgers]).sum(axis=0, dtype=np.uint64)
        for ledger in self.ledgers:
            ledger.commit(total)
        return [self.name(index) for together in zip(*parts, strict=True) for index in together]

    def name(self, index: int) -> Sample:
        source = int(np.searchsorted(self._bounds, index, side="right"))
        return self._names[source], index - int(self._bounds[source - 1] if source else 0)

    def save(self) -> dict[str, Any]:
        """Return the states as JSON restores them."""
        data: Any
        if self.loaders:
            data = self.loaders[0].aggregate_state_dict([loader.state_dict() for loader in self.loaders])
        else:
            states = [sampler.state_dict() for sampler in self.samplers]
            assert all(state == states[0] for state in states), "the ranks have different states"
            data = states[0]
        saved: dict[str, Any] = json.loads(json.dumps({"data": data, "ledger": self.ledgers[0].state_dict()}))
        return saved


class History:
    """One random history.

    Args:
        seed: determines everything.

    Attributes:
        story: events, one line each.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.story: list[str] = []
        self.order_seed, self.shuffle = self.random.randrange(5), self.random.random() < 0.8
        self.recount = Recount(self._settings(), Streams(self.order_seed, self.shuffle))
        self.saved: list[tuple[Any, Recount]] = []
        self.attempt = self._begin(None)

    def sampler(self, settings: Settings, world: int = 1, rank: int = 0) -> ElasticSampler:
        return ElasticSampler(
            **settings.arguments(),
            global_batch_size=world,
            num_replicas=world,
            rank=rank,
            seed=self.order_seed,
            shuffle=self.shuffle,
            allow_data_change=True,
        )

    def run(self, actions: int) -> None:
        """Take random actions and check every sample.

        Raises:
            AssertionError: a sample was lost, repeated, or at a wrong position.
        """
        for _ in range(actions):
            if len(self.recount.consumed) > _LONGEST:
                break
            choices = [self._train] * 3 + [self._change_weights, self._exclude, self._save, self._resume, self._resume]
            if self.attempt.ended:
                choices = [self._load_older]
            self.random.choice(choices)()
        self._check_whole()

    def _say(self, line: str) -> None:
        self.story.append(f"at {self.recount.position}: {line}")

    def _settings(self) -> Settings:
        chosen = self.random.sample(sorted(POOL), self.random.randint(1, len(POOL)))
        settings = Settings({name: POOL[name] for name in chosen}, self._weights(chosen), 1.0, {}, [])
        if self.random.random() < 0.4:
            settings.caps = {name: self.random.choice(CAPS) for name in chosen if self.random.random() < 0.7}
        if self.random.random() < 0.3:
            settings.exclude = self._texts(settings, 0, [])
        return self._possible(settings) or replace(settings, caps={}, exclude=[])

    def _possible(self, settings: Settings, state: Any = None) -> Settings | None:
        """Return the settings, or None if a resume from `state` could never draw anything."""
        try:
            sampler = self.sampler(settings)
            if state is not None:
                sampler.load_state_dict(state["ranks"][0]["sampler"] if "ranks" in state else state)
        except SamplerError as error:
            if "the order is empty" in str(error):
                return None
            raise
        return settings

    def _weights(self, names: list[str]) -> dict[str, float]:
        weights = {name: self.random.choice(WEIGHTS) for name in names}
        weights[self.random.choice(names)] = 1.0
        return weights

    def _texts(self, settings: Settings, position: int, others: list[Left]) -> list[str]:
        """Return a few exclusions that leave every source something."""
        texts = []
        taken = {name: set().union(*(left.samples.get(name, ()) for left in others)) for name in POOL}
        for _ in range(self.random.randint(1, 3)):
            if self.random.random() < 0.5:
                first = position + self.random.randrange(60)
                texts.append(f"positions:{first}-{first + self.random.randrange(25)}")
                continue
            name = self.random.choice(sorted(settings.sizes))
            first = self.random.randrange(POOL[name])
            last = min(POOL[name] - 1, first + self.random.randrange(4))
            wanted = taken[name] | set(range(first, last + 1))
            if len(wanted) < POOL[name]:
                taken[name] = wanted
                texts.append(f"{name}:{first}" if first == last else f"{name}:{first}-{last}")
        return texts

    def _begin(self, saved: Any) -> Attempt:
        kind, world, batch = self.random.choice(KINDS), self.random.randint(1, 5), self.random.choice([1, 2, 3, 8, 20])
        attempt = Attempt(self, kind, world, batch, saved)
        if saved is None:
            self.recount.exclude(
                self.recount.settings.exclude, self.sampler(replace(self.recount.settings, exclude=[]))
            )
        self._say(f"{kind}, {world} ranks, batch {batch}, {self.recount.settings}")
        return attempt

    def _train(self) -> None:
        batches = self.random.randint(1, 8)
        self._say(f"train {batches} batches")
        for _ in range(batches):
            recount, attempt = self.recount, self.attempt
            samples = attempt.micro_batch(recount.position)
            for sample in samples:
                recount.consume(sample)
            if attempt.ended:
                self._check_end()
                return

    def _check_end(self) -> None:
        """Check that fewer samples are left than there are ranks."""
        self._say("the order has ended")
        rest, attempt = self.recount.copy(), self.attempt
        left = 0
        while left < attempt.world and (names := rest.sources()):
            rest.next[names[0]] = rest.next_key(names[0]) + 1
            rest.position += 1
            left += 1
        assert left < attempt.world, f"the attempt ended, but {left} samples are left for {attempt.world} ranks"

    def _change_weights(self) -> None:
        weights, temperature = self._weights(list(self.recount.settings.sizes)), self.random.choice([1.0, 0.5, 3.0])
        self._say(f"weights {weights}, temperature {temperature}")
        for sampler in self.attempt.samplers:
            sampler.update_weights(weights, temperature)
        self.recount.change_weights(weights, temperature)

    def _exclude(self) -> None:
        texts = self._texts(self.recount.settings, self.recount.position, self.recount.left_out)
        self._say(f"exclude {texts}")
        before = self.sampler(self.recount.settings)
        state = self.attempt.save()["data"]
        before.load_state_dict(state["ranks"][0]["sampler"] if "ranks" in state else state)
        try:
            for sampler in self.attempt.samplers:
                sampler.exclude(texts)
        except SamplerError as error:
            if "the order is empty" not in str(error):
                raise
            self._say("refused: nothing would be left")
            return
        self.recount.exclude(texts, before, planned=False)

    def _save(self) -> None:
        self._say("save twice")
        saved = self.attempt.save()
        assert self.attempt.save() == saved, "two saves at one place differ"
        self.saved.append((saved, self.recount.copy()))

    def _resume(self) -> None:
        self._say("save and resume")
        self._continue(self.attempt.save())

    def _load_older(self) -> None:
        if not self.saved:
            self.recount = Recount(self.recount.settings, self.recount.streams)
            self._say("start again")
            self.attempt = self._begin(None)
            return
        saved, recount = self.random.choice(self.saved)
        self.recount = recount.copy()
        self._say("load an older state")
        self._continue(saved)

    def _continue(self, saved: Any) -> None:
        before = self.sampler(self.recount.settings)
        state = saved["data"]
        before.load_state_dict(state["ranks"][0]["sampler"] if "ranks" in state else state)
        old = self.recount.settings
        settings = copy.deepcopy(old)
        position = self.recount.position
        for change in self.random.sample([self._reweigh, self._recap, self._replan, self._resource], 2):
            if self.random.random() < 0.4:
                change(settings, position)
        added: list[str] = []
        removed = [text for text in old.exclude if self._is_free(text) and self.random.random() < 0.1]
        removed += [text for text in old.exclude if text.split(":")[0] not in ("positions", *settings.sizes)]
        settings.exclude = [text for text in old.exclude if text not in removed]
        if self.random.random() < 0.3:
            added = [text for text in self._texts(settings, position, self.recount.left_out) if self._is_new(text)]
            settings.exclude = [*settings.exclude, *added]
        if self._possible(settings, state) is None:
            settings, added, removed = old, [], []
        items = list(settings.sizes.items())
        self.random.shuffle(items)
        settings = replace(settings, sizes=dict(items))
        for text in set(removed):
            self.recount.withdraw(text)
        self.recount.exclude(added, before)
        self.recount.resume(settings)
        self.attempt = self._begin(saved)

    def _is_free(self, text: str) -> bool:
        """Return whether no other exclusion has one of the same samples or positions, or a neighbor."""
        return self._is_new(text, but=text)

    def _is_new(self, text: str, but: str = "") -> bool:
        name, first, last = _bounds(text)
        others = [_bounds(left.text) for left in self.recount.left_out if left.text != but]
        same = [left for left in self.recount.left_out if left.text == but]
        return len(same) <= 1 and not any(
            name == other and first <= high + 1 and low <= last + 1 for other, low, high in others
        )

    def _reweigh(self, settings: Settings, position: int) -> None:
        settings.weights = self._weights(list(settings.sizes))
        settings.temperature = self.random.choice([1.0, 1.0, 2.0])

    def _recap(self, settings: Settings, position: int) -> None:
        chosen = [name for name in settings.sizes if self.random.random() < 0.5]
        settings.caps = {name: self.random.choice(CAPS) * self.random.choice([1, 3]) for name in chosen}

    def _replan(self, settings: Settings, position: int) -> None:
        starts = self.random.sample(range(position + 1, position + 200), self.random.randint(0, 2))
        kept = [segment for segment in settings.segments if segment[0] <= position]
        settings.segments = kept + [(start, self._weights(list(settings.sizes)), 1.0) for start in starts]

    def _resource(self, settings: Settings, position: int) -> None:
        """Remove, add or restore a source."""
        names = list(settings.sizes)
        others = [name for name in POOL if name not in names]
        if len(names) > 1 and (not others or self.random.random() < 0.5):
            names.remove(self.random.choice(names))
        elif others:
            names.append(self.random.choice(others))
        settings.sizes = {name: POOL[name] for name in names}
        settings.weights = self._weights(names)
        settings.caps = {name: cap for name, cap in settings.caps.items() if name in names}
        settings.segments = []

    def _check_whole(self) -> None:
        """Check that the digest equals that of one rank that consumed the same samples."""
        names = list(POOL)
        offsets = dict(zip(names, np.cumsum([0, *POOL.values()]).tolist(), strict=False))
        whole = DataLedger(names, list(POOL.values()))
        indices = np.array([offsets[name] + index for name, index in self.recount.consumed], np.int64)
        whole.consume(indices, np.arange(len(indices)))
        whole.commit(whole.local())
        assert whole.digest == self.attempt.ledgers[0].digest, "the digest differs from that of one rank"
        places = np.arange(len(self.recount.consumed))
        located = self.attempt.samplers[0].locate(places)
        found = list(zip(located[0].tolist(), located[1].tolist(), strict=True))
        assert found == self.recount.consumed, "the order does not give what was consumed"
        assert np.array_equal(self.attempt.samplers[0].find(*located), places), "find does not invert locate"


def _bounds(text: str) -> tuple[str, int, int]:
    name, _, bounds = text.rpartition(":")
    first, _, last = bounds.partition("-")
    return name, int(first), int(last or first)


def check_history(seed: int, actions: int = 14) -> int:
    """Run one history. Return the number of samples that its final run has consumed.

    Raises:
        AssertionError: with the story of the history.
    """
    history = None
    try:
        history = History(seed)
        history.run(actions)
    except BaseException as error:
        story = "\n  ".join(history.story if history else ["it did not begin"])
        error.add_note(f"history {seed}:\n  {story}")
        raise
    return len(history.recount.consumed)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    end, done, samples, seed, said = time.monotonic() + 60 * options.minutes, 0, 0, options.seed, 0.0
    while time.monotonic() < end:
        samples += check_history(seed, actions=8 + seed % 30)
        seed, done = seed + 1, done + 1
        if time.monotonic() > said + 30:
            said = time.monotonic()
            print(f"{done} histories, {samples} samples, {(end - said) / 60:.0f} minutes left", flush=True)
    print(f"{done} histories from seed {options.seed}, {samples} samples: no failure", flush=True)


if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
