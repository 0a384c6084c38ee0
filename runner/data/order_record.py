"""What the data order of a run is made from, as one small JSON file: `RunDir.order`.

A run writes it at the start of every attempt and with every checkpoint; `runner.inspect` reads it and
needs neither the data nor torch.

    {"version": 1, "kind": "elastic", "seed": 0, "sizes": {"code": 9000, "prose": 1200},
     "sequence_length": 128, "steps": 1000, "shuffle": true, "drop_last": true,
     "shapes": [{"step": 0, "world": 4, "batch_size": 8, "accum": 1}, {"step": 320, "world": 3, ...}],
     "segments": [{"start": 0, "weights": {...}, "temperature": 1.0, "max_epochs": {}}],
     "exclusions": [{"at": 800, "exclude": "positions:5000-5999"}], "retired": {}}

`sizes` are in the order of the dataset. `segments` start at positions for the elastic sampler and at
steps for the two seeded ones. A shape holds from its step on.

No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from runner.data.ledger_entries import Exclusion, Segment
from runner.data.order import ElasticOrder
from runner.data.shapes import Shape, extended, position_at
from runner.errors import UserError
from runner.files import read_json, write_json

VERSION = 1
KINDS = ("elastic", "mixture", "distributed")


class RecordError(UserError):
    """There is no readable record of a data order."""


@dataclass(frozen=True)
class OrderRecord:
    """See the module's docstring. `position` 0 is the first sample of step 1."""

    kind: str
    seed: int
    sizes: dict[str, int]
    steps: int
    shapes: tuple[Shape, ...]
    segments: tuple[Segment, ...]
    sequence_length: int = 1
    exclusions: tuple[Exclusion, ...] = ()
    retired: dict[str, int] = field(default_factory=dict)
    shuffle: bool = True
    drop_last: bool = True

    @classmethod
    def of_elastic(cls, state: Mapping[str, Any], sizes: Mapping[str, int], **shape: Any) -> OrderRecord:
        """From an ElasticSampler's `state_dict()`.

        Args:
            sizes: of the sources in the dataset, in its order.
            shape: the other fields: steps, shapes, sequence_length.
        """
        return cls(
            kind="elastic",
            seed=state["seed"],
            sizes=dict(sizes),
            segments=tuple(Segment.from_json(entry) for entry in state["segments"]),
            exclusions=tuple(Exclusion.from_json(entry) for entry in state["exclusions"]),
            retired={name: state["sizes"][name] for name in state["retired"]},
            shuffle=state["shuffle"],
            **shape,
        )

    @classmethod
    def read(cls, path: Path) -> OrderRecord:
        """Read the file that a run wrote.

        Raises:
            RecordError: there is none, or it is not one of these.
        """
        value = read_json(path)
        if value is None:
            raise RecordError(
                f"{path}: there is no record of a data order; is this the directory of a run that started?"
            )
        try:
            return cls.from_json(value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RecordError(f"{path}: not a record of a data order that this program knows ({error!r})") from error

    def write(self, path: Path) -> None:
        """Write it whole, in place of an older one."""
        write_json(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            **{key: getattr(self, key) for key in _PLAIN},
            "shapes": [asdict(shape) for shape in self.shapes],
            "segments": [segment.to_json() for segment in self.segments],
            "exclusions": [exclusion.to_json() for exclusion in self.exclusions],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> OrderRecord:
        if value["version"] != VERSION or value["kind"] not in KINDS or not value["shapes"] or not value["segments"]:
            raise ValueError(f"version {value['version']}, kind {value['kind']}")
        return cls(
            **{key: value[key] for key in _PLAIN},
            shapes=tuple(Shape(**shape) for shape in value["shapes"]),
            segments=tuple(Segment.from_json(entry) for entry in value["segments"]),
            exclusions=tuple(Exclusion.from_json(entry) for entry in value["exclusions"]),
        )

    def with_shape(self, shape: Shape) -> OrderRecord:
        """The record of an attempt that begins at `shape.step`: what came after that step is undone."""
        return replace(self, shapes=extended(self.shapes, shape))

    def shape_at(self, step: int) -> Shape:
        """The shape of the step that begins when `step` steps are complete."""
        return [shape for shape in self.shapes if shape.step <= max(step, self.shapes[0].step)][-1]

    def position_at(self, step: int) -> int:
        """Samples that all ranks have consumed when `step` steps are complete."""
        return position_at(self.shapes, step)

    def step_of(self, position: int) -> int:
        """The step (1-based, as in the metrics) in which a position is consumed."""
        shape = [one for one in self.shapes if self.position_at(one.step) <= position][-1]
        return shape.step + (position - self.position_at(shape.step)) // shape.global_batch + 1

    def elastic_order(self) -> ElasticOrder:
        """The order itself, for kind `elastic`."""
        return ElasticOrder(
            {**self.sizes, **self.retired},
            self.seed,
            self.segments,
            self.exclusions,
            absent=tuple(self.retired),
            shuffle=self.shuffle,
        )


_PLAIN = ("kind", "seed", "sizes", "sequence_length", "steps", "shuffle", "drop_last", "retired")
