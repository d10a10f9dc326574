# SPDX-License-Identifier: Apache-2.0
"""What share of a step is computed in half precision, and what is not, and why."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp

from jls import _scopes
from jls._program.facts import Value
from jls._program.frames import Frame
from jls._program.jaxprs import is_half_atom
from jls._program.places import Place, is_gradient_in_loss, place_of, short_path
from jls._program.primitives import UNKNOWN, primitive_of
from jls._program.products import (
    Product,
    asks_for_precision,
    is_inner,
    is_outer,
    products_in,
)
from jls._text import listed, wrapped
from jls._tools.reading.flow import THROUGH_BACKWARD
from jls._tools.reading.reading import Reading
from jls._tools.reading.scales import Scale
from jls._tools.reading.updates import UpdateCall

BY_MODEL = "by the model"
_KEEP = "keep"
_WHILE = "while"
_MOST_LINES = 5  # of the text
_MOST_PLACES = 2  # in a line of it
_IDLE = "the loss scale does nothing"
_STAY = "to stay in float32, jls.skip_nonfinite"
_HALF = "jls.train_step(..., compute_dtype=jnp.float16), or jls.autocast"
_HALVES = ("float16", "bfloat16")
_NOT_FLOAT8 = {
    _scopes.TOO_SMALL: "too small for float8",
    _scopes.UNEVEN: "no multiple of 16, for float8",
    _scopes.NOT_IN_FLOAT8: "no float8 form",
}


class Precision(NamedTuple):
    """The precision of a step: what its products multiply, and why some are wide.

    Products are matrix products, convolutions and ragged products, forwards and
    backwards. One in a scan counts once for each iteration, one in a `while` once,
    since nobody knows how long it is; what `jax.checkpoint` computes again counts
    again; of the branches of `cond` the largest counts; `shard_map` counts one device.
    Zeros of padding are not multiplied. What a chip makes of a float32 product (TF32,
    passes of bfloat16) is not counted, nor is what foreign kernels do, such as Pallas.

    `print` it: at most five lines.

    Example:
      >>> optimizer = jls.loss_scaled(optax.sgd(0.1))
      >>> step = jax.jit(jls.train_step(lambda w, x: jnp.mean((x @ w) ** 2), optimizer))
      >>> w, x = jnp.ones((4, 2)), jnp.ones((8, 4))
      >>> jls.calibrate(step, w, optimizer.init(w), x).precision.products
      (('float32', 2, 1.0),)
    """

    # The dtype of the operands, how many products there are in it, and their share of
    # all multiplications, from 0 to 1; the widest first.
    products: tuple[tuple[str, int, float], ...] = ()
    # The products wider than 16 bits, the largest first, and why: "by the model",
    # "inner product", "outer product", "precision=", "keep", "optimizer", "float64",
    # "integer", or "while" in a loop of which nobody knows the length. Under an
    # autocast to float8 also those in bfloat16: "too small for float8", or "no float8
    # form", as convolutions, products with batch dimensions and custom derivatives.
    wide: tuple[tuple[Place, str], ...] = ()

    def __str__(self) -> str:
        lines = wrapped(f"{in_words(self, places=False)}.")
        reasons = dict[str, list[Place]]()
        for place, reason in self.wide:
            reasons.setdefault(reason, []).append(place)
        most = _MOST_LINES - len(lines)
        every = list(reasons.items())
        shown = every if len(every) <= most else every[: most - 1]
        for reason, places in shown:
            lines.append(_in_one_line(reason, places))
        if len(shown) < len(every):
            rest = [f"{len(places)} {reason}" for reason, places in every[len(shown) :]]
            lines.append(f"wide too: {', '.join(rest)}"[:80])
        return "\n".join(lines)


def _in_one_line(reason: str, places: Sequence[Place]) -> str:
    """A reason and some of its places, in 80 columns."""
    names = _names(places)
    for most in range(min(_MOST_PLACES, len(names)), 0, -1):
        line = f"{reason}: {listed(names, most)}"
        if len(line) <= 80:
            return line
    return f"{reason}: {len(names)} place{'s' if len(names) > 1 else ''}"


def in_words(precision: Precision, places: bool = True) -> str:
    """The shares in a sentence; and the first float32 products of the model's."""
    shares = [(dtype, _percent(share)) for dtype, _, share in precision.products]
    if not shares:
        return "no matrix products"
    (dtype, share), *others = shares
    text = f"{dtype} in {share} of the multiplications"
    text += "".join(f", {dtype} in {share}" for dtype, share in others)
    by_model = [place for place, reason in precision.wide if reason == BY_MODEL]
    if places and by_model and others:
        text += f"; float32 {BY_MODEL}: {listed(_names(by_model), _MOST_PLACES)}"
    if any(reason == _WHILE for _, reason in precision.wide):
        text += f"; one round of each `{_WHILE}` counts"
    return text


