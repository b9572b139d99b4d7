"""A headless Chromium, if one is installed, driven over a pipe (the DevTools protocol)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

FOUND = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page. `errors` collects errors of its scripts and requests."""

    def __init__(self, folder: Path, width: int = 900, height: int = 800, dark: bool = False) -> None:
        assert FOUND is not None
        mine_in, its_out = os.pipe()
        its_in, mine_out = os.pipe()
        os.set_inheritable(its_in, True)
        os.set_inheritable(its_out, True)
        shell = f'exec "$@" 3<&{its_in} 4>&{its_out}'
        command = [
            FOUND, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command], pass_fds=(its_in, its_out), stderr=subprocess.DEVNULL
        )
        os.close(its_in)
        os.close(its_out)
        self._in, self._out = os.fdopen(mine_in, "rb"), os.fdopen(mine_out, "wb")
        self._number, self._session = 0, ""
        self._seen = b""
        self.errors: list[str] = []
        self.requested: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _read(self) -> Any:
        while b"\0" not in self._seen:
            data = os.read(self._in.fileno(), 1 << 16)
            assert data, "the browser ended"
            self._seen += data
        one, _, self._seen = self._seen.partition(b"\0")
        event = json.loads(one)
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(event["params"]["exceptionDetails"]))
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.errors.append(str(event["params"]["entry"]))
        if event.get("method") == "Network.requestWillBeSent":
            self.requested.append(event["params"]["request"]["url"])
        return event

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = 20) -> Any:
        """Wait until an expression is true; returns its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"{script}: waited {seconds} s; {self.run('document.body.innerText')}"
            time.sleep(0.02)
        return value

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def key(self, key: str, code: int, modifiers: int = 0) -> None:
        """modifiers: 1 Alt, 8 Shift"""
        more: dict[str, Any] = {"text": "\r"} if key == "Enter" else {}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def hover(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._in.close()
        self._out.close()
