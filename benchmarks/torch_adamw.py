"""torch's AdamW with and without its GradScaler: what scaling costs in that framework.

Not to be compared with JAX in seconds: there is no backward pass, and torch runs
eagerly. The ratio says what a user of torch pays for the same service.
"""

import importlib
import importlib.util
import time
from typing import Any

from benchmarks.figures import spread


def is_available(device: str) -> bool:
    """Whether torch is installed, with CUDA if `device` is a GPU."""
    if importlib.util.find_spec("torch") is None:
        return False
    return device == "cpu" or _torch().cuda.is_available()


def measure(
    shapes: list[tuple[int, ...]],
    device: str,
    seconds: float,
    max_rounds: int,
    sample: float = 0.05,
) -> dict[str, Any]:
    """The ratio scaled / unscaled of updates of parameters of these shapes."""
    torch = _torch()
    where = "cuda" if device == "gpu" else "cpu"

    def contest(implementation: str, scaled: bool) -> Any:
        params = [torch.randn(shape, device=where) for shape in shapes]
        for param in params:
            param.requires_grad_()
            param.grad = torch.randn_like(param) * 1e-3
        # 1e-4 as in the JAX workloads.
        kind: dict[str, Any] = {implementation: True}
        optimizer = torch.optim.AdamW(params, lr=1e-4, **kind)
        # At a scale of 1 the gradients can be used again: unscaling is in place.
        scaler = torch.amp.GradScaler(where, init_scale=1.0, enabled=scaled)
        loss = torch.zeros((), device=where)

        def step() -> None:
            scaler.scale(loss)
            scaler.step(optimizer)
            scaler.update()

        return step

    def timed(step: Any, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            step()
        if where == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    kinds = [(name, on) for name in ("foreach", "fused") for on in (False, True)]
    steps = {kind: contest(*kind) for kind in kinds}
    for step in steps.values():
        timed(step, 3)
    count = max(1, round(sample / timed(steps[kinds[0]], 3)))
    samples: dict[tuple[str, bool], list[float]] = {kind: [] for kind in kinds}
    start = time.perf_counter()
    for i in range(max_rounds):
        if i >= 3 and time.perf_counter() - start > seconds:
            break
        for kind in kinds[i % 4 :] + kinds[: i % 4]:
            samples[kind].append(timed(steps[kind], count))
    result: dict[str, Any] = {"version": torch.__version__, "device": where}
    for name in ("foreach", "fused"):
        bare, scaled = samples[name, False], samples[name, True]
        pairs = zip(scaled, bare, strict=True)
        result[name] = {
            "rounds": len(bare),
            "ratio": spread([value / base for value, base in pairs]),
            "seconds_per_step": {"bare": spread(bare), "scaled": spread(scaled)},
        }
    return result


def _torch() -> Any:
    """Imported only on demand: it is large, and no extra of jls installs it."""
    return importlib.import_module("torch")
