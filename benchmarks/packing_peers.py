"""Pack ten difficult inputs into rows with this project and four others, and count the lost and repeated tokens.

    python -m benchmarks.packing_peers DIR                        # writes the inputs
    python -m benchmarks.packing_peers DIR olmo                   # runs a peer over them, where it is installed
    python -m benchmarks.packing_peers DIR megatron MEGATRON-LM   # a clone, for its tools/preprocess_data.py

Each word of the corpus is one token, and no token occurs twice, so every lost and every repeated token can be counted.
All inputs but the last end with a long document that is not counted, so that no last row matters.
docs/project/packing.md has the results.
"""

import importlib
import itertools
import json
import re
import shutil
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

ROW = 64  # tokens
WORDS = ["".join(pair) for pair in itertools.product(string.ascii_lowercase, repeat=2)]
FILLER = " ".join(WORDS[-170:])
BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
IGNORED = -100
Row = tuple[list[int], list[int]]  # what the model reads, and what it is to predict, IGNORED where nothing


def tokenizer(folder: Path) -> Any:
    """Return the tokenizer of `folder`. Train and write it there first, in Hugging Face's files, if it is missing."""
    tokenizers: Any = importlib.import_module("tokenizers")
    if not (folder / "tokenizer.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
        made.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=1000,
            special_tokens=[PAD, BOS, EOS],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        made.train_from_iterator([" ".join(WORDS)] * 2, trainer)
        made.save(str(folder / "tokenizer.json"))
        config = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def line(text: object, **more: object) -> bytes:
    """Return a JSON line with `text` and the further fields that peers need: an id, and the name of a set."""
    return json.dumps({"text": text, "id": "x", "meta": {"redpajama_set_name": "x"}, **more}).encode() + b"\n"


def documents(*lengths: int) -> list[str]:
    """Return texts of the given numbers of tokens; no word is in two of them."""
    words = iter(WORDS)
    return [" ".join(itertools.islice(words, length)) for length in lengths]


def cases() -> dict[str, bytes]:
    """Return the bytes of each JSONL file, by the input's name."""
    first, second, third = documents(10, 10, 10)
    good, last = line(first), line(third) + line(FILLER)
    without = json.dumps({"id": "x", "meta": {"redpajama_set_name": "x"}}).encode() + b"\n"
    emoji = f"{first} \N{GRINNING FACE}\N{LINE SEPARATOR} {second}"
    return {
        "1-long": b"".join(map(line, [*documents(20, ROW * 7 // 2, 20, 20), FILLER])),
        "2-exact": b"".join(map(line, [*documents(ROW, ROW + 1, 20), FILLER])),
        "3-empty": good + line("") + line(" \t ") + last,
        "3-empty-line": good + b"\n" + last,
        "4-broken": good + line(second)[:-30] + b"\n" + last,
        "5-no-newline": good + last[:-1],
        "5-crlf": (good + last).replace(b"\n", b"\r\n"),
        "5-bom": b"\xef\xbb\xbf" + good + last,
        "6-null": good + line(None) + last,
        "6-number": good + line(7) + last,
        "6-list": good + line(second.split()) + last,
        "6-column": good + without + last,
        "7-unicode": line(emoji) + last,
        "7-raw": json.dumps(json.loads(line(emoji)), ensure_ascii=False).encode() + b"\n" + last,
        "7-surrogate": good + line(f"{second}\ud800") + last,
        "7-bytes": good
        + 40 * line(FILLER)
        + line(second).replace(b"an ao", b"an \xff ao")
        + last,  # not UTF-8, beyond a buffer's length
        "8-corpus": b"".join(map(line, documents(*[20] * 25))),  # 500 words: with ends not a multiple of ROW
    }


def write(folder: Path) -> None:
    """Write the inputs into `folder`, each in a separate folder."""
    made = tokenizer(folder / "tokenizer")
    assert all(len(made.encode(f" {word}").ids) == 1 for word in WORDS), "a word is more than one token"
    for name, content in cases().items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "data.jsonl").write_bytes(content)


def words_of(file: Path) -> set[str]:
    """Return the words in the texts of `file`, whether or not its lines can be parsed."""
    text = file.read_text("utf-8-sig", "replace").replace('"id"', "")
    return set(re.findall(r"(?<![a-z\\])[a-z]{2}(?![a-z0-9])", text.replace(FILLER, "")))


def count(name: str, rows: list[Row], file: Path, made: Any) -> str:
    """Report in one line which words of `file` are in `rows`."""
    ids = {made.encode(f" {word}").ids[0] for word in WORDS}
    there = {made.encode(f" {word}").ids[0] for word in words_of(file)}
    read = Counter(t for inputs, _ in rows for t in inputs if t in there)
    predicted = Counter(t for _, labels in rows for t in labels if t in there)
    pads = sum(t == made.token_to_id(PAD) for inputs, _ in rows for t in inputs)
    begin, end = made.token_to_id(BOS), made.token_to_id(EOS)
    begins, ends = sum(i.count(begin) for i, _ in rows), sum(o.count(end) for _, o in rows)
    across = sum(i == end and t in ids for inputs, labels in rows for i, t in zip(inputs, labels, strict=True))
    return (
        f"{name}: {len(rows)} rows of {len(rows[0][0]) if rows else 0}; of {len(there)} words, {len(there - set(read))}"
        f" never read, {len(there - set(predicted))} never predicted, {sum(n > 1 for n in read.values())} read twice or"
        f" more; {begins} begins, {ends} ends, {pads} of padding, {across} labels across a boundary"
    )


def shifted(tokens: list[int]) -> Row:
    """Return the row of a peer that reads all but the last of its tokens and predicts all but the first."""
    return tokens[:-1], tokens[1:]


def olmo(file: Path, folder: Path, work: Path) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of OLMo-core from Dolma's shards: cut anywhere, packed, packed with long documents in pieces."""
    data: Any = importlib.import_module("olmo_core.data")
    utils: Any = importlib.import_module("olmo_core.data.utils")
    dolma_shards(file, folder, work / "shards")
    paths = sorted(map(str, (work / "shards").glob("*.npy")))
    ids: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 2, "vocab_size": 961, "generate_doc_lengths": True}
    for mode in ("cut", "packed", "fragment"):
        more = {"long_doc_strategy": data.LongDocStrategy.fragment} if mode == "fragment" else {}
        kind = data.NumpyFSLDataset if mode == "cut" else data.NumpyPackedFSLDataset
        rows = kind(*paths, sequence_length=ROW, **ids, **more)
        rows.work_dir = work / mode
        rows.prepare()
        batches = [data.DataCollator(pad_token_id=0)([rows[i]]) for i in range(len(rows))]
        yield mode, [(b["input_ids"][0].tolist(), utils.get_labels(b)[0].tolist()) for b in batches]


def dolma_shards(file: Path, folder: Path, to: Path) -> None:
    """Tokenize `file` as OLMo's documentation says, with Dolma."""
    importlib.import_module("dolma.tokenizer.executor").tokenize_in_parallel(
        sources=[str(file)],
        destination=str(to),
        tokenizer_name_or_path=str(folder / "tokenizer.json"),
        eos_token_id=2,
        pad_token_id=0,
        dtype="uint16",
        local_shuffle=1,  # documents stay in their order
        debug=True,  # in this process
        metadata_dir=str(to.parent / "done"),
    )


def torchtitan(file: Path, folder: Path, _work: Path) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of torchtitan's text dataset over a folder of files, read whole as its own test corpus is."""
    text: Any = importlib.import_module("torchtitan.hf_datasets.text_datasets")
    words: Any = importlib.import_module("torchtitan.components.tokenizer")
    made = words.HuggingFaceTokenizer(tokenizer_path=str(folder))
    rows = text.HuggingFaceTextDataset("c4_test", str(file.parent), made, seq_len=ROW)
    yield "text", [(row["input"].tolist(), labels.tolist()) for row, labels in rows]


def megatron(file: Path, folder: Path, work: Path, clone: str) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of Megatron-LM's GPTDataset, from what its tool makes of `file` in one process."""
    made = tokenizer(folder)
    wrapped = SimpleNamespace(tokenize=lambda text: made.encode(text).ids, eod=2, vocab_size=961)
    for name in ("megatron.core.tokenizers.utils", "megatron.training", "nltk"):
        sys.modules[name] = ModuleType(name)
    built, arguments = (f"megatron.{x}" for x in ("core.tokenizers.utils.build_tokenizer", "training.arguments"))
    sys.modules[built] = cast(ModuleType, SimpleNamespace(build_tokenizer=lambda _: wrapped))
    sys.modules[arguments] = cast(ModuleType, SimpleNamespace(_add_tokenizer_args=None))
    sys.path.append(f"{clone}/tools")
    tool: Any = importlib.import_module("preprocess_data")
    options = SimpleNamespace(json_keys=["text"], split_sentences=False, append_eod=True, log_interval=1000)
    options.find_optimal_num_workers = False
    work.mkdir(parents=True, exist_ok=True)
    tool.Partition(options, 1).process_json_file((str(file), str(work / "data")))
    shuffles = (megatron_rows(work / "data_text_document", None, seed) for seed in range(1, 1000))
    rows = next(r for r in shuffles if r.document_index[-1] == len(r.document_index) - 1)  # the filler stays last
    each = [rows[i] for i in range(len(rows))]
    yield "gpt", [(row["tokens"].tolist(), masked(row["labels"], row["loss_mask"])) for row in each]


def masked(labels: Any, mask: Any) -> list[int]:
    """Return `labels` as a list, IGNORED where `mask` is 0."""
    return [int(label) if on else IGNORED for label, on in zip(labels, mask, strict=True)]


def megatron_rows(prefix: Path, samples: int | None, seed: int) -> Any:
    """Return a GPTDataset of `samples` rows, all of one epoch where None."""
    gpt: Any = importlib.import_module("megatron.core.datasets.gpt_dataset")
    numpy: Any = importlib.import_module("numpy")
    split = importlib.import_module("megatron.core.datasets.utils").Split.train
    made = SimpleNamespace(eod=2, pad=0, vocab_size=961, unique_identifiers={})
    config = gpt.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=ROW,
        blend=([str(prefix)], None),
        split="1,0,0",
        tokenizer=made,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    source = gpt.GPTDataset.build_low_level_dataset(str(prefix), config)
    return gpt.GPTDataset(source, str(prefix), numpy.arange(len(source), dtype=numpy.int32), samples, split, config)


def litgpt(file: Path, folder: Path, work: Path) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of LitGPT: JSON lines by its recipe for SlimPajama, then the same bytes as a text file."""
    recipe: Any = importlib.import_module("litgpt.data.prepare_slimpajama")
    text: Any = importlib.import_module("litgpt.data.text_files")
    made = importlib.import_module("litgpt.tokenizer").Tokenizer(folder)
    (work / "in").mkdir(parents=True)
    packed = work / "in" / "data.jsonl.zst"
    packed.write_bytes(importlib.import_module("zstandard").compress(file.read_bytes()))
    (work / "in" / "data.txt").write_bytes(file.read_bytes())
    lines = recipe.SlimPajamaDataRecipe(made, ROW).prepare_item
    yield "jsonl", litgpt_rows(lines, packed, work / "jsonl")
    yield "txt", litgpt_rows(partial(text.tokenize, tokenizer=made), work / "in" / "data.txt", work / "txt")


def litgpt_rows(read: Callable[[str], Any], file: Path, to: Path) -> list[Row]:
    """Return the rows of LitGPT's data module over what `read` makes of `file`."""
    loaders: Any = importlib.import_module("litdata.streaming")
    torch: Any = importlib.import_module("torch")
    item = loaders.TokensLoader(block_size=ROW + 1)
    writer = loaders.Cache(
        input_dir=str(to), chunk_bytes="50MB", item_loader=item
    )  # what `litdata.optimize` writes with
    for index, tokens in enumerate(read(str(file))):
        writer._add_item(index, torch.as_tensor(tokens))
    writer.done()
    writer.merge()
    rows = loaders.StreamingDataset(input_dir=str(to), item_loader=item, shuffle=False)
    return [shifted(rows[i].tolist()) for i in range(len(rows))]


def olmo_resumed(work: Path) -> str:
    """Resume OLMo-core's loader on 1 rank instead of 2, with other batches."""
    data: Any = importlib.import_module("olmo_core.data")
    paths = sorted(map(str, (work / "shards").glob("*.npy")))

    def loader(rank: int, ranks: int, rows: int) -> Any:
        dataset = data.NumpyFSLDataset(*paths, sequence_length=ROW, pad_token_id=0, eos_token_id=2, vocab_size=961)
        dataset.work_dir = work
        collator = data.DataCollator(pad_token_id=0)
        sizes = {"global_batch_size": rows * ROW, "dp_world_size": ranks, "dp_rank": rank}
        made = data.NumpyFSLDataLoader(dataset, collator=collator, work_dir=work, fs_local_rank=0, **sizes)
        made.reshuffle(epoch=1)
        return made

    first = [loader(rank, 2, 2) for rank in range(2)]
    begun = [batch for one in first for batch in itertools.islice(one, 3)]
    answers = []
    for rows in (2, 4):
        later = loader(0, 1, rows)
        later.load_state_dict(first[0].state_dict())
        answers.append(f"{rows} rows a batch: " + again([b["index"].tolist() for b in [*begun, *later]], 8))
    return "; ".join(answers)


def torchtitan_resumed(file: Path, folder: Path) -> str:
    """Resume torchtitan's loader with other batches, and on 1 rank instead of 2; count the rows of 2 ranks."""
    text: Any = importlib.import_module("torchtitan.hf_datasets.text_datasets")
    words: Any = importlib.import_module("torchtitan.components.tokenizer")
    made = words.HuggingFaceTokenizer(tokenizer_path=str(folder))

    def loader(rank: int, ranks: int, rows: int) -> Any:
        config = text.HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=str(file.parent), infinite=False)
        place = {"dp_world_size": ranks, "dp_rank": rank, "local_batch_size": rows}
        return text.HuggingFaceTextDataLoader(config, tokenizer=made, seq_len=ROW, **place)

    def rows(batches: Any) -> list[list[int]]:
        return [row.tolist() for batch, _ in batches for row in batch["input"]]

    both = [rows(loader(rank, 2, 1)) for rank in range(2)]
    answers = [count("2 ranks", [(row, row) for row in both[0] + both[1]], file, tokenizer(folder))]
    for ranks, size in ((1, 3), (2, 1)):
        first, later = loader(0, 1, 2), loader(0, ranks, size)
        begun = rows(itertools.islice(first, 2))
        try:
            later.load_state_dict(first.state_dict())
            answers.append(f"{size} rows a batch: " + again([[tuple(r) for r in begun + rows(later)]], 8))
        except AssertionError as error:
            answers.append(f"{ranks} ranks: AssertionError: {error}")
    return "; ".join(answers)


def megatron_resumed(work: Path) -> str:
    """Read 6 rows of Megatron-LM's dataset of 12 rows, and 6 more of it or of one of 20, as other batches ask for."""
    answers = []
    for samples in (12, 20):
        parts = [megatron_rows(work / "data_text_document", asked, 1) for asked in (12, samples)]
        rows = [
            part[i]["tokens"].tolist() for part, many in zip(parts, (range(6), range(6, 12)), strict=True) for i in many
        ]
        times = Counter(token for row in rows for token in row if token > 2)
        answers.append(f"then {samples}: words read {dict(sorted(Counter(times.values()).items()))} (times: words)")
    return "; ".join(answers)


def litgpt_resumed(work: Path) -> str:
    """Resume LitGPT's loader with other batches, and on 1 rank instead of 2."""
    loaders: Any = importlib.import_module("litdata.streaming")
    environment: Any = importlib.import_module("litdata.utilities.env")._DistributedEnv

    def loader(rank: int, ranks: int, rows: int) -> Any:
        item = loaders.TokensLoader(block_size=ROW + 1)
        dataset = loaders.StreamingDataset(input_dir=str(work / "jsonl"), item_loader=item, shuffle=True, seed=42)
        dataset.distributed_env = environment(ranks, rank, 1)
        return loaders.StreamingDataLoader(dataset, batch_size=rows, num_workers=0, drop_last=True)

    def rows(batches: Any) -> list[tuple[int, ...]]:
        return [tuple(row.tolist()) for batch in batches for row in batch]

    answers = [f"2 ranks: {[len(rows(loader(rank, 2, 1))) for rank in range(2)]} rows"]
    for before, after, size in ((1, 1, 1), (1, 1, 3), (2, 1, 1)):
        first = [loader(rank, before, 1) for rank in range(before)]
        begun = [row for one in first for row in rows(itertools.islice(one, 2))]
        later = loader(0, after, size)
        try:
            later.load_state_dict(first[0].state_dict())
            answers.append(f"{before} to {after} ranks, {size} rows a batch: " + again([begun + rows(later)], 8))
        except (ValueError, AssertionError) as error:
            answers.append(f"{before} to {after} ranks: {type(error).__name__}: {error}")
    return "; ".join(answers)


def again(batches: list[list[Any]], total: int) -> str:
    """Return how many of `total` rows the batches repeat and leave out."""
    seen = Counter(row for batch in batches for row in batch)
    return f"{sum(n > 1 for n in seen.values())} rows repeated, {total - len(seen)} of {total} left out"


def ours(file: Path, folder: Path, work: Path) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of `data=documents`."""
    from exactdata.documents.dataset import Documents

    for packing in ("best_fit", "stream"):
        data = Documents(file, ROW, tokenizer=folder, packing=packing, cache_dir=work)
        batch = data.__getitems__(range(len(data)))
        yield packing, list(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True))


def ours_resumed(work: Path) -> str:
    """Resume on 2 ranks of other batches after 3 batches of 2 rows on one rank."""
    from exactdata import TrainerLoader
    from exactdata.documents.dataset import Documents

    file, folder = work.parents[2] / "8-corpus" / "data.jsonl", work.parents[2] / "tokenizer"
    data = Documents(file, ROW, tokenizer=folder, cache_dir=work)

    def rows(loader: Any) -> list[tuple[int, ...]]:
        return [tuple(row.tolist()) for batch in loader for row in batch["input_ids"]]

    options: dict[str, Any] = {"samples": 8}
    loader = TrainerLoader(data, global_batch_size=2, **options)
    batches = iter(loader)
    seen = [tuple(row.tolist()) for _ in range(3) for row in next(batches)["input_ids"]]
    for rank in (0, 1):
        again = TrainerLoader(data, global_batch_size=4, num_replicas=2, rank=rank, **options)
        again.load_state_dict(loader.state_dict())
        seen += rows(again)
    repeated = sum(count > 1 for count in Counter(seen).values())
    return f"1 rank, 2 rows -> 2 ranks, 4 rows: of 8 rows {repeated} repeated, {8 - len(set(seen))} missed"


PEERS: dict[str, Callable[..., Iterator[tuple[str, list[Row]]]]] = {
    "olmo": olmo,
    "torchtitan": torchtitan,
    "megatron": megatron,
    "litgpt": litgpt,
    "runner": ours,
}
RESUMED = {"olmo": olmo_resumed, "megatron": megatron_resumed, "litgpt": litgpt_resumed, "runner": ours_resumed}


def main(folder: Path, peer: str | None = None, *more: str) -> None:
    """Write the inputs; run `peer` over each where one is named, and print a line for each."""
    write(folder)
    made = tokenizer(folder / "tokenizer")
    for name in cases() if peer else ():
        file, work = folder / name / "data.jsonl", folder / "work" / str(peer) / name
        shutil.rmtree(work, ignore_errors=True)
        try:
            for mode, rows in PEERS[str(peer)](file, folder / "tokenizer", work, *more):
                print(count(f"{name} {mode}", rows, file, made), flush=True)
        except Exception as error:  # noqa: BLE001 (what it says is the result)
            print(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[-1:]}", flush=True)
    work, file = folder / "work" / str(peer) / "8-corpus", folder / "8-corpus" / "data.jsonl"
    if peer == "torchtitan":
        print("9 ", torchtitan_resumed(file, folder / "tokenizer"))
    elif peer:
        print("9 ", RESUMED[peer](work))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
