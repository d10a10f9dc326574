"""Tables of what was compiled, as Markdown for the documentation."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks.half.programs import MODELS, WAYS, WIDE, WIDE_WAYS, half_of
from benchmarks.targets import TARGETS


def tables(results: dict[str, Any]) -> str:
    """One table for each model, and one for all wide ones."""
    found = [
        f"**{model}**, compiled, not run\n\n{_table(results, model)}"
        for model in MODELS
        if any(model in one["models"] for one in results.values())
    ]
    wide = [*_wide_rows(results)]
    if wide:
        rows = [WIDE_HEADS, ("---", *["--:"] * (len(WIDE_HEADS) - 1)), *wide]
        found.append(f"**Wide models**, compiled, not run\n\n{_joined(rows)}")
    return "\n\n".join(found)


WIDE_HEADS = (
    "bfloat16; float8",
    "products in float8",
    "kept, MB",
    "temporary memory, MB",
    "moved, GB",
    "kernels",
    "arrays rounded; kernels",
)


def _wide_rows(results: dict[str, Any]) -> Iterator[Sequence[str]]:
    for model in WIDE:
        for name, one in results.items():
            ways = one["models"].get(model, {})
            if len(ways) < len(WIDE_WAYS):
                continue
            float8 = ways["float8"]
            right, others = float8["float8_products"], float8["wider_products"]
            yield (
                f"{model}, {TARGETS[name].chip.split()[1]}",
                f"{right} of {right + others}",
                *(_pair(ways, *column) for column in COLUMNS),
                f"{float8['rounded']}; {float8['maxima_kernels']}",
            )


COLUMNS = ("kept_bytes", 1e6), ("temporary_bytes", 1e6), ("bytes", 1e9), ("kernels", 1)


def _pair(ways: dict[str, Any], name: str, unit: float) -> str:
    """Of bfloat16, of float8, and the ratio."""
    bfloat16, float8 = (ways[way][name] for way in WIDE_WAYS)
    digits = 1 if unit == 1e9 else 0
    both = "; ".join(f"{x / unit:,.{digits}f}" for x in (bfloat16, float8))
    return f"{both}; x{float8 / bfloat16:.2f}"


def ratios(ways: dict[str, Any]) -> tuple[float, float]:
    """Bytes and temporary memory under autocast, times those by hand."""
    ours, by_hand = ways["autocast"], ways["by hand"]
    bytes_, memory = (ours[x] / by_hand[x] for x in ("bytes", "temporary_bytes"))
    return bytes_, memory


def _table(results: dict[str, Any], model: str) -> str:
    heads = ("chip", *WAYS, "autocast / by hand: bytes, memory")
    rows = [heads, ("---", *["--:"] * 4)]
    for name, target in TARGETS.items():
        ways = results.get(name, {}).get("models", {}).get(model, {})
        if len(ways) == len(WAYS):
            chip = f"{target.chip}, {half_of(target).__name__}"
            ratio = "x{:.2f}, x{:.2f}".format(*ratios(ways))
            rows.append((chip, *(_cell(ways[way]) for way in WAYS), ratio))
    return _joined(rows)


def _joined(rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(one: dict[str, Any]) -> str:
    size, memory = one["bytes"] / 1e9, one["temporary_bytes"] / 1e6
    return f"{size:.1f} GB; {memory:,.0f} MB; {one['kernels']}"
