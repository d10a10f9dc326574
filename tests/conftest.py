"""Every test runs under strict dtype promotion and without rank promotion."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jls

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    doctest_namespace.update(jax=jax, jls=jls, jnp=jnp, np=np, optax=optax)
