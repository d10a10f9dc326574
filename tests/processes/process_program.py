# SPDX-License-Identifier: Apache-2.0
"""One of several processes that train together; test_processes.py starts them.

    python process_program.py RANK PROCESSES DEVICES PORT FILE

Every process runs the same lines on its DEVICES host devices, and writes what it has
seen to FILE. One of the examples overflows, on one device of one process.
"""

import json
import sys
from pathlib import Path

import jax

RANK, PROCESSES, DEVICES, PORT = map(int, sys.argv[1:5])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    f"127.0.0.1:{PORT}",
    num_processes=PROCESSES,
    process_id=RANK,
    initialization_timeout=60,
)

import jax.numpy as jnp  # noqa: E402, only now may JAX look for devices
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

import jls  # noqa: E402

P = PartitionSpec
MESH = jax.make_mesh((jax.device_count(),), ("d",), (AxisType.Auto,))
SPLIT, WHOLE = NamedSharding(MESH, P("d")), NamedSharding(MESH, P())
RNG = np.random.default_rng(0)
PARAMS = {
    "b": np.zeros(4, np.float32),
    "w": RNG.standard_normal((8, 4), np.float32),
}
X = RNG.standard_normal((16, 8), np.float32)
# One number on the last device; of the gradients, one row on the last but one.
BAD = X.copy()
BAD[13, 5] = 3e4
BATCHES = [X, X[::-1], BAD, -X, X]


def put(array, sharding):
    return jax.make_array_from_callback(array.shape, sharding, lambda at: array[at])


def loss_fn(params, x):
    half = {name: param.astype(jnp.float16) for name, param in params.items()}
    y = (x.astype(jnp.float16) @ half["w"] + half["b"]).astype(jnp.float32)
    return jnp.mean(jnp.sqrt(1.0 + (y - 1.0) ** 2))


def optimizer_of(**options):
    scaler = jls.dynamic(2.0**14, growth_interval=2)
    return jls.loss_scaled(optax.adamw(1e-2), scaler, **options)


def jitted(optimizer):
    @jax.jit
    def step(params, state, x):
        loss, grads = jls.value_and_grad(loss_fn)(state, params, x)
        updates, state = optimizer.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss, grads

    return step


def mapped(optimizer):
    """By hand: each device gathers what is split, the user takes the mean."""
    specs = {"b": P(), "w": P("d")}
    state = jax.eval_shape(optimizer.init, PARAMS)
    state_specs = jax.tree.map(
        lambda leaf: P("d") if leaf.shape == PARAMS["w"].shape else P(), state
    )

    @jax.jit
    @jax.shard_map(
        mesh=MESH,
        in_specs=(specs, state_specs, P("d")),
        out_specs=(specs, state_specs, P(), specs),
    )
    def step(params, state, x):
        def mean_loss(params):
            w = lax.all_gather(params["w"], "d", tiled=True)
            return lax.pmean(loss_fn({"b": params["b"], "w": w}, x), "d")

        loss, grads = jls.value_and_grad(mean_loss)(state, params)
        updates, state = optimizer.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss, grads

    return step


replicated = jax.jit(lambda tree: tree, out_shardings=WHOLE)


def as_hex(tree):
    return [np.asarray(leaf).tobytes().hex() for leaf in jax.tree.leaves(tree)]


def local_bits(tree):
    """What this process holds of `tree`."""
    return [
        np.asarray(shard.data).tobytes()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    ]


def train(optimizer, make_step, sharding):
    params = {name: put(array, sharding) for name, array in PARAMS.items()}
    if sharding is SPLIT:
        params["b"] = put(PARAMS["b"], WHOLE)  # too small to be split
    state, step, seen = optimizer.init(params), make_step(optimizer), []
    for x in BATCHES:
        before = local_bits((params, state.inner_state))
        params, state, loss, grads = step(params, state, put(x, SPLIT))
        after = local_bits((params, state.inner_state))
        numbers = {name: x.item() for name, x in jls.metrics(state).items()}
        seen.append(numbers | {"loss": loss.item(), "moved": before != after})
        if not numbers["applied"]:
            found = jls.health(state, params, grads=grads).numbers
    state = jls.set_loss_scale(state, 64.0)
    step(params, state, put(X, SPLIT))
    jls.check_in_sync(state)
    return {
        "steps": seen,
        "state": as_hex(state._replace(inner_state=())),
        "params": as_hex(replicated(params)),
        "inner_state": as_hex(replicated(state.inner_state)),
        "placed": [
            leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            for leaf in state.inner_state[0].mu.values()
        ],
        "compiled": step._cache_size(),
        "bad": found["nonfinite_leaves"],
        "small": found["small"],
        "health": jls.health(state, params).sentence,
        # Without the parameters it reads numbers that every process has: one may ask.
        "health of rank 0": jls.health(state).sentence if RANK == 0 else None,
    }


