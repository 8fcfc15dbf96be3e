"""Headless Chromium for tests, through the DevTools protocol over a pair of pipes.

A message is JSON that ends with a zero byte. Chromium reads them from file descriptor 3 and writes
them to 4. https://chromedevtools.github.io/devtools-protocol/ has the methods and events.
"""

import fcntl
import json
import os
import select
import shutil
import signal
import time

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
PATIENCE = 20.0  # seconds that any answer may take


def installed():
    """The path of Chromium, None where it is not installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A Chromium with a profile of its own in `folder`; killed at the end of a with statement."""

    def __init__(self, folder):
        self._folder = folder
        self._last = 0
        self._read = b""
        self._answers = {}
        self._pages = {}

    def __enter__(self):
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        # Above 4, so that neither is overwritten before it is copied to its place.
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (theirs_in, theirs_out)]
        devices = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        pipes = [(os.POSIX_SPAWN_DUP2, fd, to) for fd, to in zip(moved, (3, 4), strict=True)]
        self._process = os.posix_spawn(
            installed(),
            ["chromium", *FLAGS, f"--user-data-dir={self._folder}"],
            {**os.environ, "HOME": str(self._folder)},  # it leaves files there too
            file_actions=devices + pipes,
            setpgroup=0,
        )
        for fd in (theirs_in, theirs_out, *moved):
            os.close(fd)
        return self

    def __exit__(self, *_):
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._to)
        os.close(self._from)

    def open(self, url, width=1200, height=900, scripts=True, dark=False):
        """A page once it is loaded, on a screen of this width, in light or dark colours."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        page.call("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        page.call("Page.navigate", url=url)
        self.wait(lambda: page.events("Page.loadEventFired"))
        return page

    def call(self, method, session=None, **parameters):
        """The result of a method of the protocol."""
        self._last = number = self._last + 1
        message = {"id": number, "method": method, "params": parameters}
        message |= {"sessionId": session} if session else {}
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        self.wait(lambda: number in self._answers)
        answer = self._answers.pop(number)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def wait(self, condition):
        """Take in messages until the condition holds."""
        end = time.monotonic() + PATIENCE
        while not condition():
            ready, *_ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"Chromium said nothing for {PATIENCE} s"
            data = os.read(self._from, 1 << 20)
            assert data, "Chromium ended"
            *messages, self._read = (self._read + data).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers[message["id"]] = message
                elif message.get("sessionId") in self._pages:
                    self._pages[message["sessionId"]].heard.append(message)


class Page:
    def __init__(self, browser, session):
        self.browser = browser
        self.session = session
        self.heard = []

    def call(self, method, **parameters):
        return self.browser.call(method, self.session, **parameters)

    def events(self, method):
        return [message["params"] for message in self.heard if message["method"] == method]

    def evaluate(self, expression):
        """The value of a JavaScript expression, also where the page itself may run none."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def complaints(self):
        """Everything in the console, exceptions and violations of the page's policy among it."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event for kind in kinds for event in self.events(kind)]

    def requests(self):
        """The addresses of everything that was asked for."""
        return [event["request"]["url"] for event in self.events("Network.requestWillBeSent")]

    def click(self, selector):
        """Press and release the mouse in the middle of the first element that is selected."""
        box = self.evaluate(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const b = e.getBoundingClientRect();"
            "return {x: b.x + b.width / 2, y: b.y + b.height / 2}; })"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **box)

    def press(self, key, code, text=""):
        """Press and release a key."""
        known = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **known)
        self.call("Input.dispatchKeyEvent", type="keyUp", **known)
