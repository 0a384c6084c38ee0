"""Drive a page in a real Chromium without a network, over a pipe (DevTools protocol, NUL-terminated JSON)."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

REQUIRED = "RUNNER_REQUIRE_CHROMIUM"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_S = 240.0  # for calls that take a second on an idle machine
LOCAL = ("file:", "data:", "blob:", "about:")


def executable() -> str:
    """Return Chromium's path.

    Without Chromium, skip the test, or fail if RUNNER_REQUIRE_CHROMIUM=1.
    """
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        (pytest.fail if os.environ.get(REQUIRED) == "1" else pytest.skip)("there is no Chromium")
    return str(found)


class ReloadedError(Exception):
    """Raised while the page reloads."""


class Chromium:
    """One page of a browser.

    Attributes:
        problems: exceptions, errors of the console, and requests that would leave the machine.
    """

    def __init__(self, to: int, source: int) -> None:
        self._to, self._from = to, source
        self._rest = b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of a command of the protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                error = answer.get("error", {}).get("message", "")
                if "context" in error or "navigated" in error:
                    raise ReloadedError(error)
                assert "error" not in answer, (method, answer)
                return dict(answer["result"])
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(deadline - time.monotonic(), 0))
            data = os.read(self._from, 1 << 16) if ready else b""
            assert data, "Chromium does not answer"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        method, told = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "assert"):
            self.problems.append(f"console: {told['args']}")
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.problems.append(f"log: {told['entry']['text']} {told['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent" and not told["request"]["url"].startswith(LOCAL):
            self.problems.append(f"request: {told['request']['url']}")
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"dialog: {told['message']}")

    def evaluate(self, expression: str) -> Any:
        """Evaluate JavaScript and return its awaited value."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, path: Path, width: int = 1400, height: int = 900) -> None:
        """Load a file and wait until the page has drawn."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=path.absolute().as_uri())
        self.wait_for("document.body && document.body.dataset.drawn === 'yes'")

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript condition is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._holds(condition):
            assert not self.problems, self.problems
            assert time.monotonic() < deadline, f"{condition} never became true"
            time.sleep(0.02)

    def _holds(self, condition: str) -> bool:
        try:
            return bool(self.evaluate(f"Boolean({condition})"))
        except ReloadedError:
            return False

    def press(self, key: str) -> None:
        """Press and release Tab or Enter."""
        code, content = {"Tab": (9, ""), "Enter": (13, "\r")}[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=content, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """Write a picture of the visible part, or of the whole page."""
        data = self.call(
            "Page.captureScreenshot", captureBeyondViewport=whole, **({"clip": self._page()} if whole else {})
        )
        path.write_bytes(base64.b64decode(data["data"]))

    def _page(self) -> dict[str, Any]:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}


@contextmanager
def chromium(folder: Path) -> Iterator[Chromium]:
    """Start a browser with its profile in `folder` and no network: every host name is unknown."""
    to_browser, from_us = os.pipe()
    to_us, from_browser = os.pipe()
    arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    arguments += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder}", "--remote-debugging-pipe"]
    # The browser speaks the protocol on descriptors 3 and 4.
    shell = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "-", executable(), *arguments, "about:blank"],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Chromium(from_us, to_us)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(from_us)
        os.close(to_us)
