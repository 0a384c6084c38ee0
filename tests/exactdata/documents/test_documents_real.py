"""Real texts: the sources and the manual of this Python, with a tokenizer trained on them."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from exactdata.documents.dataset import Documents

tokenizers = pytest.importorskip("tokenizers")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.mark.slow
def test_all_formats_give_the_same_tokens_with_little_padding(tmp_path: Path) -> None:
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    texts = [*(path.read_text("utf-8", errors="replace") for path in paths), *topics.values()]
    texts = [text for text in texts if text]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=4096, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    bpe.train_from_iterator(texts[::10], trainer)
    bpe.save(str(tmp_path / "tokenizer.json"))
    with open(tmp_path / "a.jsonl", "w") as lines:
        lines.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=100)

    found = []
    for kind in ("jsonl", "parquet"):
        options = {"tokenizer": tmp_path / "tokenizer.json", "cache_dir": tmp_path / kind}
        data = Documents(tmp_path / f"a.{kind}", 2048, **options)  # type: ignore[arg-type]
        assert len(data.packed.index) == len(texts)
        assert data.packed.report["padding"] < 0.005
        parts = sorted(data.packed.index.store.parts.glob("*/tokens.bin"))
        found.append(np.concatenate([np.fromfile(part, data.packed.index.dtype) for part in parts]))
    assert np.array_equal(found[0], found[1])
    offsets = data.packed.index.offsets
    for number in range(0, len(texts), 7):
        expected = [*bpe.encode(texts[number]).ids, 0]
        assert found[0][offsets[number] : offsets[number + 1]].tolist() == expected
    print(f"{len(texts)} documents, {len(found[0])} tokens, padding {data.packed.report['padding']:.4%}")
