"""The way of an object through the modules of jls, as `sys.setprofile` sees it."""

import sys
from pathlib import Path

import jls

ROOT = str(Path(jls.__file__).parent)


def is_of_jls(frame):
    return frame is not None and frame.f_code.co_filename.startswith(ROOT)


class Walk:
    """What a call does with an object.

    A stay is a run of functions on its way in one module; to come back to the caller's
    module begins another. Which functions are on the way, `is_on_way` says; a lambda or
    a comprehension is none.
    """

    def __init__(self, call):
        self.modules = []  # one for each stay
        self.calls = []  # the names of the functions
        sys.setprofile(self._on_event)
        try:
            call()
        finally:
            sys.setprofile(None)

    def is_on_way(self, frame, event):
        raise NotImplementedError

    def arguments(self, frame):
        """Those of a function, by name."""
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return {name: frame.f_locals.get(name) for name in names}

    def _on_event(self, frame, event, _):
        is_way = event in ("call", "return") and is_of_jls(frame)
        if not is_way or frame.f_code.co_name.startswith("<"):
            return
        if not self.is_on_way(frame, event):
            return
        if event == "call":
            self.calls.append(frame.f_code.co_name)
            self._stay(frame)
        elif is_of_jls(frame.f_back):
            self._stay(frame.f_back)

    def _stay(self, frame):
        module = frame.f_code.co_filename
        if self.modules[-1:] != [module]:
            self.modules.append(module)