def requeued():
    """Which batches were tried, which were used, and which are bad."""
    optimizer = optimizer_of()
    params = {name: put(array, WHOLE) for name, array in PARAMS.items()}
    opt_state, tries, used = optimizer.init(params), [], []
    step = jax.jit(jls.train_step(loss_fn, optimizer))
    worse = X.copy()
    worse[0, 0] = np.nan
    batches = enumerate([X, BAD, X[::-1], worse, -X, X])
    queue = jls.requeue(batches, retries=20)
    for index, x in queue:
        params, opt_state, report = step(params, opt_state, put(x, SPLIT))
        queue.observe(report)
        tries.append(index)
        used += [] if report.skipped else [index]
    bad = [(bad.index, bad.reason.name) for bad in queue.bad]
    # As jax.pmap returns it: each process can only read its own part.
    ones = put(np.ones(MESH.size, np.int32), SPLIT)
    by_device = jls.requeue(["comes again"], lag=0)
    next(by_device)
    by_device.observe(report._replace(skip_reason=ones, loss_scale=ones))
    return {
        "tries": tries,
        "used": used,
        "bad": bad,
        "params": as_hex(params),
        "by device": by_device.outstanding(),
    }


def unbound_axis():
    params = put(PARAMS["w"], SPLIT)
    optimizer = optimizer_of(axis_name="rows")
    state = optimizer.init(params)
    try:
        jax.jit(optimizer.update)(params, state, params)
    except NameError as error:
        return str(error)
    return None


def spiking():
    """Whether the steps are applied: gradients of one process are a spike."""
    optimizer = jls.skip_nonfinite(
        optax.sgd(0.1), axis_name="d", spikes=jls.spikes(window=4)
    )
    params = put(np.zeros(MESH.size, np.float32), SPLIT)
    state = jax.jit(optimizer.init, out_shardings=WHOLE)(jnp.zeros(1))

    @jax.jit
    @jax.shard_map(mesh=MESH, in_specs=(P("d"), P(), P("d")), out_specs=(P("d"), P()))
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    applied = []
    for wild in (False, False, False, True, False):
        grads = np.ones(MESH.size, np.float32)
        grads[-1] = 1e3 if wild else 1.0
        params, state = step(params, state, put(grads, SPLIT))
        applied.append(bool(state.applied))
    jls.check_in_sync(state)
    return applied, as_hex(state.spike_state)


def out_of_sync():
    """What is said of states that differ between processes, and between devices."""
    whole = optimizer_of().init({name: put(PARAMS[name], WHOLE) for name in PARAMS})
    by_process = jls.set_loss_scale(jls.dynamic().init(), 8.0 * 2**RANK)
    counts = [
        jax.device_put(np.int32(5 if d.id == 1 else 0), d) for d in jax.local_devices()
    ]
    drifted = jax.make_array_from_single_device_arrays((), WHOLE, counts)
    messages = []
    for state in (by_process, whole._replace(steps=drifted)):
        try:
            jls.check_in_sync(state)
        except ValueError as error:
            messages.append(str(error))
    return messages


def check_of_global_arrays():
    optimizer = optimizer_of()
    params = {name: put(PARAMS[name], WHOLE) for name in PARAMS}
    try:
        jls.check_step(jitted(optimizer), params, optimizer.init(params), put(X, SPLIT))
    except ValueError as error:
        return str(error)
    return None


if __name__ == "__main__":
    assert jax.process_count() == PROCESSES
    assert jax.local_device_count() == DEVICES
    found = {
        "data": train(optimizer_of(), jitted, WHOLE),
        "fsdp": train(optimizer_of(), jitted, SPLIT),
        "shard_map": train(optimizer_of(axis_name="d"), mapped, SPLIT),
        "unbound": unbound_axis(),
        "requeued": requeued(),
        "spiking": spiking(),
        "out of sync": out_of_sync(),
        "check": check_of_global_arrays() if PROCESSES > 1 else None,
    }
    Path(sys.argv[5]).write_text(json.dumps(found))
    jax.distributed.shutdown()
