"""Every program here is looked at, so each is compiled, not read from a file."""

import jax

jax.config.update("jax_enable_compilation_cache", False)
