"""Headless Chromium over a pipe: just enough to look at a page, press its buttons and take pictures.

with Browser.find() as browser:
    page = browser.page("http://127.0.0.1:8000/", width=360, dark=True)
    page.wait("document.readyState === 'complete'"); page.picture("page.png")

It is the one that ATTRACTOR_CHROMIUM names, or one on the PATH.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path

NO_CHARTS = "window.Plotly = {react() {}, purge() {}};"  # all that is asked of it
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def chromium():
    named = os.environ.get("ATTRACTOR_CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    def __init__(self, command):
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        there, self._out = os.pipe()
        self._in, back = os.pipe()
        options = [
            "--headless",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-extensions",
            "--disable-background-networking",
            "--remote-debugging-pipe",
            f"--user-data-dir={self._folder.name}",
        ]
        if os.geteuid() == 0:
            options.append("--no-sandbox")  # Chromium has none for root
        # Chromium reads its orders from 3 and answers on 4.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (there, back)]
        actions = [
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, ends[0], 3),
            (os.POSIX_SPAWN_DUP2, ends[1], 4),
        ]
        self._process = os.posix_spawn(command, [command, *options], os.environ, file_actions=actions)
        for end in (there, back, *ends):
            os.close(end)
        self._number, self._rest = 0, b""
        self.events, self._shown = [], None

    @classmethod
    def find(cls):
        command = chromium()
        return None if command is None else cls(command)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.kill(self._process, signal.SIGTERM)
        os.waitpid(self._process, 0)
        os.close(self._out)
        os.close(self._in)
        self._folder.cleanup()

    def call(self, method, session=None, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self.events.append(answer)

    def _receive(self, seconds=300.0):
        end = time.monotonic() + seconds
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            self._rest += os.read(self._in, 1 << 20)
        first, _, self._rest = self._rest.partition(b"\0")
        return json.loads(first)

    def page(self, url, width=1280, height=900, dark=False, charts=True):
        """In place of the one before, which would go on asking its server. Without charts it is quicker."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        if self._shown is not None:
            self.call("Target.closeTarget", targetId=self._shown)
        self._shown = target
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        if not charts:
            page.call("Network.setBlockedURLs", urls=["*plotly*"])
            page.call("Page.addScriptToEvaluateOnNewDocument", source=NO_CHARTS)
        page.call("Page.navigate", url=url)
        page.wait("location.protocol !== 'about:' && document.readyState === 'complete'")
        return page


class Page:
    def __init__(self, browser, session):
        self._browser, self._session = browser, session

    def call(self, method, **parameters):
        return self._browser.call(method, self._session, **parameters)

    def evaluate(self, script):
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script, seconds=300.0):
        end = time.monotonic() + seconds
        while not self.evaluate(script):
            assert time.monotonic() < end, f"this did not become true: {script}"
            time.sleep(0.05)

    def press(self, key):
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        more = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                **more,
            )

    def picture(self, path, height=None):
        """The page from its top, as high as this or as a whole."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        Path(path).write_bytes(base64.b64decode(data))

    def complaints(self):
        """What the page had to say on its console, and everything that its policy stopped."""
        self.evaluate("0")  # whatever was said before comes first
        told = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            parameters = event.get("params", {})
            if event["method"] == "Log.entryAdded":
                told.append(parameters["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
                told.append(str([argument.get("value") for argument in parameters["args"]]))
            elif event["method"] == "Runtime.exceptionThrown":
                told.append(
                    parameters["exceptionDetails"].get("exception", {}).get("description", "exception")
                )
        return told

    def requests(self):
        self.evaluate("0")
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event["method"] == "Network.requestWillBeSent" and event.get("sessionId") == self._session
        ]