def _names(places: Iterable[Place]) -> list[str]:
    """Places by their modules, or by their lines; each once."""
    names = (
        f"{x.module} ({Path(x.file).name}:{x.line})" if x.module and x.file else str(x)
        for x in places
    )
    return list(dict.fromkeys(names))


def _percent(share: float) -> str:
    if 0 < share < 0.005:
        return "under 1 %"
    return "over 99 %" if 0.995 <= share < 1 else f"{100 * share:.0f} %"


def precision_of(products: Iterable[Product]) -> Precision:
    """The precision of a program, from its products."""
    counts = dict[str, tuple[int, int]]()
    sizes = dict[str, int]()
    wide = list[tuple[int, Place, str]]()
    for product in products:
        name, count = product.dtype.name, product.multiplications
        number, total = counts.get(name, (0, 0))
        counts[name], sizes[name] = (number + 1, total + count), product.dtype.itemsize
        reason = why_wide(product)
        if reason:
            wide.append((count, place_of(product.site), reason))
    whole = max(1, sum(total for _, total in counts.values()))
    rows = [(name, number, total / whole) for name, (number, total) in counts.items()]
    wide.sort(key=lambda row: -row[0])
    return Precision(
        tuple(sorted(rows, key=lambda row: (-sizes[row[0]], -row[2]))),
        tuple(dict.fromkeys((place, reason) for _, place, reason in wide)),
    )


def why_wide(product: Product) -> str:
    """Why a product is wider than 16 bits, or than float8; "" if it is not."""
    dtype, equation = product.dtype, product.equation
    if dtype.itemsize <= 2:
        marks = _scopes.marks_of(product.site) if dtype.itemsize == 2 else ()
        return next((_NOT_FLOAT8[x] for x in _NOT_FLOAT8 if x in marks), "")
    if jnp.issubdtype(dtype, jnp.integer):
        return "integer"
    if dtype in (jnp.float64, jnp.complex128):
        return "float64"
    marks = _scopes.marks_of(product.site)
    if _scopes.UPDATE in marks:
        return "optimizer"
    if asks_for_precision(equation):
        return "precision="
    if _scopes.KEPT in marks:
        return _KEEP
    if is_inner(equation):
        return "inner product"
    if _scopes.OUTER_PRODUCT in marks or is_outer(equation):
        return "outer product"
    is_in_while = any(x.primitive.name == _WHILE for x in product.site.equations)
    return _WHILE if is_in_while else BY_MODEL


# The headlines of the tools.


class PrecisionReport(NamedTuple):
    """A tool's sentence on half precision."""

    precision: Precision
    headline: str  # what its headline has to say; "" if all is as it should be
    write: str = ""  # what makes it half; "" if nothing has to


def look_at(reading: Reading, live: Sequence[Scale]) -> PrecisionReport:
    """The precision of a step, and what its loss scales miss.

    In the headline only what leads to a gradient that a wrapper is given counts, so
    that it is true of no teacher, target network or rollout.

    Args:
      reading: the facts about the step.
      live: the loss scales that are not static and 1.
    """
    products = products_in(reading.main)
    precision = precision_of(products)
    model = [x for x in products if _scopes.UPDATE not in _scopes.marks_of(x.site)]
    found, write = dict[str, list[str]](), ""
    for scale in live:
        half, to_write = _not_half(reading, model, scale, precision)
        calls = reading.calls.get(reading.scales.index(scale), [])
        for words in (_not_scaled(calls), half):
            if words:
                found.setdefault(words, []).append(scale.name)
        write = write or to_write
    is_one = len(live) == 1
    each = (x if is_one else f"{x} ({listed(names)})" for x, names in found.items())
    return PrecisionReport(precision, "; ".join(each), write)


