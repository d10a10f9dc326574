"""What the lowest tested jax spells differently."""

import jax

if hasattr(jax, "enable_x64"):
    enable_x64 = jax.enable_x64
else:  # jax < 0.8
    from jax.experimental import enable_x64 as enable_x64
