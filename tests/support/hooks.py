"""Callbacks that a user might write, correct and incorrect."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import numpy as np
import torch


class Drawing:
    """A callback that draws from every generator, seeds them, runs the model, keeps a state and logs at each moment."""

    def __init__(self) -> None:
        self.calls = 0
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    def _draw(self) -> float:
        np.random.standard_normal()
        drawn = random.random() + float(np.random.random()) + torch.rand(()).item() + torch.randn(3).sum().item()
        torch.manual_seed(7)
        return drawn

    def on_start(self, context: Any) -> None:
        assert not context.model.training
        context.log("started", self._draw())

    def on_step_end(self, context: Any) -> None:
        assert context.model.training
        assert not torch.is_grad_enabled()
        self.calls += 1
        if context.step % 3 == 0:
            context.model.eval()
        context.log("drawn", self._draw())
        context.log("calls", self.calls)

    def on_evaluation(self, context: Any) -> None:
        self.calls += 100
        assert "eval_loss" in context.metrics
        tokens = torch.randint(0, 250, (1, 8), device=context.device)
        context.log("eval_drawn", self._draw() + context.model(tokens).float().mean().item())
        context.log_text("texts/drawn", f"{tokens.tolist()}\n")
        context.log_image("drawn", torch.rand(3, 4, 5))

    def on_save(self, context: Any) -> None:
        context.log("saved_at", context.step)
        self._draw()

    def on_end(self, context: Any) -> None:
        (context.run_dir / "ended").write_text(f"{context.step} {context.config['train']['on_callback_error']}")

    def state_dict(self) -> dict[str, Any]:
        np.random.random()
        return {"calls": self.calls, "tensor": torch.tensor([self.calls])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["tensor"].item() == state["calls"]
        self.calls = state["calls"]


class RaisesAt:
    """A callback that raises after one step."""

    def __init__(self, step: int, moment: str = "on_step_end", rank: int | None = None) -> None:
        self.step, self.rank = step, rank
        if moment != "on_step_end":
            setattr(self, moment, self.on_step_end)

    def on_step_end(self, context: Any) -> None:
        context.log("steps", context.step)
        if context.step == self.step and self.rank in (None, int(os.environ.get("RANK", "0"))):
            raise ValueError("no\nluck")


class Logs:
    """A callback that logs one value after the first step."""

    def __init__(self, name: Any = "x", value: Any = 1.0, how: str = "log") -> None:
        self.name, self.value, self.how = name, value, how

    def on_step_end(self, context: Any) -> None:
        if context.step == 1:
            getattr(context, self.how)(self.name, self.value)


class Keeps:
    """A callback with a numpy state."""

    def on_step_end(self, context: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [np.zeros(3)]}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Half:
    def on_end(self, context: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}


class Nothing:
    """A class that is not a callback."""


class Misspelt:
    def on_stepend(self, context: Any) -> None: ...


class Abbreviated:
    def on_eval(self, context: Any) -> None: ...


class NoContext:
    def on_end(self) -> None: ...


class Unmade:
    def __init__(self) -> None:
        raise KeyError("nothing")

    def on_end(self, context: Any) -> None: ...


class Stops:
    """A callback that ends the run at a step, from one of its methods."""

    def __init__(self, step: int, method: str = "on_step_end", signaled: str = "") -> None:
        self.step, self.method, self.signaled = step, method, signaled

    def _at(self, method: str, context: Any) -> None:
        if method == self.method and context.step >= self.step:
            context.stop("this is enough")
            if self.signaled and not os.path.exists(self.signaled):  # a signal arrives at that moment, once
                open(self.signaled, "w").close()
                os.kill(os.getpid(), signal.SIGTERM)

    def on_start(self, context: Any) -> None:
        self._at("on_start", context)

    def on_step_end(self, context: Any) -> None:
        self._at("on_step_end", context)

    def on_evaluation(self, context: Any) -> None:
        self._at("on_evaluation", context)
