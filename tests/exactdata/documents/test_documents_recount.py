"""Each token of each document is in one place of an epoch, according to a recount without the packing code."""

from __future__ import annotations

import gzip
import itertools
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import given_in_tiers
from resume import through_a_file

from exactdata import ElasticSampler, MixtureDataset, StatefulDataLoader
from exactdata.documents import prepared, preparing
from exactdata.documents.best_fit import best_fit
from exactdata.documents.dataset import Documents, spec_of

Found = dict[int, dict[int, tuple[int, int]]]
"""Of each document, of each position in it: token and label."""
LENGTH = 8
SUFFIXES = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow", "txt")
texts = st.text(st.sampled_from("ab \n\u2028\u00e9e\u0301\U0001f600\u0000"), min_size=1, max_size=3 * LENGTH)
bad = st.sampled_from([b"", b"{", b"[1]", b'{"text": 1}', b'{"other": "x"}', b'{"text": ""}', b"\xff", b"  "])
lines = st.lists(st.one_of(texts, texts, texts, bad), max_size=8)
files = st.lists(
    st.tuples(st.sampled_from(SUFFIXES), lines, st.sampled_from([b"\n", b"\r\n"]), st.booleans()), max_size=4
)


def write(path: Path, suffix: str, content: list[Any], newline: bytes, more: bool) -> list[tuple[int, str]]:
    """Write a file and return the lines and texts that are documents, as the writer knows them."""
    good = [(number, each) for number, each in enumerate(content, 1) if isinstance(each, str)]
    if suffix == "txt":
        text = "".join(each for _, each in good)
        path.write_bytes((b"\xef\xbb\xbf" if more else b"") + text.encode())
        return [(1, text)] if text else []
    if suffix in ("parquet", "arrow"):
        pa = pytest.importorskip("pyarrow")
        table = pa.table(
            {
                "n": range(len(content)),
                "text": pa.array([v if isinstance(v, str) else None for v in content], pa.string()),
            }
        )
        if suffix == "parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=2)
        else:
            with pa.ipc.new_stream(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=3)
        return good
    rows = [json.dumps({"id": 1, "text": v}, ensure_ascii=more).encode() if isinstance(v, str) else v for v in content]
    data = (b"\xef\xbb\xbf" if more and rows else b"") + newline.join(rows) + (b"" if more else newline)
    if suffix.endswith("gz"):
        data = gzip.compress(data)
    elif suffix.endswith("zst"):
        data = pytest.importorskip("zstandard").compress(data)
    path.write_bytes(data)
    return good


def corpus(folder: Path, made: list[Any]) -> tuple[list[Path], list[tuple[str, int, list[int]]]]:
    """Write files. Return them, and for each document its file, line and tokens (bytes and a zero)."""
    paths, expected = [], []
    for number, (suffix, *rest) in enumerate([("jsonl", ["ab"], b"\n", False), *made]):
        paths.append(folder / f"{number}.{suffix}")
        for line, text in write(paths[-1], suffix, *rest):
            tokens = list(text.encode())
            expected.append((str(paths[-1]), line, tokens if tokens[-1] == 0 else [*tokens, 0]))
    return paths, expected


