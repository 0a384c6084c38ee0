"""Measure packed documents: their preparation, the plan, its padding, batches of it, and a start.

The texts are from the Python installation: its sources, its prose (readme and license files), its docstrings. The BPE
tokenizer of 8,000 tokens is trained on a part of the sources. Pairs are taken in turns. The start and the plan of many
documents use an index whose tokens do not exist.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.results import Table, table
from benchmarks.timing import seconds
from exactdata.datasets import TokenDataset
from exactdata.documents import preparing
from exactdata.documents.dataset import Documents, spec_of
from exactdata.documents.packed import PlanOptions, make_plan
from exactdata.documents.prepared import Index, Store
from exactdata.order.arrays import I64

TURNS, T, BATCH = 3, 2048, 16
CORPUS = 20_000_000
"""Characters of sources that are prepared."""
ALONE = """\
import json, sys, time
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[2])
texts = [json.loads(line)["text"] for line in open(sys.argv[1])]
size, start = int(sys.argv[3]), time.perf_counter()
for at in range(0, len(texts), size):
    tokenizer.encode_batch_fast(texts[at : at + size])
print(time.perf_counter() - start)
"""
MAP = """\
import os, sys, time
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from datasets import disable_progress_bars, load_dataset
from tokenizers import Tokenizer
disable_progress_bars()
tokenizer = Tokenizer.from_file(sys.argv[2])
def encode(batch):
    return {"input_ids": [each.ids for each in tokenizer.encode_batch_fast(batch["text"])]}
start = time.perf_counter()
data = load_dataset("json", data_files=sys.argv[1], split="train", cache_dir=sys.argv[3])
data.map(encode, batched=True, num_proc=len(os.sched_getaffinity(0)), remove_columns=["text"])
print(time.perf_counter() - start)
"""
PLAN = "import sys; from benchmarks.documents import plan_many; plan_many(*sys.argv[1:])"
START = """\
import sys, time
from exactdata.documents.dataset import Documents
start = time.perf_counter()
Documents(sys.argv[1], 2048, cache_dir=sys.argv[2])
print(time.perf_counter() - start)
"""


def child(script: str, *words: object) -> float:
    """Run a script in a new process; return the number that it prints."""
    command = [sys.executable, "-c", script, *map(str, words)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)


def texts(patterns: tuple[str, ...], most: int) -> list[str]:
    """Return texts of the installation, up to `most` characters in all."""
    found, size = [], 0
    roots = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
    for path in (path for root in roots for pattern in patterns for path in sorted(root.rglob(pattern))):
        with contextlib.suppress(OSError, UnicodeError):
            found.append(path.read_text("utf-8"))
            size += len(found[-1])
        if size > most:
            break
    return [text for text in found if text]


def docstrings(sources: list[str]) -> Iterator[str]:
    """Yield the docstrings of modules, classes and functions."""
    for source in sources:
        with contextlib.suppress(SyntaxError):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                    yield text


def write(path: Path, documents: list[str]) -> Path:
    """Write documents as JSON lines."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def train(path: Path, documents: list[str]) -> Path:
    """Train a byte-level BPE of 8,000 tokens on documents, and save it."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(documents, vocab_size=8000, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.save(str(path))
    return path


def preparation(corpus: Path, tokenizer: Path, root: Path) -> None:
    """Compare the preparation with the tokenizer alone, and with `datasets`."""
    found = table("documents-preparation", "preparation")
    spec, rows = spec_of(corpus, tokenizer=tokenizer), []
    for turn in range(TURNS):
        ours = seconds(lambda turn=turn: preparing.prepare(spec, root / f"cache{turn}"))  # type: ignore[misc]
        alone = min(child(ALONE, corpus, tokenizer, size) for size in (1000, 10_000))
        rows.append((ours, alone, child(MAP, corpus, tokenizer, root / f"datasets{turn}")))
    megabytes = corpus.stat().st_size / 1e6
    names = ("runner prepare", "the tokenizer alone, texts in memory", "`datasets.map`, to Arrow")
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        goal = {"at_least": 0.9} if name == names[0] else {"more_is_better": True}
        found.add(name, "speed", megabytes / statistics.median(values), "MB/s")
        if name != names[1]:
            pairs = zip(rows, values, strict=True)
            found.add(name, "/ the tokenizer alone", statistics.median(row[1] / value for row, value in pairs), **goal)


def synthetic(directory: Path, lengths: I64) -> Index:
    """Write the index of documents without tokens."""
    store = Store(directory)
    for folder in (store.index, store.plans, store.claims):
        folder.mkdir(parents=True)
    np.save(store.index / "offsets.npy", np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))
    np.save(store.index / "held.npy", np.zeros(len(lengths), bool))
    meta = {"part_starts": [0, int(lengths.sum())], "dtype": "<u2", "vocab_size": 256, "has_mask": False, "content": ""}
    (store.index / "meta.json").write_text(json.dumps(meta))
    return Index(store)


def plan_many(directory: str, count: str, median: str) -> None:
    """Plan documents of log-normal lengths; print seconds, the growth of peak memory, and bytes of the plan."""
    drawn = np.random.default_rng(0).lognormal(np.log(float(median)), 1.2, int(count))
    index = synthetic(Path(directory), np.maximum(1, drawn).astype(np.int64))
    del drawn
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    start = time.process_time()
    packed = make_plan(index, PlanOptions(T))
    size = sum(file.stat().st_size for file in packed.directory.iterdir())
    cost = time.process_time() - start, resident("VmHWM") - before, size / len(index)
    print(json.dumps([*cost, 100 * packed.report["padding"], 100 * packed.report["long_documents"] / len(index)]))


def resident(name: str) -> float:
    """Return a figure of this process's memory, in GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e9 for line in lines if line.startswith(name))


