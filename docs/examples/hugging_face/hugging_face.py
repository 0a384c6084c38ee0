"""Teach a GPT-2 of Hugging Face to count, from texts of different lengths."""

import json
import os
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

NUMBERS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
END = 0


class Texts:
    """Lines such as {"text": "three four five"}, as bytes; the file is written if there is none."""

    def __init__(self, file: str, held_out: bool) -> None:
        if not Path(file).exists():
            write(Path(file), held_out)
        self.texts = [json.loads(line)["text"] for line in Path(file).read_text().splitlines()]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([*self.texts[index].encode(), END])


def write(file: Path, held_out: bool) -> None:
    """Write the training texts, or every fourth text, which is held out."""
    texts = [" ".join(NUMBERS[first:last]) for last in range(1, 17) for first in range(last)]
    random.Random(0).shuffle(texts)
    lines = [json.dumps({"text": text}) for index, text in enumerate(texts) if held_out == (index % 4 == 0)]
    temporary = Path(f"{file}.{os.getpid()}")  # several processes may do this at once
    temporary.write_text("\n".join(lines))
    temporary.rename(file)


def pad(texts: list[Tensor]) -> dict[str, Tensor]:
    """Make a batch: `input_ids`, `attention_mask` and `labels` (B, T), as long as the longest text."""
    labels = pad_sequence(texts, batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp(min=0), "attention_mask": (labels >= 0).long(), "labels": labels}


def next_byte(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross entropy of each text (B,)."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    losses = cross_entropy(logits[:, :-1].mT, batch["labels"][:, 1:], reduction="none")  # 0 for labels of -100
    return losses.sum(1) / batch["attention_mask"][:, 1:].sum(1)


class Count:
    def on_evaluation(self, context: Any) -> None:
        """Log what the model writes after "three"."""
        text = context.model.generate(torch.tensor([[*b"three "]], device=context.device), max_new_tokens=80)
        context.log_text("three", bytes(text[0].tolist()).decode(errors="replace"))
