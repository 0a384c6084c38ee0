"""Record the inputs of a run's data order. These few values suffice to answer any question about the order.

The record in JSON:

    {"version": 1, "kind": "elastic", "seed": 0, "sizes": {"code": 9000, "prose": 1200},
     "tokens_per_sample": {"code": 128, "prose": 128}, "steps": 1000, "shuffle": true, "drop_last": true,
     "batch_shapes": [{"step": 0, "world_size": 4, "batch_size": 8, "grad_accum_steps": 1},
                      {"step": 320, "world_size": 3, ...}],
     "segments": [{"start": 0, "weights": {...}, "temperature": 1.0, "max_epochs": {}}],
     "exclusions": [{"at": 0, "what": "code:10-19", "keys": {}, "until": null, "planned": true}],
     "retired": {}, "packed": {"prose": "/data/prepared/…/plans/…"}}

`sizes` are in the order of the dataset. `segments` start at positions for the elastic sampler, and at steps for the two
seeded samplers. `packed` is present only if a source has packed documents. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from exactdata.elastic import opened_state
from exactdata.errors import UserError
from exactdata.order.batch_shape import BatchShape, position_at
from exactdata.order.exclusions import Exclusion, Exclusions
from exactdata.order.segments import Segment, segments_from_json
from exactdata.order.sequence import ElasticSequence
from exactdata.order.state_checks import LARGEST, Kind, ListOf, MapOf, Record, check, text, whole
from exactdata.samplers import Kind as KindOfSampler
from exactdata.samplers import SamplerKind

VERSION = 1

_AS_IN_JSON = ("kind", "seed", "sizes", "tokens_per_sample", "steps", "shuffle", "drop_last", "retired")
_COUNTS = Record(  # with other values, computing an order would fail or never end
    {
        "steps": whole(),
        "sizes": MapOf(whole()),
        "retired": MapOf(whole()),
        "tokens_per_sample": MapOf(
            Kind("a number from 0 to 2^62", lambda value: type(value) in (int, float) and 0 <= value <= LARGEST)
        ),
        "batch_shapes": ListOf(
            Record(
                {"step": whole(), "world_size": whole(1), "batch_size": whole(1)},
                {"grad_accum_steps": whole(1), "micro_batches": whole()},
            )
        ),
    },
    {"packed": MapOf(text)},
)


class RecordError(UserError):
    """There is no readable record of a data order, or it cannot answer a question."""


@dataclass(frozen=True)
class OrderRecord:
    """The inputs of a run's data order. Position 0 is the first sample of step 1.

    Attributes:
        kind: elastic, mixture, distributed or own.
        seed: seed of the sampler.
        sizes: number of samples by source name, in the order of the dataset.
        steps: length of the run in steps.
        batch_shapes: at least one batch shape. Each applies from its step on.
        segments: at least one segment. Its `start` is a position (elastic) or a step (seeded samplers).
        tokens_per_sample: tokens per sample by source name, if the dataset provides them. If samples differ, the mean.
        packed: by source name, the directory of the pack plan of its documents.
        exclusions: excluded samples, elastic only.
        retired: sizes of sources that were removed during the run, elastic only.
        shuffle: whether the sampler shuffles.
        drop_last: as for the sampler, seeded samplers only.
        make: called with (num_replicas, rank), returns the sampler. Only for kind `own`. It is not stored in the file,
            so that reading a run directory does not execute any code named there.
    """

    kind: str
    seed: int
    sizes: dict[str, int]
    steps: int
    batch_shapes: tuple[BatchShape, ...]
    segments: Sequence[Segment]
    tokens_per_sample: Mapping[str, float] = field(default_factory=dict)
    exclusions: Exclusions = ()
    retired: dict[str, int] = field(default_factory=dict)
    shuffle: bool = True
    drop_last: bool = True
    packed: Mapping[str, str] = field(default_factory=dict)
    make: Callable[[int, int], Any] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", tuple(sorted(self.segments, key=lambda one: one.start)))

    @classmethod
    def of_elastic(cls, state: Mapping[str, Any], sizes: Mapping[str, int], **others: Any) -> OrderRecord:
        """Create the record of an ElasticSampler.

        Args:
            state: the sampler's `state_dict()`.
            sizes: number of samples by source name, in the order of the dataset.
            others: the attributes steps, batch_shapes, tokens_per_sample and packed.
        """
        state = opened_state(state)
        return cls(
            kind="elastic",
            seed=state["seed"],
            sizes=dict(sizes),
            segments=state["segments"],
            exclusions=state["exclusions"],
            retired={name: state["sizes"][name] for name in state["retired"]},
            shuffle=state["shuffle"],
            **others,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            **{key: getattr(self, key) for key in _AS_IN_JSON},
            "batch_shapes": [asdict(shape) for shape in self.batch_shapes],
            "segments": [one.to_json() for one in self.segments],
            "exclusions": [one.to_json() for one in self.exclusions],
            **({"packed": self.packed} if self.packed else {}),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> OrderRecord:
        if value["version"] != VERSION or value["kind"] not in SamplerKind.__members__:
            raise ValueError(f"version {value['version']}, kind {value['kind']}")
        if not value["batch_shapes"] or not value["segments"]:
            raise ValueError("batch_shapes or segments are empty")
        check(value, _COUNTS, "{key} is {value}; expected {allowed}", ValueError)
        return cls(
            **{key: value[key] for key in _AS_IN_JSON},
            batch_shapes=tuple(BatchShape(**shape) for shape in value["batch_shapes"]),
            segments=segments_from_json(value["segments"]),
            exclusions=tuple(map(Exclusion.from_json, value["exclusions"])),
            packed=value.get("packed", {}),
        )

    @property
    def sampler(self) -> KindOfSampler:
        """Return the properties of the record's kind of sampler."""
        kind: KindOfSampler = SamplerKind[self.kind].value
        return kind

    def sampler_of(self, num_replicas: int, rank: int) -> Any:
        """Create the sampler of a rank, only for kind `own`.

        Raises:
            RecordError: the record has no sampler, or the sampler's order cannot be looked up.
        """
        sampler = self.make(num_replicas, rank) if self.make is not None else None
        lacking = [name for name in ("set_epoch", "set_skip", "iter_batches", "__len__") if not hasattr(sampler, name)]
        if lacking or hasattr(sampler, "state_dict_at"):
            raise RecordError(
                "the order of this run is that of the user's sampler, whose state cannot be looked up: an order that "
                "depends on set_epoch(epoch) alone, without a state_dict, can be"
            )
        return sampler

    def shape_at(self, step: int) -> BatchShape:
        """Return the batch shape of the step that begins when `step` steps are complete."""
        return [shape for shape in self.batch_shapes if shape.step <= max(step, self.batch_shapes[0].step)][-1]

    def position_at(self, step: int) -> int:
        """Return the number of samples that all ranks have consumed when `step` steps are complete."""
        return position_at(self.batch_shapes, step)

    def step_of(self, position: int) -> int:
        """Return the step (counted from 1, as in the metrics) in which the sample at a position is consumed."""
        shape = [one for one in self.batch_shapes if self.position_at(one.step) <= position][-1]
        return shape.step + (position - self.position_at(shape.step)) // shape.global_batch_size + 1

    def elastic_sequence(self) -> ElasticSequence:
        """Return the order, only for kind `elastic`."""
        return ElasticSequence(
            {**self.sizes, **self.retired},
            self.seed,
            self.segments,
            self.exclusions,
            absent=tuple(self.retired),
            shuffle=self.shuffle,
        )
