"""Load tokenizers: bytes, a tokenizer.json from the `tokenizers` library, or the folder of a Hugging Face model."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from exactdata.documents.formats import Broken, imported
from exactdata.errors import DataError, nearest

BYTES = "bytes"
AUTO, NO_END = "auto", "none"
KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PIECE = 1 << 23
"""Maximum characters tokenized at once. Each token needs about 90 bytes. Longer texts are split after a line."""
Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class TokenizerSpec:
    """The parameters that determine the tokens of a text. They are stored with the tokens.

    Attributes:
        json: content of the tokenizer.json, or an empty string for `bytes`.
        end: the token to append to each document. If None, no token.
        vocab_size: the largest token id plus one.
        chat_template: the chat template, in Jinja.
        names: the values of variables such as `bos_token` and `eos_token` in the template.
    """

    json: str
    end: int | None
    vocab_size: int
    chat_template: str = CHATML
    names: dict[str, str] = field(default_factory=dict)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the smallest unsigned dtype (1, 2 or 4 bytes) that can represent all tokens."""
        return np.min_scalar_type(self.vocab_size - 1)

    def to_json(self) -> dict[str, Any]:
        """Return a short JSON-serializable description, with a digest of the tokenizer."""
        library = "" if not self.json else imported("tokenizers", "a tokenizer.json").__version__
        digest = hashlib.blake2b(self.json.encode(), digest_size=16).hexdigest() if self.json else BYTES
        return {"tokenizer": digest, "tokenizers": library, "end": self.end, "vocab_size": self.vocab_size}


def load(tokenizer: str | Path, end_token: str, chat_template: str | None) -> TokenizerSpec:
    """Load a tokenizer.

    Args:
        tokenizer: `bytes`, the path of a tokenizer.json, or a folder that contains one or that transformers can
            convert.
        end_token: the token to append to each document. `none` means no token, and `auto` means the end token in the
            folder, or a well-known end token.
        chat_template: a Jinja chat template, or the path of one. If None, the template in the folder, or ChatML.

    Raises:
        DataError: the tokenizer is missing or damaged, or lacks the end token.
    """
    template = _template(chat_template)
    if str(tokenizer) == BYTES:
        if end_token not in (AUTO, NO_END):
            raise DataError(f"end_token={end_token!r}: with tokenizer=bytes it is auto (a zero byte) or none")
        return TokenizerSpec("", 0 if end_token == AUTO else None, 256, template or CHATML)
    path = Path(tokenizer).expanduser()
    if not path.exists():
        raise DataError(
            f"tokenizer={str(tokenizer)!r}: no such file or folder in {Path.cwd()}: use bytes, a tokenizer.json, or "
            "the folder of a Hugging Face tokenizer"
        )
    try:
        text, config = _converted(path) if path.is_dir() else (path.read_text("utf-8"), {})
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"tokenizer={path}: its files are damaged ({str(error)[:200]}): save it there anew") from error
    made = _made(text, path)
    vocabulary = made.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError(f"tokenizer={path}: its vocabulary is empty: train it first")
    end = _end(end_token, vocabulary, config, path)
    template = template or _stored(config.get("chat_template"), path)
    names = {key: _content(value) for key, value in config.items() if key.endswith("_token")}
    return TokenizerSpec(text, end, max(vocabulary.values()) + 1, template or CHATML, names)


def _made(text: str, path: Path) -> Any:
    library = imported("tokenizers", f"tokenizer={path}")
    try:
        made = library.Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 the library raises plain Exception
        raise DataError(f"tokenizer={path}: not a tokenizer.json ({str(error)[:200]}): use another file") from None
    made.no_truncation()  # many tokenizer.json files enable truncation, which would drop tokens
    made.no_padding()
    return made


