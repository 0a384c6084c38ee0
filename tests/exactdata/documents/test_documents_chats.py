"""Only the assistant's turns of a chat are trained on, and no tokenizer setting loses a token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from exactdata.documents import preparing
from exactdata.documents import tokenizer as module
from exactdata.documents.dataset import Documents, spec_of
from exactdata.documents.tokenizer import Encoder, load
from exactdata.errors import DataError

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

LLAMA = (
    "{{- bos_token }}{% for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
SPECIAL = ["<|begin|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|im_start|>", "<|im_end|>"]
TURNS = [
    ("system", "Be  brief."),
    ("user", "Why?\n\n"),
    ("assistant", "Be  cause \n\n \u00e9\U0001f600."),
    ("user", "assistant"),
    ("assistant", "No   more"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tokenizer like Llama 3's: it adds a begin token and trims blanks from the offsets."""
    path = tmp_path_factory.mktemp("llama")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    made.train_from_iterator(["because brief more more the cat\n\n  sat"] * 5, trainer)
    begin = tokenizers.processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    made.post_processor = tokenizers.processors.Sequence([tokenizers.processors.ByteLevel(trim_offsets=True), begin])
    made.enable_truncation(4)
    made.enable_padding(length=9)
    made.save(str(path / "tokenizer.json"))
    config = {"bos_token": {"content": "<|begin|>"}, "eos_token": "<|eot_id|>", "chat_template": LLAMA}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def messages(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.mark.parametrize("template", ["chatml", "llama"])
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@pytest.mark.parametrize("turns", [TURNS, TURNS[1:], TURNS[:4], TURNS[2:3], [TURNS[0], *TURNS[2:]]])
def test_turns_of_the_assistant_and_their_ends_are_trained(
    folder: Path, template: str, kind: str, turns: list[tuple[str, str]]
) -> None:
    given = module.CHATML if template == "chatml" else LLAMA
    spec = load("bytes" if kind == "bytes" else folder, "auto", given)
    found = Encoder(spec, ["assistant"]).chat(messages(*turns))
    assert isinstance(found, module.Encoded)
    assert found.trained is not None
    end = "<|im_end|>\n" if template == "chatml" else "<|eot_id|>"
    expected = "".join((c if template == "chatml" else c.strip()) + end for role, c in turns if role == "assistant")
    trained = found.tokens[found.trained].tolist()
    if kind == "bytes":
        last = "\0" if turns[-1][0] == "assistant" else ""
        assert bytes(trained).decode() == expected + last
    else:
        made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        if template == "chatml" and turns[-1][0] == "assistant":
            expected += "<|eot_id|>"
        assert made.decode(trained, skip_special_tokens=False) == expected
        begins = [token for token in found.tokens.tolist() if token == 0]
        assert len(begins) == (template == "llama"), "the template writes the begin token, and nothing else does"


def test_labels_of_a_chat_leave_out_the_other_turns_in_every_cut(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    bad: list[Any] = ["text", [], [{"role": "user"}], [1], None]
    rows = [messages(*TURNS), *bad, messages(*TURNS[:2])]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    preparing.prepare(spec_of(path, messages="messages"), tmp_path, workers=0)
    data = Documents(path, 16, messages="messages", cache_dir=tmp_path, packing="stream")
    batch = data.__getitems__(range(len(data)))
    first = (batch["document_ids"] == 0) & (batch["labels"] >= 0)
    end = "<|im_end|>\n"
    assert bytes(batch["labels"][first].tolist()).decode() == f"{TURNS[2][1]}{end}{TURNS[4][1]}{end}\0"
    assert (batch["labels"][batch["document_ids"] == 1] == -100).all()
    log = [json.loads(line) for line in (data.packed.index.store.index / "dropped.jsonl").read_text().splitlines()]
    assert sorted(each["line"] for each in log) == [2, 3, 4, 5, 6]
    assert all("messages" in each["reason"] or each["reason"] == "empty" for each in log)


def test_a_tokenizer_that_would_truncate_and_pad_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cover a text that is tokenized in pieces, too: it has one begin token and one end token."""
    monkeypatch.setattr(module, "PIECE", 60)
    texts = ["more\n" * 40, "the cat", "e\u0301 \u2028 \U0001f600"]
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.no_truncation()
    made.no_padding()
    found = Encoder(load(folder, "auto", None), []).texts(texts)
    assert [each.tokens.tolist() for each in found] == [[*made.encode(text).ids, 1] for text in texts]


def test_several_templates_need_a_default_or_a_choice(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "tokenizer.json", tmp_path)
    config = {"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": LLAMA}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load(tmp_path, "auto", None).chat_template == LLAMA
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": config["chat_template"][:1]}))
    with pytest.raises(DataError, match=r"tool_use.*set chat_template"):
        load(tmp_path, "auto", None)


def test_a_chat_without_a_turn_to_train_on_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    chats = [messages(*TURNS), messages(("user", "Hello?"))]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))

    def prepared(roles: Any) -> Any:
        return preparing.prepare(spec_of(path, messages="messages", train_on=roles), tmp_path / "cache", workers=0)

    assert prepared("assistant").report()["untrained_documents"] == 1
    with pytest.raises(DataError, match="none of the 2 chats has a turn of asistant: set train_on"):
        prepared(["asistant"])
