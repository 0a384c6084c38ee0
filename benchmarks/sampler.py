"""Samplers: what the start of an epoch costs, what an index costs, and how peers compare. Ratios from one run.

python -m benchmarks.sampler              # up to 10^7 samples where a permutation has to be drawn
python -m benchmarks.sampler --large      # up to 10^8
PEERS=/path/to/site-packages python -m benchmarks.sampler    # with torchdata, mosaicml-streaming, grain
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tracemalloc
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from benchmarks.timing import seconds
from runner.data.elastic import ElasticSampler
from runner.data.sampler import DistributedSampler, MixtureSampler, permutation

RANKS = 8


class Sized:
    """A dataset of which only the length is asked."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


def medians(actions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each, taken in turns so that a busy machine slows all of them alike."""
    taken: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            taken[name].append(seconds(action))
    return {name: statistics.median(times) for name, times in taken.items()}


def peak(action: Callable[[], object]) -> int:
    """Bytes that numpy and Python held at most; torch allocates its own, which this does not see."""
    tracemalloc.start()
    kept = action()
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del kept
    return used


def start_of_epoch(n: int, repeats: int) -> None:
    """Until the first index of one of 8 ranks, against torch.randperm alone."""
    generator = torch.Generator()
    ours = DistributedSampler(Sized(n), RANKS, 3)
    mixed = MixtureSampler([0, n // 4, n // 2, n // 4 * 3, n], [1, 2, 3, 4], RANKS, 3)
    theirs: TorchSampler[Any] = TorchSampler(Sized(n), RANKS, 3)  # type: ignore[arg-type]
    took = medians(
        {
            "torch.randperm": lambda: torch.randperm(n, generator=generator),
            "DistributedSampler": lambda: next(iter(ours)),
            "MixtureSampler of 4": lambda: next(iter(mixed)),
            "torch DistributedSampler": lambda: next(iter(theirs)),
        },
        repeats,
    )
    bytes_each = {
        "DistributedSampler": peak(lambda: iter(ours)) / n,
        "MixtureSampler of 4": peak(lambda: iter(mixed)) / n,
    }
    for name, value in took.items():
        memory = f"{bytes_each[name]:6.1f} B/sample" if name in bytes_each else ""
        print(f"{n:>14,}  {name:<26}{value * 1e3:11.2f} ms {value / took['torch.randperm']:8.2f} x randperm {memory}")


def mixture_start(n: int, ranks: int, repeats: int) -> None:
    """Until the first index of the mixture sampler, against the permutations that its order is made of."""
    sampler = MixtureSampler([0, n // 4, n // 2, n // 4 * 3, n], [1, 2, 3, 4], ranks, ranks // 2)

    def permutations() -> None:
        generator = torch.Generator().manual_seed(0)
        for _ in range(4):
            permutation(n // 4, generator)
        permutation(sampler.num_samples, generator)

    taken = [(seconds(lambda: next(iter(sampler))), seconds(permutations)) for _ in range(repeats)]
    start, own = (statistics.median(column) * 1e3 for column in zip(*taken, strict=True))
    ratio = statistics.median(ours / theirs for ours, theirs in taken)
    print(f"{n:>14,}  {ranks:>6} {start:10.1f} ms {own:10.1f} ms {ratio:8.2f}")


def micro_batches(sources: int, batch_size: int, segments: int = 0, excluded: int = 0) -> None:
    """A batch of the elastic sampler as a loader draws it, one of 8 ranks."""
    sizes = {f"source{i}": 10**9 // sources for i in range(sources)}
    weights = [i % 7 + 1 for i in range(sources)]
    mine = ElasticSampler(
        sizes,
        weights,
        global_batch_size=batch_size * RANKS,
        num_replicas=RANKS,
        rank=3,
        segments=[(10_000 * at, {"source0": 1 + at % 3}) for at in range(1, segments + 1)],
        exclude=[f"source0:{1000 * at}-{1000 * at + 9}" for at in range(excluded)],
    )
    batches = mine.iter_batches(batch_size, True)
    next(batches)
    spell = 4096 * 8 // batch_size  # several blocks
    took = statistics.median(seconds(lambda: [next(batches) for _ in range(spell)]) / spell for _ in range(15))
    print(f"{sources:>18} {batch_size:>6} {segments:>10} {excluded:>10} {took * 1e6:10.2f} µs")


def elastic(n: int, sources: int) -> ElasticSampler:
    sizes = {f"source{i}": n // sources for i in range(sources)}
    return ElasticSampler(
        sizes, [i % 7 + 1 for i in range(sources)], global_batch_size=8 * RANKS, num_replicas=RANKS, rank=3
    )


def start_and_resume(n: int, sources: int) -> None:
    """Elastic: until the first batch, new and at 99 % of the samples."""
    state = elastic(n, sources).state_dict_at(n * 99 // 100 // RANKS)

    def resume() -> object:
        mine = elastic(n, sources)
        mine.load_state_dict(state)
        return next(mine.iter_batches(32, True))

    took = medians({"start": lambda: next(elastic(n, sources).iter_batches(32, True)), "resume": resume}, 31)
    print(
        f"{n:>18,} {sources:>6} {took['start'] * 1e3:9.2f} ms {took['resume'] * 1e3:9.2f} ms "
        f"{peak(lambda: elastic(n, sources)) / 1024:9.0f} KiB"
    )


def index_cost(sources: int) -> None:
    mine = elastic(10**9, sources)
    row = f"{sources:>18,} "
    for batch in (256, 1024, 8192):
        positions = mine.positions(123_456, batch)
        took = medians({"": lambda positions=positions: mine.indices_at(positions)}, 51)[""]  # type: ignore[misc]
        row += f"{took / batch * 1e9:10.0f} ns"
    print(row)


def peers(n: int) -> None:
    """Start, and one index of a long run of them, for whichever peer can be imported."""
    rows: list[tuple[str, float, float]] = []
    for measure in (_ours, _ours_of_four, _torch, _torchdata, _streaming, _grain):
        try:
            rows.append(measure(n))
        except ImportError as error:
            print(f"   ({error})")
    ours = rows[0]
    for name, start, index in rows:
        print(
            f"{n:>14,}  {name:<36}{start * 1e3:11.3f} ms {start / ours[1]:10.1f} x "
            f"{index * 1e9:10.0f} ns {index / ours[2]:8.1f} x"
        )


def _ours(n: int) -> tuple[str, float, float]:
    mine = elastic(n, 1)
    batches = mine.iter_batches(1024, True)
    start = medians({"": lambda: next(elastic(n, 1).iter_batches(1, True))}, 21)[""]
    return "ElasticSampler, batches of 1024", start, medians({"": lambda: next(batches)}, 51)[""] / 1024


def _ours_of_four(n: int) -> tuple[str, float, float]:
    mine = elastic(n, 4)
    batches = mine.iter_batches(1024, True)
    start = medians({"": lambda: next(elastic(n, 4).iter_batches(1, True))}, 21)[""]
    return "ElasticSampler of 4, batches of 1024", start, medians({"": lambda: next(batches)}, 51)[""] / 1024


def _drain(make: Callable[[], Any], n: int, name: str) -> tuple[str, float, float]:
    start = statistics.median(seconds(lambda: next(iter(make()))) for _ in range(3))
    stream, count = iter(make()), min(n // RANKS - 1, 100_000)
    next(stream)
    return name, start, seconds(lambda: [next(stream) for _ in range(count)]) / count


def _torch(n: int) -> tuple[str, float, float]:
    return _drain(lambda: TorchSampler(Sized(n), RANKS, 3), n, "torch DistributedSampler")  # type: ignore[arg-type]


def _torchdata(n: int) -> tuple[str, float, float]:
    StatefulDistributedSampler = import_module("torchdata.stateful_dataloader.sampler").StatefulDistributedSampler  # noqa: N806

    return _drain(lambda: StatefulDistributedSampler(Sized(n), RANKS, 3), n, "torchdata StatefulDistributedSampler")


def _streaming(n: int) -> tuple[str, float, float]:
    get_shuffle_py1e = import_module("streaming.base.shuffle.py1e").get_shuffle_py1e

    shards = np.full(max(1, n // 10_000), min(n, 10_000), np.int64)
    start = seconds(lambda: get_shuffle_py1e(shards, 1, 0, 0, 160_000))
    return "mosaicml-streaming py1e", start, 0.0


def _grain(n: int) -> tuple[str, float, float]:
    grain = import_module("grain")

    def make() -> Any:
        return grain.MapDataset.range(n).seed(0).shuffle()

    start = statistics.median(seconds(lambda: make()[0]) for _ in range(5))
    made = make()
    return "grain MapDataset.shuffle", start, seconds(lambda: [made[i] for i in range(20_000)]) / 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="10^8 samples too (5 GB for torch's sampler)")
    large = parser.parse_args().large
    if "PEERS" in os.environ:
        sys.path.append(os.environ["PEERS"])
    print("Start of an epoch, one of 8 ranks\n       samples  sampler")
    for n, repeats in ((10**6, 11), (10**7, 3), (10**8, 1))[: 3 if large else 2]:
        start_of_epoch(n, repeats)
    print("\nMixtureSampler of 4: start against its own permutations")
    print("       samples   ranks         start  permutations   ratio")
    for n, ranks in ((10**6, 1), (10**7, 1), (10**7, 8)):
        mixture_start(n, ranks, 7)
    print("\nElastic: a micro-batch\n           sources  batch   segments   excluded")
    for sources, batch_size in ((1, 16), (4, 16), (1, 32), (4, 32)):
        micro_batches(sources, batch_size)
    micro_batches(4, 16, segments=100)
    micro_batches(4, 16, excluded=100)
    print("\nElastic: start and resume\n           samples sources     start       resume       memory")
    for exponent in (5, 6, 7, 8, 9, 10, 11, 12):
        start_and_resume(10**exponent, 4)
    for sources in (1, 10, 100, 1000):
        start_and_resume(10**9, sources)
    print("\nElastic: one index, in batches of\n           sources         256          1024          8192")
    for sources in (1, 2, 4, 10, 100, 1000):
        index_cost(sources)
    print("\nPeers: start, and one index\n       samples  sampler")
    for n in (10**6, 10**7):
        peers(n)


if __name__ == "__main__":
    main()