def documents(folder: Path, paths: list[Path], small: int = 40, **options: Any) -> Documents:
    """Prepare in this process, in parts so small that lines cross their bounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "SMALL", small)
        patch.setattr(prepared, "LARGE", small)
        patch.setattr(prepared, "MANY", 10**9)
        preparing.prepare(spec_of(paths), folder / "cache", workers=0)
        return Documents(paths, **{"sequence_length": LENGTH, "cache_dir": folder / "cache", **options})


def recount(batches: list[dict[str, Any]]) -> Found:
    """Take batches apart token by token, and check what each row promises."""
    found: Found = defaultdict(dict)
    for batch in batches:
        rows = zip(*(batch[k].tolist() for k in ("input_ids", "labels", "position_ids", "document_ids")), strict=True)
        for row, (ids, labels, positions, names) in enumerate(rows):
            used = [name for name in names if name >= 0]
            assert names == used + [-1] * (len(names) - len(used)), "padding is at the end"
            assert len(set(used)) == 1 + sum(a != b for a, b in itertools.pairwise(used)), "a piece is whole"
            assert all(
                t == p == 0 and v == -100
                for t, p, v in zip(ids[len(used) :], positions[len(used) :], labels[len(used) :], strict=True)
            )
            firsts = batch["first"][row]
            for at, name in enumerate(used):
                assert positions[at] == (positions[at - 1] + 1 if at and names[at - 1] == name else 0)
                place = firsts[name] + positions[at]
                assert place not in found[name], "a token is in one place"
                found[name][place] = ids[at], labels[at]
    return found


def with_firsts(data: Documents, rows: list[int]) -> dict[str, Any]:
    """Fetch a batch and note where each of its pieces begins in its document."""
    batch = data.__getitems__(rows)
    firsts: list[dict[int, int]] = [{} for _ in rows]
    for row, document, first, length in zip(
        *(each.tolist() for each in data.packed.pieces(np.array(rows))), strict=True
    ):
        firsts[row][document] = first
        assert (batch["document_ids"][row] == document).sum() == length
    measured = data.measure(np.array(rows))
    assert measured[:, 0].tolist() == (batch["document_ids"] >= 0).sum(1).tolist()
    assert measured[:, 1].tolist() == [sum(first == 0 for first in each.values()) for each in firsts]
    return {**batch, "first": firsts}


def expected_of(tokens: list[int], cut: int | None = None) -> dict[int, tuple[int, int]]:
    kept = tokens[:cut]
    return {at: (token, kept[at + 1] if at + 1 < len(kept) else -100) for at, token in enumerate(kept)}


@given_in_tiers(files, st.sampled_from(["best_fit", "none", "stream"]), st.integers(1, 20), few=25, many=200)
def test_every_token_is_in_one_place_of_an_epoch(made: Any, packing: str, length: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths, expected = corpus(folder, made)
        data = documents(folder, paths, packing=packing, sequence_length=length)
        found = recount(
            [with_firsts(data, rows.tolist()) for rows in np.array_split(np.arange(len(data)), 1 + len(data) // 7)]
        )
        assert found == {n: expected_of(tokens) for n, (_, _, tokens) in enumerate(expected)}
        assert data.packed.where(np.arange(len(expected))) == [(file, line) for file, line, _ in expected]
        assert [data.packed.find(file, line) for file, line, _ in expected] == list(range(len(expected)))
        which, names, _, _ = data.packed.pieces(np.arange(len(data)))
        for document in range(len(expected)):
            assert sorted(data.packed.rows_of(document)) == sorted(which[names == document])
        assert data.total_tokens == sum(len(tokens) for _, _, tokens in expected)
        if packing == "none":
            assert data.measure(np.arange(len(data)))[:, 1].sum() == len(expected)


@given_in_tiers(files, st.integers(1, 20), few=10, many=200)
def test_truncated_and_omitted_documents_are_counted(made: Any, length: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths, expected = corpus(folder, [("txt", ["a"], b"", False), *made])
        tokens = {n: each for n, (_, _, each) in enumerate(expected)}
        long = [n for n in tokens if len(tokens[n]) > length]
        for option in ("truncate", "drop") if length > 2 else ("truncate",):
            data = documents(folder, paths, long=option, sequence_length=length)
            kept = {n: expected_of(tokens[n], length) for n in tokens if option == "truncate" or n not in long}
            assert recount([with_firsts(data, list(range(len(data))))]) == kept
            report = data.packed.report
            lost = sum(map(len, tokens.values())) - sum(map(len, kept.values()))
            assert (report["long_documents"], report["dropped_tokens"]) == (len(long), lost)
            assert report["dropped_documents"] == len(tokens) - len(kept)


def test_train_and_eval_are_disjoint_and_together_everything(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n % 350}"}) + "\n" for n in range(400)))
    sides = [
        recount([with_firsts(d, list(range(len(d))))])
        for d in (documents(tmp_path, [path], split=s) for s in ("train", "eval", "all"))
    ]
    assert sides[0].keys().isdisjoint(sides[1])
    assert sides[0] | sides[1] == sides[2]
    assert 5 < len(sides[1]) < 50
    assert len(sides[2]) == 400
    assert all((n in sides[1]) == (n + 350 in sides[1]) for n in range(50)), "a text that is there twice is on one side"


def naive(lengths: list[int], capacity: int) -> list[int]:
    """Return the room left in each row of a plain best-fit-decreasing packing, ascending."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [room for room in rooms if room >= length]
        if fits:
            rooms.remove(min(fits))
        rooms.append((min(fits) if fits else capacity) - length)
    return sorted(rooms)


