# SPDX-License-Identifier: Apache-2.0
"""The loss scales among the arguments of a step."""

from typing import Any, NamedTuple

import numpy as np

from jls._state import is_scaler_state
from jls._tools.reading.arguments import Arguments, Keys, nodes_by_path


class Scale(NamedTuple):
    """One loss scale among the leaves of the arguments."""

    name: str
    at: int  # the index of the leaf `loss_scale`
    state: frozenset[int]  # all leaves of the scaler's state
    counters: dict[str, int]  # leaves of the wrapper around it, by name; {} if bare
    own: frozenset[int]  # all leaves that are jls's own
    fields: dict[str, int]  # leaves of the scaler's state, by name
    spikes: dict[str, int]  # leaves of the spike policy's state, by name; {} if none
    path: Keys  # the path of the wrapper's state, or of the scaler's if it is bare

    @property
    def is_static(self) -> bool:
        return len(self.state) == 1


def scales_in(
    args: tuple[Any, ...], kwargs: dict[str, Any], arguments: Arguments
) -> list[Scale]:
    """The loss scales among the arguments of a step, [] if there are none."""
    nodes, _ = nodes_by_path((args, kwargs), arguments.names, is_scaler_state)
    names = [without_value(item.path) for item in arguments.items]
    # A state from `nnx.split` has lost the types of its nodes.
    prefixes = [path for path, node in nodes if is_scaler_state(node)] or [
        name[:-1] for name in names if name[-1] == "loss_scale"
    ]
    scales = []
    for prefix in dict.fromkeys(prefixes):
        state = {i for i, x in enumerate(names) if x[: len(prefix)] == prefix}
        fields = {names[i][-1]: i for i in state}
        around = prefix[:-1]
        counters = {name[-1]: i for i, name in enumerate(names) if name[:-1] == around}
        if "skips" not in counters or "steps" not in counters:
            counters = {}
        policy = (*around, "spike_state")
        spikes = {
            "/".join(name[len(policy) :]): i
            for i, name in enumerate(names)
            if counters and name[: len(policy)] == policy
        }
        if "loss_scale" in fields:
            scales.append(
                Scale(
                    "/".join(prefix),
                    fields["loss_scale"],
                    frozenset(state),
                    counters,
                    frozenset([*state, *counters.values(), *spikes.values()]),
                    fields,
                    spikes,
                    around if counters else prefix,
                )
            )
    return scales


def without_value(path: Keys) -> Keys:
    """The path of an NNX variable without its last key."""
    if not path:
        return path
    *above, last = path
    is_key = last in ("value", "raw_value")
    # A `SpikeState` has a field of that name.
    return tuple(above) if is_key and above[-1:] not in ([], ["spike_state"]) else path


def is_switched_off(leaf: Any, scale: Scale) -> bool:
    """Whether the scale, of which `leaf` is the number, is `jls.skip_nonfinite`'s."""
    return scale.is_static and bool(np.all(np.asarray(leaf) == 1))
