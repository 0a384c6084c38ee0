"""Prepare documents with one process per core, and share the work with other processes and machines.

Each process claims parts that no other has claimed. The processes may be ranks of one job, separate runs, or tasks of a
Slurm array. A killed process loses only the part that it was preparing, and a rerun resumes with that part.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from exactdata import interrupts
from exactdata.documents import worker
from exactdata.documents.claims import POLL_S, Watch, once, pause, remove_left, write
from exactdata.documents.prepared import Index, Spec, Store, read_json
from exactdata.errors import DataError
from exactdata.interrupts import StoppedError
from exactdata.paths import usable_cache
from exactdata.ranks import current_ranks

LONG_POLL_S = 1.0
LINE_S = 30.0
"""Seconds between two progress lines if the output is not a terminal."""
PERCENTILES = (0, 10, 50, 90, 99, 100)


def prepare(spec: Spec, cache_dir: Path, workers: int | None = None) -> Index:
    """Prepare documents, or wait for other processes to prepare them. Return immediately if they are complete.

    Args:
        spec: the documents to prepare.
        cache_dir: directory in which the result is stored, in a subdirectory named after its key.
        workers: number of worker processes. If 0, this process does all the work. If None, the number of cores divided
            by the number of local ranks.

    Raises:
        DataError: a file is missing, has changed or cannot be read at all, no document can be used, or the cache cannot
            be written.
        StoppedError: this process was asked to stop.
    """
    store = store_of(spec, cache_dir)
    with usable_cache(store.directory, "documents"):
        if not store.is_complete:
            for folder in (store.parts, store.plans, store.claims):
                folder.mkdir(parents=True, exist_ok=True)
            # Write the spec at every start, because an existing file may be incomplete.
            write(store.spec_path, json.dumps(spec.to_json()).encode())
            _Preparation(store, workers).run()
            remove_left(store.parts)
            remove_left(store.directory, ".spec.json-*")
            once(store.index, store.claims, partial(_write_index, store))
        return Index(store)


def store_of(spec: Spec, cache_dir: Path) -> Store:
    """Return the store in which the documents of `spec` are prepared."""
    return Store(cache_dir / f"documents-{spec.key}")


@dataclass
class _Preparation:
    """One process's view of the preparation of all parts."""

    store: Store
    workers: int | None
    documents: int = 0
    tokens: int = 0
    errors: list[Any] = field(default_factory=list)

    def run(self) -> None:
        """Prepare parts, or wait, until all parts are complete."""
        watch, progress = Watch(self.store.claims), _Progress(self)
        if self.workers == 0:
            watch.remove_dead()
            worker.work(self.store, self._told_here)
        with ExitStack() as stack:
            running: list[subprocess.Popen[bytes]] = []
            while pending := self._pending():
                watch.remove_dead()
                claims = set(os.listdir(self.store.claims))
                free = [number for number in pending if self.store.part(number).name not in claims]
                running = [process for process in running if self._is_alive(process)]
                for _ in range(min(len(free), self._most() - len(running))):
                    running.append(stack.enter_context(self._started()))
                progress.show(pending)
                pause(min(LONG_POLL_S, progress.seconds / 20 + POLL_S))
            for process in running:
                process.wait()
        progress.end()

    def _pending(self) -> list[int]:
        complete = set(os.listdir(self.store.parts))
        return [number for number in range(len(self.store.spec.parts)) if self.store.part(number).name not in complete]

    def _most(self) -> int:
        if self.workers is not None:
            return max(1, self.workers)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return max(1, len(os.sched_getaffinity(0)) // ranks)

    @contextmanager
    def _started(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start a worker process that ends when this process ends."""
        process = subprocess.Popen(
            [sys.executable, "-m", worker.__name__, str(self.store.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        thread = threading.Thread(target=self._listen, args=(process.stdout,), daemon=True)
        thread.start()
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            thread.join()
            process.stdout.close()
            if process.stdin is not None:
                process.stdin.close()

    def _listen(self, lines: IO[bytes]) -> None:
        for line in lines:
            self._told(json.loads(line))

    def _told(self, record: dict[str, Any]) -> None:
        if "documents" in record:
            self.documents += record["documents"]
            self.tokens += record["tokens"]
        else:
            self.errors.append(record)

    def _told_here(self, record: dict[str, Any]) -> None:
        self._told(record)
        if interrupts.requested():
            raise StoppedError("the preparation of documents was asked to stop; it continues at the next start")

    def _is_alive(self, process: subprocess.Popen[bytes]) -> bool:
        """Return whether a worker is running.

        Raises:
            DataError: the worker has ended with an error.
            OSError: a file system operation failed in the worker.
        """
        code = process.poll()
        if code:
            if interrupts.requested():
                raise StoppedError("the preparation of documents was asked to stop; it continues at the next start")
            time.sleep(0.1)  # wait until its last line has been read
            for error in self.errors:
                if "error" in error:
                    raise DataError(error["error"])
                raise OSError(*error["oserror"])
            raise DataError(
                f"a process that prepares {self.store.directory} ended with status {code}"
                f"{' (killed: perhaps memory was short; fewer processes need less)' if code < 0 else ''}: start again; "
                "what is prepared already is kept"
            )
        return code is None


class _Progress:
    """Print the progress of a preparation repeatedly, on the first rank only."""

    def __init__(self, of: _Preparation) -> None:
        self.of, self.spec = of, of.store.spec
        self.began = self.printed = time.monotonic()
        self.terminal = sys.stderr.isatty()
        self.silent = current_ranks()[0] != 0
        self.before: int | None = None
        self.shown = False

    @property
    def seconds(self) -> float:
        """Return the seconds since the preparation began."""
        return time.monotonic() - self.began

    def show(self, pending: list[int]) -> None:
        """Print a progress line if one is due."""
        left = sum(self.spec.bytes[number] for number in pending)
        total = max(1, sum(self.spec.bytes))
        now = time.monotonic()
        if self.before is None:
            self.before = total - left
        due = now - self.printed >= (0.5 if self.terminal else LINE_S) or (not self.shown and total > 1 << 20)
        if self.silent or not due:
            return
        done, seconds = total - left - self.before, self.seconds
        time_left = f", {seconds * left / done:,.0f} s left" if done > 0 else ""
        busy = "" if self.of.documents or seconds < 1 else "; another process is at it"
        self._print(
            f"preparing documents of {_shortened(self.spec.files)}: {100 * (total - left) / total:.0f} % of "
            f"{total / 1e6:,.1f} MB, {self.of.documents:,} documents, {self.of.tokens:,} tokens{time_left}{busy}"
        )
        self.printed, self.shown = now, True

    def end(self) -> None:
        """Print a summary of the documents that this process prepared."""
        if self.of.documents and not self.silent:
            self._print(
                f"prepared {self.of.documents:,} documents ({self.of.tokens:,} tokens) of "
                f"{_shortened(self.spec.files)} in {self.seconds:,.1f} s"
            )
            if self.terminal:
                print(file=sys.stderr)

    def _print(self, line: str) -> None:
        if self.terminal:
            print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def _shortened(files: list[str]) -> str:
    return Path(files[0]).name if len(files) == 1 else f"{len(files):,} files"


def _write_index(store: Store, folder: Path) -> None:
    """Merge the indices of all parts.

    Raises:
        DataError: the parts contain no document, or no chat has a message to train on.
    """
    spec = store.spec
    parts = [read_json(store.part(number) / "part.json") for number in range(len(spec.parts))]
    counts = [sum(documents for documents, _ in part["slices"]) for part in parts]
    total, dropped = sum(counts), Counter[str]()
    for part in parts:
        dropped.update(part["dropped"])
    if not total:
        raise DataError(_nothing(store, dropped))
    untrained = sum(part["untrained"] for part in parts)
    if untrained == total:
        raise DataError(
            f"{_shortened(spec.files)}: none of the {total:,} chats has a turn of {' or '.join(spec.train_on)}: set "
            "train_on to the roles of the messages to train on"
        )
    slices, starts = _slices(spec, parts)
    np.save(folder / "slices.npy", slices)
    arrays = {name: _array(folder / f"{name}.npy", kind, total) for name, kind in _PER_DOCUMENT}
    offsets = _array(folder / "offsets.npy", np.int64, total + 1)
    part_starts, first = [0], 0
    for number, count in enumerate(counts):
        lengths = np.load(store.part(number) / "lengths.npy")
        np.cumsum(lengths, out=offsets[first + 1 : first + count + 1])
        offsets[first + 1 : first + count + 1] += part_starts[-1]
        part_starts.append(int(offsets[first + count]))
        for name, array in arrays.items():
            array[first : first + count] = np.load(store.part(number) / f"{name}.npy")
        first += count
    _log_dropped(store, starts, folder)
    report = {**_report(spec, offsets, dropped, arrays["held"]), "untrained_documents": untrained}
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    content = xxhash.xxh3_128("".join(part["digest"] for part in parts).encode()).hexdigest()
    meta = {
        "part_starts": part_starts,
        "dtype": spec.tokenizer.dtype.str,
        "vocab_size": spec.tokenizer.vocab_size,
        "has_mask": spec.chat,
        "content": content,
    }
    (folder / "meta.json").write_text(json.dumps(meta))


def _array(path: Path, kind: Any, size: int) -> Any:
    made = np.lib.format.open_memmap(path, "w+", kind, (size,))
    with open(path, "rb+") as file:  # a full disk raises an error here, but kills a process that writes to a memory map
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return made


_PER_DOCUMENT = (("lines", np.uint32), ("held", np.bool_))


def _slices(spec: Spec, parts: list[Any]) -> tuple[Any, list[list[int]]]:
    """Return the rows of `slices.npy`, and the number of preceding lines in the file for each slice of each part."""
    rows, first = [], 0
    starts: list[list[int]] = []
    lines: Counter[int] = Counter()
    for slices, part in zip(spec.parts, parts, strict=True):
        starts.append([])
        for (file, _, _), (documents, read) in zip(slices, part["slices"], strict=True):
            rows.append((first, file, lines[file]))
            starts[-1].append(lines[file])
            first += documents
            lines[file] += read
    return np.array(rows, np.int64).reshape(-1, 3), starts


def _log_dropped(store: Store, starts: list[list[int]], folder: Path) -> None:
    """Write the list of dropped documents, with file names and line numbers."""
    spec = store.spec
    with open(folder / "dropped.jsonl", "w") as log:
        for number, slices in enumerate(spec.parts):
            with open(store.part(number) / "dropped.jsonl", "rb") as lines:
                for line in lines:
                    record = json.loads(line)
                    at = record.pop("slice")
                    record["line"] += starts[number][at]
                    log.write(json.dumps({"file": spec.files[slices[at][0]], **record}) + "\n")


def _report(spec: Spec, offsets: Any, dropped: Counter[str], held: Any) -> dict[str, Any]:
    lengths = np.diff(offsets)
    quantiles = np.percentile(lengths, PERCENTILES, method="nearest").tolist()
    return {
        "files": len(spec.files),
        "bytes": sum(size for size, _ in spec.stats),
        "documents": len(lengths),
        "tokens": int(offsets[-1]),
        "held_out_documents": int(held.sum()),
        "end_token": spec.tokenizer.end,
        "vocab_size": spec.tokenizer.vocab_size,
        "lengths": {f"{each} %": int(value) for each, value in zip(PERCENTILES, quantiles, strict=True)},
        "dropped": dict(dropped.most_common()),
    }


def _nothing(store: Store, dropped: Counter[str]) -> str:
    """Explain why no document can be used."""
    logs = ((number, store.part(number) / "dropped.jsonl") for number in range(len(store.spec.parts)))
    found = next(((number, log) for number, log in logs if log.stat().st_size), None)
    if found is None:
        return f"{_shortened(store.spec.files)}: no document in it: check the paths"
    with open(found[1], "rb") as lines:
        first = json.loads(lines.readline())
    where = f"{store.spec.files[store.spec.parts[found[0]][first['slice']][0]]}:{first['line']}"
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in dropped.most_common(3))
    return (
        f"{where}: none of the documents can be used: {reasons}; the first: {first['reason']}, {first['detail']}: set "
        "text=COLUMN, or messages=COLUMN for chats"
    )