@settings(max_examples=200)
@given(
    st.integers(1, 40).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), min_size=1, max_size=60)))
)
def test_best_fit_leaves_the_room_that_a_naive_one_leaves(case: tuple[int, list[int]]) -> None:
    capacity, lengths = case
    order, starts = best_fit(np.array(lengths), capacity)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    rows = [order[a:b] for a, b in itertools.pairwise(starts)]
    assert sorted(capacity - sum(lengths[n] for n in row) for row in rows) == naive(lengths, capacity)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Documents]:
    folder, draw = tmp_path_factory.mktemp("sources"), np.random.default_rng(1)
    found = {}
    for name in ("a", "b"):
        path = folder / f"{name}.jsonl"
        texts = ["".join(draw.choice(list("abcdefghij"), draw.integers(1, 90))) for _ in range(40)]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        found[name] = documents(folder, [path], packing="stream" if name == "b" else "best_fit")
    return found


@given_in_tiers(
    st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 5), st.floats(0.2, 5)), max_size=5),
    st.integers(0, 9),
    few=6,
    many=60,
)
def test_epoch_over_kills_ranks_and_edits_has_each_token_once(
    sources: dict[str, Documents], parts: list[tuple[int, int, float]], seed: int
) -> None:
    """Give each part of the run its own number of ranks, stop it after some steps, and edit it before it resumes."""
    check_epochs(sources, [*parts, (2, 10**6, 1.0)], seed)


@pytest.mark.slow
def test_workers_of_the_loader_yield_the_same_rows(sources: dict[str, Documents]) -> None:
    check_epochs(sources, [(2, 3, 2.0), (1, 2, 1.0), (2, 10**6, 1.0)], 3, num_workers=2)


def check_epochs(sources: dict[str, Documents], parts: list[tuple[int, int, float]], seed: int, **options: Any) -> None:
    data = MixtureDataset(list(sources.values()), list(sources))
    sizes = {name: len(each) for name, each in sources.items()}
    seen: list[list[tuple[int, ...]]] = [[] for _ in sources]
    state: Any = None
    for ranks, steps, weight in parts:
        loaders = []
        for rank in range(ranks):
            where = {"num_replicas": ranks, "rank": rank, "seed": seed, "global_batch_size": 4}
            sampler = ElasticSampler(sizes, {"a": 1.0, "b": 1.0}, max_epochs=2, **where)  # type: ignore[arg-type]
            loaders.append(StatefulDataLoader(data, batch_size=4 // ranks, sampler=sampler, **options))
            if state is not None:
                loaders[-1].load_state_dict(through_a_file(state))
            sampler.update_weights({"a": weight, "b": 1.0})
        for batches in itertools.islice(zip(*loaders, strict=True), steps):
            of_ranks = [zip(batch["dataset_idx"].tolist(), rows_in(batch), strict=True) for batch in batches]
            for source, row in itertools.chain.from_iterable(zip(*of_ranks, strict=True)):  # as the run counts them
                seen[source].append(row)
        state = loaders[0].state_dict()
    for found, one in zip(seen, sources.values(), strict=True):
        expected = rows_in(one.__getitems__(range(len(one))))
        assert len(set(expected)) == len(one)
        assert sorted(found[: len(one)]) == sorted(expected), "an epoch has every row once"


def rows_in(batch: dict[str, torch.Tensor]) -> list[tuple[int, ...]]:
    keys = ("input_ids", "labels", "position_ids", "document_ids")
    return [tuple(row) for row in torch.cat([batch[key] for key in keys], dim=1).tolist()]
