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
    module begins another. Every visit counts, except for another turn of a loop: each
    call site once, and each return to it. Which functions are on the way, `is_on_way`
    says; a lambda or a comprehension is none.
    """

    def __init__(self, call):
        self.modules = []  # one for each stay
        self.calls = []  # the names of the functions, with each turn of a loop
        self._visits = set()
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
        caller = _caller(frame)
        site = (caller.f_code, caller.f_lasti) if is_of_jls(caller) else None
        if (visit := (site, frame.f_code, event)) in self._visits:
            return
        self._visits.add(visit)
        if event == "call":
            self._stay(frame)
        elif site:
            self._stay(caller)

    def _stay(self, frame):
        module = frame.f_code.co_filename
        if self.modules[-1:] != [module]:
            self.modules.append(module)


class CallWalk(Walk):
    """What a tool of jls does with a user's function and its arguments.

    On the way are the functions that are handed the function, one of the `holders` of
    it or of its arguments, or a tuple or a list of these. What is read of its program,
    or noted of a run, are facts: they do not carry it.
    """

    def __init__(self, tool, fun, args, holders):
        self._fun, self._holders = fun, holders
        super().__init__(lambda: tool(fun, *args))

    def is_on_way(self, frame, event):
        return any(self._carries(x) for x in self.arguments(frame).values())

    def _carries(self, value, depth=3):
        if value is self._fun or isinstance(value, self._holders):
            return True
        is_row = depth and isinstance(value, tuple | list)
        return bool(is_row) and any(self._carries(x, depth - 1) for x in value)


def _caller(frame):
    """The function that calls, around lambdas and comprehensions."""
    caller = frame.f_back
    while is_of_jls(caller) and caller.f_code.co_name.startswith("<"):
        caller = caller.f_back
    return caller
