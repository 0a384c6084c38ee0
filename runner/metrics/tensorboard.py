"""TensorBoard events: one curve over all attempts of a run."""

from __future__ import annotations

from typing import Any

from runner.metrics.external import ExternalWriter
from runner.metrics.media import Media, size_of
from runner.system import clock, files


class TensorBoard(ExternalWriter):
    """Writes `tensorboard/` in the run directory, one event per record.

    A resumed attempt begins a new event file that names the step from which on earlier files are void, so TensorBoard
    shows each step once.
    """

    name = "tensorboard"
    module = "tensorboard"
    package = "tensorboard"
    _writer: Any

    def open(self) -> None:
        # tensorboard's own writer, with all numbers of a record in one event: a ninth of the time of torch's
        # SummaryWriter, which makes an event of each.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self.is_new = not files.exists(self.run.tensorboard)
        self._writer = EventFileWriter(str(self.run.tensorboard))
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(step=self.step + 1, wall_time=clock.wall(), session_log=start))

    def behind(self) -> bool:
        return self.is_new

    def log(self, step: int, values: dict[str, float]) -> None:
        entries = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._writer.add_event(self._event(step=step, wall_time=clock.wall(), summary=self._summary(value=entries)))

    def show(self, media: Media) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

        if isinstance(media.content, bytes):
            width, height = size_of(media.content)
            image = Summary.Image(width=width, height=height, encoded_image_string=media.content)
            entry = Summary.Value(tag=media.name, image=image)
        else:  # as torch's SummaryWriter.add_text has it
            shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
            indented = "".join(f"    {line}\n" for line in media.content.splitlines())  # Markdown, to be shown as it is
            entry = Summary.Value(
                tag=f"{media.name}/text_summary",
                metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
                tensor=TensorProto(dtype="DT_STRING", string_val=[indented.encode()], tensor_shape=shape),
            )
        summary = self._summary(value=[entry])
        self._writer.add_event(self._event(step=media.step, wall_time=clock.wall(), summary=summary))

    def sync(self) -> None:
        self._writer.flush()

    def end(self) -> None:
        self._writer.close()
