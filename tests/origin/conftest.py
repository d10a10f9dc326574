"""Eight host devices, for the programs over several: fixed when JAX starts."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
