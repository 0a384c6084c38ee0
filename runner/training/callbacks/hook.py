"""Create a callback from the config, check it, restore its state, and describe its failures."""

from __future__ import annotations

import hashlib
import inspect
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.checkpoint.tensors.staging import snapshot
from runner.config.identity import canonical
from runner.config.targets import CHANGES_TRAINING, instantiate
from runner.errors import PeerError, UserError, nearest
from runner.system import files
from runner.training.records.run_state import RunState

METHODS = ("on_start", "on_step_end", "on_evaluation", "on_save", "on_end")
MAY_STOP = ("on_step_end", "on_evaluation")  # kills do not affect when these are called
MAX_MESSAGE = 300


@dataclass
class Hook:
    """A callback from the config.

    Attributes:
        code: digest of the class's file and of its options.
        dropped: True if the callback raised. It is skipped until `code` changes.
        state: the last saved or restored state.
        changes_training: True if the class declares that it changes training, or if a warning has reported that it
            does.
    """

    name: str
    callback: Any
    methods: frozenset[str]
    code: str
    dropped: bool = False
    state: Any = None
    changes_training: bool = False

    @property
    def keeps_state(self) -> bool:
        return "state_dict" in self.methods

    def refresh(self) -> None:
        """Update `state` from the callback's current state.

        Raises:
            CheckpointError: the callback's state contains an object that cannot be saved in a checkpoint.
        """
        self.state = snapshot(self.callback.state_dict(), f"callbacks.{self.name}.state_dict()")


@dataclass(frozen=True)
class Failure:
    """A callback's failure: a one-line description and the traceback, as strings that ranks can exchange."""

    summary: str
    details: str


def make_hook(name: str, node: dict[str, Any]) -> Hook:
    """Create the callback that a config node describes, and check it.

    Raises:
        UserError: the callback cannot be created, or the object is not a callback.
    """
    key = f"callbacks.{name}"
    try:
        callback = instantiate(key, node)
    except (UserError, PeerError):
        raise
    except Exception as error:
        raise UserError(f"{key} ({node['_target_']}): {_one_line(error)}{_line_of(error, None)}") from error
    what = f"{key} ({node['_target_']})"
    for wrong in sorted(attribute for attribute in dir(callback) if attribute.startswith("on_")):
        if wrong not in METHODS and callable(getattr(callback, wrong, None)):
            raise UserError(
                f"{what} has the method {wrong}, which is never called{nearest(wrong, METHODS)}: the methods are "
                f"{', '.join(METHODS)}; rename it, so that it does not begin with on_, if it is none of them"
            )
    methods = frozenset(method for method in METHODS if callable(getattr(callback, method, None)))
    if not methods:
        raise UserError(f"{what} has none of the methods of a callback: {', '.join(METHODS)}")
    for method in methods:
        _check_takes_context(what, callback, method)
    state = frozenset(each for each in ("state_dict", "load_state_dict") if callable(getattr(callback, each, None)))
    if len(state) == 1:
        (lack,) = {"state_dict", "load_state_dict"} - state
        raise UserError(f"{what} has {min(state)}, but no {lack}: a state that is kept needs both")
    hook = Hook(name, callback, methods | state, _code(callback, node))
    hook.changes_training = bool(getattr(callback, CHANGES_TRAINING, False))
    if state:
        _try_state(hook)
    return hook


def _check_takes_context(what: str, callback: Any, method: str) -> None:
    try:
        inspect.signature(getattr(callback, method)).bind(None)
    except ValueError:  # some functions written in C have no signature
        return
    except TypeError as error:
        raise UserError(f"{what}: {method} must take one argument, the context: {error}") from None


def _try_state(hook: Hook) -> None:
    """Check that the callback's state can be saved. This reports an error at the start, not at the first save.

    Raises:
        UserError: the state cannot be saved.
    """
    try:
        hook.refresh()
    except UserError as error:
        raise UserError(str(error)) from error
    except Exception as error:
        raise UserError(failure_of(hook, "state_dict", error).summary) from error


def restore_hook(hook: Hook, saved: RunState) -> None:
    """Restore a callback's state from a checkpoint. A callback that is not in the checkpoint keeps its initial state.

    Raises:
        UserError: the callback raises an error when it loads the state.
    """
    hook.dropped = saved.dropped_callbacks.get(hook.name) == hook.code
    if not hook.keeps_state or hook.name not in saved.callbacks:
        return
    hook.state = saved.callbacks[hook.name]
    try:
        hook.callback.load_state_dict(snapshot(hook.state))
    except Exception as error:
        raise UserError(
            f"{failure_of(hook, 'load_state_dict', error).summary}: the state is of an earlier version, perhaps; give "
            "the callback another name to let it start afresh"
        ) from error


def _code(callback: Any, node: dict[str, Any]) -> str:
    """Return a digest of the class's file and of its options."""
    try:
        source = files.read_bytes(Path(inspect.getfile(type(callback))))
    except (TypeError, OSError):  # a built-in class, or a class created at run time
        source = b""
    return hashlib.sha256(source + canonical(node).encode()).hexdigest()[:16]


def failure_of(hook: Hook, method: str, error: BaseException) -> Failure:
    summary = f"callbacks.{hook.name}.{method}: {_one_line(error)}{_line_of(error, hook.callback)}"
    return Failure(summary, "".join(traceback.format_exception(error)))


def _one_line(error: BaseException) -> str:
    try:
        message = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 __str__ may fail too
        message = ""
    if not isinstance(error, UserError):
        message = f"{type(error).__name__}: {message}".rstrip(": ")
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}…"


def _line_of(error: BaseException, callback: Any) -> str:
    """Return ` (FILE, line N)` for the last line of the callback's file in the traceback."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(__file__).parents[1] not in Path(frame.filename).parents
    ]
    own = []
    with suppress(TypeError, OSError):
        own = [frame for frame in frames if frame.filename == inspect.getfile(type(callback))]
    if not (own or frames):
        return ""
    frame = (own or frames)[-1]
    return f" ({frame.filename}, line {frame.lineno})"