def _converted(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return a folder's tokenizer.json, and its tokenizer_config.json with the chat template."""
    config: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        if (folder / name).is_file():
            config |= json.loads((folder / name).read_text("utf-8"))
    if (folder / "chat_template.jinja").is_file():
        config["chat_template"] = (folder / "chat_template.jinja").read_text("utf-8")
    if (folder / "tokenizer.json").is_file():
        return (folder / "tokenizer.json").read_text("utf-8"), config
    library = imported("transformers", f"tokenizer={folder} (a folder without a tokenizer.json)")
    try:
        return library.AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer.to_str(), config
    except (OSError, ValueError, AttributeError, ImportError) as error:
        raise DataError(
            f"tokenizer={folder}: no tokenizer.json, and transformers cannot make one "
            f"({str(error).splitlines()[0][:200]}): save a fast tokenizer there (save_pretrained)"
        ) from error


def _end(wanted: str, vocabulary: dict[str, int], config: dict[str, Any], path: Path) -> int | None:
    if wanted == NO_END:
        return None
    if wanted == AUTO:
        known = (_content(config.get("eos_token")), *KNOWN_ENDS)
        return next((vocabulary[token] for token in known if token in vocabulary), None)
    if wanted not in vocabulary:
        raise DataError(
            f"end_token={wanted!r}{nearest(wanted, vocabulary)} is not in the vocabulary of {path}: name one of its "
            "tokens, or none"
        )
    return vocabulary[wanted]


def _stored(template: Any, path: Path) -> str | None:
    """Return the chat template in a folder. If it has several, return the template named `default`.

    Raises:
        DataError: none of several templates is named `default`.
    """
    if not isinstance(template, list):
        return None if template is None else str(template)
    named = {each["name"]: str(each["template"]) for each in template}
    if "default" not in named:
        raise DataError(
            f"tokenizer={path}: has the chat templates {', '.join(named)}, and none is the default: save the one that "
            "is meant to a file, and set chat_template to it"
        )
    return named["default"]


def _content(token: Any) -> str:
    """Return the text of a token in a tokenizer_config.json (a string, or a dict with options), or an empty string."""
    return str(token.get("content", "") if isinstance(token, dict) else token or "")


def _template(given: str | None) -> str | None:
    if given is None or "{" in given:
        return given
    path = Path(given).expanduser()
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise DataError(
            f"chat_template={given!r}: neither a Jinja template nor a text file that holds one ({error}): check "
            "the path"
        ) from error


@dataclass
class Encoded:
    """The tokens of a document, shape (n,), and a mask of the tokens to train on. If the mask is None, train on all."""

    tokens: npt.NDArray[np.unsignedinteger[Any]]
    trained: npt.NDArray[np.bool_] | None = None


class Encoder:
    """Convert texts and chats to tokens.

    Args:
        spec: the tokenizer.
        train_on: the roles whose messages are trained on.
    """

    def __init__(self, spec: TokenizerSpec, train_on: Sequence[str]) -> None:
        self.spec, self.train_on = spec, tuple(train_on)
        self._tokenizer = _made(spec.json, Path("tokenizer.json")) if spec.json else None
        self._tail = np.array([] if spec.end is None else [spec.end], spec.dtype)

    def texts(self, texts: Sequence[str]) -> list[Encoded]:
        """Encode texts, and append the end token to each text."""
        if self._tokenizer is None:
            found = [np.frombuffer(text.encode(), np.uint8) for text in texts]
        else:
            short = iter(self._tokenizer.encode_batch_fast([text for text in texts if len(text) <= PIECE]))
            whole = [next(short) if len(text) <= PIECE else self._long(text) for text in texts]
            found = [np.array(each.ids, self.spec.dtype) for each in whole]
        return [Encoded(self._ended(tokens)) for tokens in found]

    def _long(self, text: str) -> Any:
        """Encode a long text in chunks, with the special tokens only at the ends of the complete text."""
        assert self._tokenizer is not None
        pieces = self._tokenizer.encode_batch_fast(_pieces(text), add_special_tokens=False)
        return self._tokenizer.post_process(type(pieces[0]).merge(pieces, growing_offsets=False))

    def _ended(self, tokens: Any) -> Any:
        if not len(tokens) or not len(self._tail) or tokens[-1] == self._tail[0]:
            return tokens
        return np.concatenate([tokens, self._tail])

    def chat(self, messages: Any) -> Encoded | Broken:
        """Encode a chat, and mark the tokens of the roles that are trained on."""
        found = self._render(messages)
        if isinstance(found, Broken):
            return found
        text, spans = found
        if self._tokenizer is None:
            tokens = np.frombuffer(text.encode(), np.uint8)
            ends = np.array([len(text[:at].encode()) for span in spans for at in span], np.int64)
            begins = np.arange(len(tokens))
        else:
            encoded = self._of_chats.encode(text, add_special_tokens=False)  # the template adds special tokens
            tokens = np.array(encoded.ids, self.spec.dtype)
            begins = np.array([begin if end > begin else -1 for begin, end in encoded.offsets], np.int64)
            ends = np.array([at for span in spans for at in span], np.int64)
        # A token begins inside a span if the number of span bounds before it is odd.
        trained = (np.searchsorted(ends, begins, side="right") % 2).astype(bool)
        whole = self._ended(tokens)
        if len(whole) > len(tokens):
            trained = np.append(trained, bool(spans) and spans[-1][1] == len(text))
        return Encoded(whole, trained)

    @cached_property
    def _of_chats(self) -> Any:
        """Return the tokenizer without its post-processor, which shifts the offsets of spaces."""
        made = _made(self.spec.json, Path("tokenizer.json"))
        made.post_processor = None
        return made

    @cached_property
    def _compiled(self) -> Any:
        sandbox = imported("jinja2.sandbox", "a chat template")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _refuse
        text = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", self.spec.chat_template)
        try:
            return environment.from_string(text)
        except Exception as error:
            raise DataError(f"the chat template is damaged ({error}): set chat_template") from error

    def _render(self, messages: Any) -> tuple[str, Spans] | Broken:
        """Render a chat, and find the spans to train on. A span is the text that a message adds to its prompt."""
        if not _is_chat(messages):
            return Broken("wrong type: no list of messages with role and content", type(messages).__name__)
        spans: Spans = []
        try:
            text = self._written(messages)
            for number, message in enumerate(messages):
                if message["role"] in self.train_on:
                    prompt = message["role"] == "assistant"
                    before = self._written(messages[:number], prompt) if number or prompt else ""
                    through = self._written(messages[: number + 1])
                    if not (text.startswith(through) and through.startswith(before)):
                        return Broken("the chat template writes a turn otherwise once another follows")
                    spans.append((len(before), len(through)))
        except DataError:
            raise
        except Exception as error:  # noqa: BLE001 a template may raise anything
            return Broken("the chat template refuses it", str(error)[:200])
        return text, spans

    def _written(self, messages: Any, prompt: bool = False) -> str:
        text: str = self._compiled.render(**self.spec.names, messages=messages, add_generation_prompt=prompt)
        return text


def _is_chat(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(each, dict) and isinstance(each.get("role"), str) and "content" in each for each in messages)
    )


def _refuse(message: str) -> None:
    raise ValueError(message)


def _pieces(text: str) -> list[str]:
    """Split a text that is too long to tokenize at once, preferably at the ends of lines."""
    found, start = [], 0
    while len(text) - start > PIECE:
        stop = text.rfind("\n", start, start + PIECE) + 1 or start + PIECE
        found.append(text[start:stop])
        start = stop
    return [*found, text[start:]]