def _not_scaled(calls: Sequence[UpdateCall]) -> str:
    """Where a float16 product of the backward pass has no loss scale."""
    gradients = [x for call in calls for x in call.values(_scopes.GRADIENTS)]
    site = next((x.never_scaled for x in gradients if x.never_scaled), None)
    if site is None:
        return ""
    place = place_of(site)
    within = ", of a gradient inside the loss" if is_gradient_in_loss(site) else ""
    at = f", at {short_path(place.file)}:{place.line}" if place.file else ""
    return f"its gradients are not scaled: {place.operation} in float16{within}{at}"


def _not_half(
    reading: Reading, products: Sequence[Product], scale: Scale, precision: Precision
) -> tuple[str, str]:
    """What to say of the half precision that a loss scale is for, and what to write.

    Args:
      reading: the facts about the step.
      products: those of the model.
      scale: the loss scale.
      precision: that of the step.
    """
    nothing = "", ""
    is_used = not scale.counters or reading.calls.get(reading.scales.index(scale))
    if scale.is_static or not is_used or _has_foreign_half(reading.main):
        return nothing
    bit = reading.bit(scale.at)
    others = sum(reading.bit(x.at) for x in reading.scales) & ~bit

    def is_backward(value: Value) -> bool:
        """Whether a value may belong to the backward pass that is scaled."""
        is_transposed = bool(value.through & THROUGH_BACKWARD)
        return bool(value.depends & bit) or (
            is_transposed and not value.depends & others
        )

    values = [(x, reading.flow.products.get(x.site.indices)) for x in products]
    follow = [x for x, value in values if value and value.depends & bit]
    backward = [x for x, value in values if value and is_backward(value)]
    halves = {x.dtype for x in backward if x.dtype.itemsize <= 2}
    # Whether something in the backward pass is float16, or narrower.
    is_narrow = any(map(is_backward, reading.flow.narrow.values()))
    if not follow and len(reading.scales) > 1:
        return nothing  # of a temperature, say
    if not halves and not is_narrow:
        reasons = {why_wide(x) for x in products}
        if _KEEP in reasons and BY_MODEL not in reasons:
            words = f"keep leaves no product in half: {_IDLE}"
            return words, f"a narrower keep; {_STAY}"
        is_any = any(dtype in _HALVES for dtype, _, _ in precision.products)
        words = f"no product {'that follows it ' if is_any else ''}is half: {_IDLE}"
        has_products = bool(precision.products)
        return words, f"{_HALF}; {_STAY}" if has_products else "jls.skip_nonfinite"
    if jnp.dtype(jnp.float16) not in halves and not is_narrow:
        return "bfloat16 needs no loss scale: jls.skip_nonfinite", ""
    is_little = all(map(_is_mostly_wide, (products, follow or backward)))
    if not is_little or any(x.itemsize == 1 for x in halves):
        return nothing
    shares = {dtype: share for dtype, _, share in precision.products}
    share = _percent(shares.get("float16", 0.0))
    return f"float16 in {share} of the multiplications", _HALF


def _has_foreign_half(main: Frame) -> bool:
    """Whether an operation that nothing is known of gets numbers in half."""
    return any(
        primitive_of(equation) is UNKNOWN and any(map(is_half_atom, equation.invars))
        for _, _, equation in main.equations()
    )


def _is_mostly_wide(products: Sequence[Product]) -> bool:
    """Whether the model has at least half of the multiplications in float32."""
    whole = sum(x.multiplications for x in products)
    by_model = (x.multiplications for x in products if why_wide(x) == BY_MODEL)
    return bool(whole) and sum(by_model) >= whole / 2
