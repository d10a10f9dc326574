"""Tables of what was compiled, as Markdown for the documentation."""

from typing import Any

from benchmarks.half.programs import MODELS, WAYS, half_of
from benchmarks.targets import TARGETS


def tables(results: dict[str, Any]) -> str:
    """One table for each model."""
    return "\n\n".join(
        f"**{model}**, compiled, not run\n\n{_table(results, model)}"
        for model in MODELS
        if any(model in one["models"] for one in results.values())
    )


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
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(one: dict[str, Any]) -> str:
    size, memory = one["bytes"] / 1e9, one["temporary_bytes"] / 1e6
    return f"{size:.1f} GB; {memory:,.0f} MB; {one['kernels']}"