def plans(root: Path) -> None:
    """Plan ten million documents on one core, of two distributions of lengths."""
    found = table("documents-plan", "10,000,000 documents, log-normal")
    for median in (500, 3000):
        command = [sys.executable, "-c", PLAN, str(root / f"many{median}"), "10000000", str(median)]
        values = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        row = f"median {median:,} tokens, {values[4]:.0f} % longer than a row"
        found.add(row, "CPU", values[0], "s", at_most=60)
        found.add(row, "peak memory", values[1], "GB")
        found.add(row, "plan per document", values[2], "bytes", at_most=16)
        found.add(row, "padding", values[3], "%")
        shutil.rmtree(root / f"many{median}")


def padding(kinds: dict[str, list[str]], tokenizer: Path, root: Path) -> None:
    """Compare the padding with first fit in the order of the documents, and with one document in a row."""
    found = table("documents-padding", f"rows of {T:,} tokens")
    for name, documents in kinds.items():
        spec = spec_of(write(root / f"{name.replace(' ', '_')}.jsonl", documents), tokenizer=tokenizer)
        index = preparing.prepare(spec, root / "padding")
        lengths = np.diff(index.offsets)
        row = f"{len(documents):,} {name}, {lengths.mean():,.0f} tokens each"
        found.add(row, "best fit", 100 * make_plan(index, PlanOptions(T)).report["padding"], "%", at_most=0.5)
        rows = int((lengths // T).sum()) + first_fit(lengths % T)
        found.add(row, "first fit", 100 * (1 - lengths.sum() / (rows * T)), "%")
        one = make_plan(index, PlanOptions(T, packing="none")).report["padding"]
        found.add(row, "one document in a row", 100 * one, "%")


def first_fit(sizes: I64) -> int:
    """Return the rows that pieces take when each goes into the first row that has room."""
    room, rows = np.full(len(sizes), T), 0
    for size in sizes[sizes > 0].tolist():
        at = int(np.argmax(room[: rows + 1] >= size))
        room[at] -= size
        rows = max(rows, at + 1)
    return rows


def batches(corpus: Path, tokenizer: Path, root: Path) -> None:
    """Compare batches of random rows with batches of memory-mapped rows of the same size."""
    found = table("documents-batches", f"a batch of {BATCH} random rows of {T:,} tokens")
    packed = Documents(corpus, T, tokenizer=tokenizer, cache_dir=root / "cache0")
    every = packed.__getitems__(range(len(packed)))
    maps = {}
    for name, value in every.items():
        np.save(root / f"{name}.npy", value.numpy())
        maps[name] = np.load(root / f"{name}.npy", mmap_mode="r").view(np.ndarray)
    np.save(root / "bare.npy", np.append(every["input_ids"].numpy().reshape(-1), 0).astype(np.uint16))
    bare = TokenDataset(np.load(root / "bare.npy", mmap_mode="r"), T)
    draw = np.random.default_rng(0)
    ways: dict[str, Callable[[I64], Any]] = {
        "from the plan": packed.__getitems__,
        "bare rows: input_ids and labels": bare.__getitems__,
        "the same four tensors from four maps of int64": lambda rows: {
            name: torch.from_numpy(values[rows]) for name, values in maps.items()
        },
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1000):
        rows = draw.integers(0, len(packed), BATCH)
        for name, way in ways.items():
            times[name].append(seconds(lambda way=way, rows=rows: way(rows)))  # type: ignore[misc]
    ours, *others = (statistics.median(values[100:]) for values in times.values())
    found.add("from the plan", "time", ours * 1e3, "ms")
    for name, other in zip(list(ways)[1:], others, strict=True):
        found.add(name, "time", other * 1e3, "ms")
        found.add(name, "speed of the plan / that", other / ours, at_least=0.8 if name[0] == "b" else None)


def prepared(directory: Path, count: int) -> tuple[Path, Path]:
    """Write the index and plan of `count` documents, one in a row, as if a file had them; return file and cache."""
    file, cache = directory / "documents.txt", directory / "cache"
    directory.mkdir()
    file.write_text("documents")
    store = preparing.store_of(spec_of(file), cache)
    synthetic(store.directory, np.full(count, 500))
    plan = store.plans / PlanOptions(T).key
    plan.mkdir()
    order = np.arange(count + 1, dtype=np.uint32)
    arrays = {"order": order[:-1], "starts": order, "long": order[:0], "ends": order[:0]}
    for name, values in arrays.items():
        np.save(plan / f"{name}.npy", values)
    meta = {"sequence_length": T, "packing": "best_fit", "long": "split", "split": "all", "rows": count}
    (plan / "meta.json").write_text(json.dumps({**meta, "tokens": 500 * count, "documents": count}))
    return file, cache


def starts(found: Table, root: Path) -> None:
    """Open prepared documents in new processes, few and many in turns."""
    counts = (10**5, 10**8)
    stores = [prepared(root / str(count), count) for count in counts]
    for words in stores:
        child(START, *words)
    pairs = [[child(START, *words) for words in stores] for _ in range(7)]
    for count, values in zip(counts, zip(*pairs, strict=True), strict=True):
        found.add(f"{count:,} documents", "start", 1e3 * statistics.median(values), "ms")
    found.add(f"{counts[1]:,} documents", "/ 100,000", statistics.median(many / few for few, many in pairs))
    for count in counts:
        shutil.rmtree(root / str(count))


def main() -> None:
    """Measure all tables."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        sources = texts(("*.py",), CORPUS)
        prose = texts(("*.rst", "*.md", "*.txt", "METADATA"), CORPUS)
        tokenizer = train(root / "tokenizer.json", sources[:: max(1, len(sources) // 500)])
        corpus = write(root / "corpus.jsonl", sources)
        preparation(corpus, tokenizer, root)
        kinds = {"sources": sources, "texts of prose": prose, "docstrings": list(docstrings(sources))}
        padding(kinds, tokenizer, root)
        batches(corpus, tokenizer, root)
        plans(root)
        starts(table("documents-start", "`Documents(...)` of what is prepared"), root)


if __name__ == "__main__":
    main()
