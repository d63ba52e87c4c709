"""What the panels of a lab share: they look at it by themselves, until they are closed or there is nothing to see."""

import threading
import time
from typing import Any

import ipywidgets

from pdlab.views.shown import ErrorLine, guarded, style

LOOK = 0.5  # seconds between two looks


class Watching(ipywidgets.VBox):
    """A panel that shows what a lab is now. Who makes one calls `begin` with its parts, and says what `look` does.

    Args:
        name: of the thread that looks.
    """

    def __init__(self, lab: Any, name: str) -> None:
        super().__init__()
        # What a panel asks by itself is no call of the notebook's: a lab whose calls are noted is looked through.
        self.lab, self._name, self._error = getattr(lab, "_live", lab), name, ErrorLine()
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    def begin(self, *parts: ipywidgets.Widget) -> None:
        """Show these parts, look once, and go on looking."""
        self.children = [style(), *parts, self._error]
        guarded(self._error, self.look)()
        self.watch()

    def look(self, *_: Any) -> None:
        """See what is so now, and show it."""
        raise NotImplementedError

    def is_over(self) -> bool:
        """Whether the lab is down: its proxy has ended, so nothing new comes, and `down()` ends it with the rest."""
        if self.lab.proxy.process.alive:
            return False
        return not self.lab.status()["servers"]["proxy"]["up"]  # which knows if another process healed it

    def watch(self) -> None:
        """Look from now on, if it does not already. A recorded run does not change by itself."""
        if is_recorded(self.lab) or (self._watcher is not None and self._watcher.is_alive()):
            return
        self._error.clear()
        self._watcher = threading.Thread(target=self._watch, name=self._name, daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Look no more, and go."""
        self._closed.set()
        super().close()

    def _watch(self) -> None:
        """Look until it is closed or the lab is down. Slowly where a look takes long: the trace may be big."""
        pause = LOOK
        while not self._closed.wait(pause):
            began = time.monotonic()
            try:
                if self.is_over():
                    return self._error.say("the lab is down")
                self.look()
            except Exception as error:
                return self._error.say(error)
            pause = max(LOOK, 5 * (time.monotonic() - began))
        return None

    def button(self, words: str, callback: Any) -> ipywidgets.Button:
        """A button whose callback's error is shown in the panel."""
        button = ipywidgets.Button(description=words, layout={"width": "90px"})
        button.on_click(guarded(self._error, callback))
        return button


def is_recorded(lab: Any) -> bool:
    from pdlab.recorded.player import RecordedLab

    return isinstance(lab, RecordedLab)
