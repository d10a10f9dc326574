# SPDX-License-Identifier: Apache-2.0
"""Public names of the tools, which are loaded when they are used.

A training job uses none of them, and does not wait for their import.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jls import _elsewhere


def attach(
    module: str, tools: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """What a module calls `__getattr__`, `__dir__` and `__all__`.

    Args:
      module: its name. All that it imports at once is there by now.
      tools: the module below `jls._tools` that has each of the other names.
    """
    names = vars(sys.modules[module])
    public = [name for name in names if not name.startswith("_")]

    def get(name: str) -> Any:
        if name not in tools:
            raise _elsewhere.attribute_error(module, name)
        found = importlib.import_module(f"jls._tools.{tools[name]}")
        names[name] = getattr(found, name)
        return names[name]

    return get, lambda: sorted({*names, *tools}), [*public, *tools]
