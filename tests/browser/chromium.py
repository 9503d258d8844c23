"""Headless Chromium, driven over a pipe by its DevTools protocol: what a page is in it, measured and photographed.

It is found by $CUTLINE_CHROMIUM or in PATH, and may look up no host. Protocol:
https://chromedevtools.github.io/devtools-protocol/ (messages are JSON, each ended by a zero byte).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fcntl import F_DUPFD, fcntl
from pathlib import Path
from typing import Any, BinaryIO

VARIABLE = "CUTLINE_CHROMIUM"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe", "about:blank",
)  # fmt: skip
END_SECONDS_MAX = 20.0


def find_chromium() -> str | None:
    """The program; None if there is none."""
    return os.environ.get(VARIABLE) or next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass(slots=True)
class Browser:
    """A page in the browser. `events` are those that came since the last look, by their method."""

    requests: BinaryIO
    answers: BinaryIO
    session: str = ""
    number: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.requests.write(json.dumps(message).encode() + b"\0")
        self.requests.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer)
                return dict(answer["result"])

    def _read(self) -> dict[str, Any]:
        body = bytearray()
        while (one := self.answers.read(1)) != b"\0":
            assert one, "the browser has ended"
            body += one
        message = dict(json.loads(body))
        if "method" in message:
            self.events.append(message)
        return message

    def show(self, file: Path, *, width: int, is_dark: bool) -> list[str]:
        """Load the file as a device of this width; return the addresses that it has asked for and may load."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=scheme)
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        self.ask("Page.navigate", url=file.as_uri())
        asked: dict[str, str] = {}
        while True:
            methods = [event["method"] for event in self.events]
            for event in self.events:
                values = event["params"]
                if event["method"] == "Network.requestWillBeSent":
                    asked[values["requestId"]] = values["request"]["url"]
                elif event["method"] == "Network.loadingFailed" and values.get("blockedReason") == "csp":
                    asked.pop(values["requestId"])
            self.events.clear()
            if "Page.loadEventFired" in methods:
                return list(asked.values())
            self._read()

    def value(self, expression: str) -> Any:
        """The value of an expression in JavaScript, which works whatever the page forbids."""
        result = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def photograph(self, clip: dict[str, float] | None = None) -> bytes:
        """The page, or a part of it, as PNG."""
        more = {"clip": {**clip, "scale": 1}} if clip else {}
        found = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True, **more)
        return base64.b64decode(found["data"])


@contextmanager
def chromium(program: str, profile: Path) -> Iterator[Browser]:
    """Run the browser with an empty profile."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()

    def place() -> None:
        # The browser reads requests from 3 and writes answers to 4; neither number may be taken while the other moves.
        high_read, high_write = (fcntl(one, F_DUPFD, 10) for one in (to_read, from_write))
        os.dup2(high_read, 3)
        os.dup2(high_write, 4)

    process = subprocess.Popen(
        [program, f"--user-data-dir={profile}", *FLAGS], preexec_fn=place, close_fds=False,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(to_read)
    os.close(from_write)
    with os.fdopen(to_write, "wb") as requests, os.fdopen(from_read, "rb") as answers:
        try:
            browser = Browser(requests, answers)
            target = browser.ask("Target.createTarget", url="about:blank")["targetId"]
            browser.session = browser.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            browser.ask("Page.enable")
            browser.ask("Network.enable")
            yield browser
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
