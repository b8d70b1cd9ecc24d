"""Chromium without a window, driven over the DevTools protocol's pipe: JSON messages that end in a zero byte."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe", "about:blank",
)  # fmt: skip


def chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for path in map(shutil.which, names) if path), None)


class AwayError(Exception):
    """The page went elsewhere while it was asked."""


class Browser:
    """One browser with one page; what the page requested and complained about is kept."""

    def __init__(self, writer: int, reader: int) -> None:
        self.writer, self.reader, self.buffer, self.number = writer, reader, b"", 0
        self.session: str | None = None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        os.write(
            self.writer, json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode() + b"\0"
        )
        while True:
            answer = self._next(60)
            assert answer is not None, f"no answer to {method}"
            if answer.get("id") == self.number:
                if "navigated" in answer.get("error", {}).get("message", ""):
                    raise AwayError
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self, seconds: float) -> dict[str, Any] | None:
        """Return the next message, or None after so many seconds; keep what events tell."""
        while b"\0" not in self.buffer:
            if not select.select([self.reader], [], [], seconds)[0]:
                return None
            self.buffer += os.read(self.reader, 1 << 20)
        text, _, self.buffer = self.buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        event, params = message.get("method"), message.get("params", {})
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:2000])
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"])[:2000])
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(json.dumps(params["entry"])[:2000])
        return message

    def size(self, width: int, height: int, *, mobile: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def prefer(self, scheme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, page: Path, choices: str = "") -> float:
        """Load a page anew and return the seconds until it was drawn."""
        self.call("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank' && document.readyState === 'complete'")
        self.requests.clear()
        self.complaints.clear()
        start = time.perf_counter()
        self.call("Page.navigate", url=page.resolve().as_uri() + (f"#{choices}" if choices else ""))
        self.wait("document.readyState === 'complete' && document.documentElement?.dataset.ready === 'true'")
        return time.perf_counter() - start

    def do(self, script: str) -> Any:
        """Run a script in the page and return its value."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with suppress(AwayError):
                if self.do(condition):
                    return
            self._next(0.05)
        raise AssertionError(f"never true: {condition}")

    def press(self, key: str, *, shift: bool = False) -> None:
        codes = {"Tab": (9, ""), "Enter": (13, "\r"), "ArrowRight": (39, ""), " ": (32, " ")}
        code, text = codes[key]
        common = {"key": key, "code": key.replace(" ", "Space"), "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def shot(self, path: Path, *, whole: bool = True) -> None:
        image = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(image["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start Chromium, hand it out, and end it."""
    executable = chromium()
    assert executable is not None
    # Chromium reads commands from descriptor 3 and answers on 4.
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (theirs_in, theirs_out)]

    def place() -> None:
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    with (profile / "log").open("wb") as log:
        process = subprocess.Popen(
            [executable, f"--user-data-dir={profile}", *FLAGS],
            preexec_fn=place,  # noqa: PLW1509 - there are no threads here
            pass_fds=(3, 4), stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    for fd in (theirs_in, theirs_out, *high):
        os.close(fd)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        for fd in (ours_out, ours_in):
            os.close(fd)  # Chromium ends when its pipe does
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
