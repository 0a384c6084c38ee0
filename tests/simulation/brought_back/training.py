"""Faults of attempts: in their checkpoints, their records, their generators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runner.checkpoint import manager, saver
from runner.checkpoint.files import choice, directory
from runner.checkpoint.files import manifest as manifests
from runner.checkpoint.files.choice import Candidate, Retention
from runner.checkpoint.files.commit import NewFiles, Transaction
from runner.checkpoint.files.store import Fence, Writer
from runner.checkpoint.tensors import copying, state
from runner.metrics import jsonl
from runner.rundir.lease import Lease
from runner.system import files
from runner.training.records.recorder import RunRecorder
from simulation.brought_back.fault import Fault


def _no_directory_sync(patch: pytest.MonkeyPatch) -> None:
    def commit(self: Transaction, manifest: bytes, new: Writer | None = None) -> None:
        with new or NewFiles(self.path) as unsynced:
            unsynced.write(manifests.NAME, lambda file: file.write(manifest))
            unsynced.sync()
        files.fsync_dir(self.path)
        self._fence.check()
        files.rename(self.path, self.final)

    patch.setattr(Transaction, "commit", commit)


def _rename_first(patch: pytest.MonkeyPatch) -> None:
    def commit(self: Transaction, manifest: bytes, new: Writer | None = None) -> None:
        with new or NewFiles(self.path) as unsynced:
            unsynced.write(manifests.NAME, lambda file: file.write(manifest))
            self._fence.check()
            files.rename(self.path, self.final)
            files.fsync_dir(self.final.parent)
            unsynced.sync()
        files.fsync_dir(self.final)

    patch.setattr(Transaction, "commit", commit)


def _no_fence_at_commit(patch: pytest.MonkeyPatch) -> None:
    init = Transaction.__init__

    def unfenced(self: Transaction, final: Any, fence: Fence, *others: Any) -> None:
        init(self, final, Fence(fence.number), *others)

    patch.setattr(Transaction, "__init__", unfenced)


def _no_fence_at_deletion(patch: pytest.MonkeyPatch) -> None:
    take = directory._take
    patch.setattr(directory, "_take", lambda path, name, fence: take(path, name, Fence(fence.number)))


def _no_drain(patch: pytest.MonkeyPatch) -> None:
    def before_save(self: RunRecorder) -> bool:
        try:
            self.metrics.sync()
        except OSError:
            return False
        return True

    patch.setattr(RunRecorder, "before_save", before_save)


def _no_sync_of_records(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(jsonl.JsonlWriter, "sync", lambda self: self._recover())


def _refused_sync_tried_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(jsonl.JsonlWriter, "_recover", lambda self: setattr(self, "_failed", False))


def _records_not_cut(patch: pytest.MonkeyPatch) -> None:
    cut = jsonl._cut
    patch.setattr(jsonl, "_cut", lambda fd, step, evaluated: (files.size_of(fd), cut(fd, step, evaluated)[1]))


def _appends_to_what_another_has_open(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(jsonl, "nobody_appends", lambda run: True)


def _corrupt_ones_count(patch: pytest.MonkeyPatch) -> None:
    to_delete = Retention.to_delete

    def counting(self: Retention, found: Any, pinned: Any = ()) -> list[Candidate]:
        there = sorted(found, key=lambda each: each.step)
        damaged = sum(each.manifest is None for each in there[-self.keep_last :])
        return to_delete(replace(self, keep_last=max(1, self.keep_last - damaged)), there, pinned)

    patch.setattr(Retention, "to_delete", counting)


def _success_too_early(patch: pytest.MonkeyPatch) -> None:
    save = manager.TrainStateManager.save

    def early(self: Any, *arguments: Any, **options: Any) -> bool:
        return save(self, *arguments, **{**options, "wait": False})

    patch.setattr(manager.TrainStateManager, "save", early)


def _update_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    def finish_copy(self: manager.TrainStateManager) -> None:
        pending, self._copying = self._copying, None
        if pending is not None:
            self._saver.observe(pending)  # finds out what may be copied later, but nothing waits for that

    patch.setattr(manager.TrainStateManager, "finish_copy", finish_copy)
    patch.setattr(copying, "_version", lambda tensor: 0)


def _generators_not_restored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state, "set_rng_state", lambda saved: None)


def _tensors_not_verified(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(manager, "tensor_files", lambda manifest, world: [])


def _nothing_swept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(saver.Saver, "sweep", lambda self: None)


def _never_superseded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "check_fence", lambda self: None)


def _evaluated_twice(patch: pytest.MonkeyPatch) -> None:
    cut = jsonl._cut
    patch.setattr(jsonl, "_cut", lambda fd, step, evaluated: cut(fd, step, True))


def _corruption_is_the_end(patch: pytest.MonkeyPatch) -> None:
    choose = choice.candidates
    patch.setattr(choice, "candidates", lambda store: choose(store)[:1])


FAULTS = [
    Fault(name, "training", what, told_in, apply)
    for name, what, told_in, apply in (
        (
            "commit-without-directory-sync",
            "a commit does not sync the directory of checkpoints after the rename",
            "tests/checkpoint/test_checkpoint_crash.py",
            _no_directory_sync,
        ),
        (
            "rename-before-sync",
            "a checkpoint has its name before its files are durable",
            "tests/checkpoint/test_checkpoint_crash.py",
            _rename_first,
        ),
        (
            "commit-without-fence",
            "a save looks at the lease when it begins, and not before its rename",
            "tests/checkpoint/test_checkpoint_manager.py",
            _no_fence_at_commit,
        ),
        (
            "deletion-without-fence",
            "a checkpoint is deleted or set aside without a look at the lease",
            "runner/checkpoint/files/directory.py",
            _no_fence_at_deletion,
        ),
        (
            "save-without-drain",
            "records that a full disk has refused are not written before the next checkpoint",
            "runner/training/records/recorder.py",
            _no_drain,
        ),
        (
            "save-without-sync-of-records",
            "the records up to a checkpoint's step are not durable when it is committed",
            "`JsonlWriter`",
            _no_sync_of_records,
        ),
        (
            "refused-sync-again",
            "records that an fsync has refused count as durable once a second one succeeds",
            "`JsonlWriter`",
            _refused_sync_tried_again,
        ),
        (
            "records-not-cut",
            "a resume keeps the records behind the step of its checkpoint",
            "tests/metrics/test_metrics.py",
            _records_not_cut,
        ),
        (
            "one-file-two-writers",
            "a resume truncates records that an older process may still append to",
            "runner/rundir/appender.py",
            _appends_to_what_another_has_open,
        ),
        (
            "retention-counts-corrupt",
            "checkpoints with a damaged manifest count among the last that are kept",
            "`Retention`",
            _corrupt_ones_count,
        ),
        (
            "success-too-early",
            "the last save counts as made while it is still being written",
            "`TrainStateManager.save`",
            _success_too_early,
        ),
        (
            "update-before-copy",
            "an update changes weights that are still to be copied",
            "tests/checkpoint/test_copying.py",
            _update_before_the_copy,
        ),
        (
            "generators-not-restored",
            "a resume begins with other random numbers",
            "tests/checkpoint/test_checkpoint_state.py",
            _generators_not_restored,
        ),
        (
            "tensors-not-verified",
            "a resume does not compare the tensors with their checksum",
            "tests/checkpoint/test_checkpoint_corruption.py",
            _tensors_not_verified,
        ),
        (
            "nothing-swept",
            "what a killed save left behind stays",
            "tests/checkpoint/test_checkpoint_names.py",
            _nothing_swept,
        ),
        (
            "never-superseded",
            "an attempt never finds that a newer one holds the lease",
            "`Lease.check_fence`",
            _never_superseded,
        ),
        (
            "evaluated-twice",
            "a resume keeps the record of an evaluation that it makes again",
            "`resume_records`",
            _evaluated_twice,
        ),
        (
            "corrupt-newest-is-the-end",
            "a corrupt newest checkpoint is not followed by the one before",
            "`select`",
            _corruption_is_the_end,
        ),
    )
]
