"""Write TensorBoard events: one curve over all attempts of a run."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from runner.metrics.external import ExternalWriter
from runner.metrics.media import Media, size_of
from runner.system import clock, files, processes


class TensorBoard(ExternalWriter):
    """A writer of events, one per record, to `tensorboard/` in the run directory.

    A resumed attempt begins a new event file, which names the step from which earlier files are invalid. TensorBoard
    therefore shows each step once.

    Example:
        >>> from pathlib import Path
        >>> from runner.metrics.tensorboard import TensorBoard
        >>> from runner.rundir.paths import RunDir
        >>> run = RunDir(Path("outputs/base"))
        >>> run.path.mkdir(parents=True, exist_ok=True)
        >>> writer = TensorBoard(run)
        >>> for step in (1, 2, 3):
        ...     writer.write({"step": step, "loss": 1.0 / step})
        >>> writer.close()
        >>> len(list(run.tensorboard.iterdir()))
        1
    """

    name = "tensorboard"
    module = "tensorboard"
    package = "tensorboard"

    def open(self) -> None:
        # One event holds all numbers of a record. This takes a ninth of the time of torch's SummaryWriter, which writes
        # one event per number. tensorboard's EventFileWriter is not used: it recreates a run directory that was moved,
        # delays its writes, and prints a traceback from its thread when the disk is full.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._last = Event, Summary, self.step
        self.is_new = not files.exists(self.run.tensorboard)
        self.run.make_dirs(self.run.tensorboard)
        name = f"events.out.tfevents.{clock.wall():020.9f}.{processes.tag()}"  # TensorBoard reads them in this order
        self._file, self._framing = files.open_append(self.run.tensorboard / name), RecordWriter
        self._add(file_version="brain.Event:2")
        self._add(step=self.step + 1, session_log=SessionLog(status=SessionLog.START))

    def _add(self, **event: Any) -> None:
        """Append an event to the file at once, so that nothing is pending when this process loses the lease."""
        framed = BytesIO()
        self._framing(framed).write(self._event(wall_time=clock.wall(), **event).SerializeToString())
        try:
            files.write_all(self._file.fileno(), framed.getvalue())
        except OSError:
            self._file.close()
            raise

    def behind(self) -> bool:
        return self.is_new

    def log(self, step: int, values: dict[str, float]) -> None:
        self._last = step
        entries = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._add(step=step, summary=self._summary(value=entries))

    def show(self, media: Media) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

        if isinstance(media.content, bytes):
            width, height = size_of(media.content)
            image = Summary.Image(width=width, height=height, encoded_image_string=media.content)
            entry = Summary.Value(tag=media.name, image=image)
        else:  # same layout as torch's SummaryWriter.add_text
            shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
            # Indented, so that TensorBoard shows it verbatim instead of as Markdown.
            indented = "".join(f"    {line}\n" for line in media.content.splitlines())
            entry = Summary.Value(
                tag=f"{media.name}/text_summary",
                metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
                tensor=TensorProto(dtype="DT_STRING", string_val=[indented.encode()], tensor_shape=shape),
            )
        self._add(step=media.step, summary=self._summary(value=[entry]))

    def sync(self) -> None:
        """Do nothing: each event is written at once."""

    def end(self) -> None:
        if self.reason:
            self.show(Media(self._last, "ended early", self.run.tensorboard, self.reason))
        self._file.close()
