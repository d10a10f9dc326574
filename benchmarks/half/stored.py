"""Fine-tunes a transformer at small learning rates, its parameters stored in four ways.

First trained in float32 on the modules of Python's standard library, then with adamw on
Python's manual, whose last tenth is for validation. All compute in float32 from the
same bfloat16 numbers: they differ in what is stored. Prints the loss on the validation,
and how far the parameters went along the way of float32, 1 if as far. Of bytes, or with
`--words` of words: then most of the model is an embedding, of words that occur as often
as words do, and the way of that is printed too.
"""

import argparse
import json
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jls
from benchmarks.half.models import transformer
from benchmarks.half.training import BYTES, SIZES, Size, batches, text
from jls._state import rounds_bfloat16

FOLDER = "pydoc_data"  # of the manual
WORD = re.compile(rb"[A-Za-z_]+|[0-9]+|\s+|.", re.DOTALL)
SMALL = Size((64, 2, 2), (8, 64), 16)  # on a CPU 36 runs take minutes
LEARNING_RATES = (1e-6, 3e-6, 1e-5)
WAYS: dict[str, Callable[[Any], Any]] = {
    "float32": lambda inner: inner,
    "plain bfloat16": lambda inner: inner,
    "stochastic": lambda inner: jls.skip_nonfinite(jls.bfloat16_params(inner)),
    "exact": lambda inner: jls.skip_nonfinite(
        jls.bfloat16_params(inner, rounding="exact")
    ),
}

wide = partial(optax.tree.cast, dtype=jnp.float32)


def numbered(texts: Sequence[np.ndarray], words: int) -> list[np.ndarray]:
    """Texts as the numbers of their words; 0 is any but the most frequent ones."""
    split = [WORD.findall(x.tobytes()) for x in texts]
    common = Counter(word for x in split for word in x).most_common(words - 1)
    number = {word: i for i, (word, _) in enumerate(common, 1)}
    return [np.array([number.get(x, 0) for x in y], np.int32) for y in split]


def trained(
    loss_fn: Any, optimizer: Any, params: Any, fed: Any, steps: int, checks: int
) -> Iterator[tuple[int, Any]]:
    """Trains, and gives the float32 parameters so many times."""

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        if rounds_bfloat16(state):
            grads = jls.grad(loss_fn)(state, params, batch)
        else:
            grads = jax.grad(loss_fn)(wide(params), batch)  # they add up in float32
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(optimizer.init)(params)
    params = jax.tree.map(jnp.copy, params)  # the step overwrites them
    for i in range(1, steps + 1):
        params, state = step(params, state, next(fed))
        if i % max(1, steps // checks) == 0:
            yield i, jax.tree.map(jnp.copy, jls.master_params(params, state))


def share(moved: Any, right: Any, start: Any) -> float:
    """How far parameters went along the right way, 1 if as far."""
    one, other = (optax.tree.sub(tree, start) for tree in (moved, right))
    along, whole = (float(jnp.real(optax.tree.vdot(x, other))) for x in (one, other))
    return along / whole


def runs(
    size: Size, steps: tuple[int, int], seed: int, words: int = 0
) -> Iterator[tuple[float, str, dict[str, Any]]]:
    """The learning rate, the way, and what came of it; the start is step 0."""
    model = transformer("unrolled", (words or BYTES, *size.shape), size.tokens)

    def loss_fn(params, batch):
        return model.loss()(params, {}, batch)[0]

    manual = Path(sysconfig.get_path("stdlib"), FOLDER, "topics.py").read_bytes()
    texts = [text(FOLDER), np.frombuffer(manual, np.uint8)]
    modules, manual = numbered(texts, words) if words else texts
    seen, unseen = np.split(manual, [len(manual) * 9 // 10])
    count, length = size.tokens
    check = next(batches(unseen, (count * size.validated, length), 0))
    validate = jax.jit(partial(loss_fn, batch=check))
    made = jax.jit(model.make(None).init)(jax.random.key(seed), check[0][:count])
    optimizer = optax.adamw(optax.cosine_decay_schedule(1e-3, steps[0]))
    fed = batches(modules, size.tokens, seed)
    ((_, params),) = trained(loss_fn, optimizer, made["params"], fed, steps[0], 1)
    start = optax.tree.cast(params, jnp.bfloat16)
    for learning_rate in LEARNING_RATES:
        right = []
        for way, optimizer_of in WAYS.items():
            optimizer = optimizer_of(optax.adamw(learning_rate))
            begun = wide(start) if way == "float32" else start
            fed = batches(seen, size.tokens, seed)
            one: dict[str, Any] = {"seed": seed, "steps": [0], "ways": [0.0]}
            one["embedding"] = [0.0]
            one["losses"] = [float(validate(wide(start)))]
            for i, params in trained(loss_fn, optimizer, begun, fed, steps[1], 12):
                right += [params] if way == "float32" else []
                float32 = right[len(one["steps"]) - 1]
                one["steps"].append(i)
                one["losses"].append(float(validate(params)))
                trees: list[Any] = [params, float32, wide(start)]
                one["ways"].append(share(*trees))
                one["embedding"].append(share(*(x["Embed_0"] for x in trees)))
            yield learning_rate, way, one


def table(results: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """Rows of ways: the mean loss at the end, and the way gone, also by the embedding.

    By learning rate.
    """

    def cells(way, place):
        for ways in results.values():
            names = "losses", "ways", "embedding"
            found = [[x[name][place] for name in names] for x in ways[way]]
            yield "{:.4f}, {:.2f}, {:.2f}".format(*np.mean(found, axis=0))

    rows = [
        ["parameters", *(f"learning rate {rate}" for rate in results)],
        ["---", *["--:"] * len(results)],
        ["at the start", *cells("float32", 0)],
        *([way, *cells(way, -1)] for way in WAYS),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Fine-tunes each way with each seed and learning rate; returns the losses."""
    options = _parser().parse_args(arguments)
    size = SIZES["tiny"] if options.tiny else SMALL
    results = {} if options.seeds else json.loads(options.json.read_text())
    for seed in options.seeds:
        for rate, way, one in runs(size, options.steps, seed, options.words):
            results.setdefault(f"{rate:g}", {}).setdefault(way, []).append(one)
            print(f"{rate:g}, {way}, seed {seed}: {one['losses'][-1]:.4f}", flush=True)
            options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results))
    if options.plot:
        from benchmarks.half import plot  # it takes a second to import matplotlib

        plot.save_stored(next(iter(results.values())), options.plot)
    return results


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.half.stored", description=__doc__
    )
    add = parser.add_argument
    add("--steps", type=int, nargs=2, default=[1000, 600], metavar=("FIRST", "THEN"))
    add("--seeds", type=int, nargs="*", default=[0, 1, 2], help="none: read the file")
    add("--words", type=int, default=0, help="in the vocabulary; 0 is bytes")
    add("--tiny", action="store_true", help="a model that learns in no time")
    add("--json", type=Path, default=Path("benchmarks_stored.json"), metavar="FILE")
    add("--plot", type=Path, metavar="FILE", help="draw no picture by default")
    return parser


if __name__ == "__main__":
    main()
