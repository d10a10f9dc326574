"""Every test and doctest runs under strict dtype promotion, without rank promotion.

optax is not written for strict promotion (`optax.adam` is a TypeError there), so tests
that drive more of it than `optax.sgd` carry the marker `standard_promotion`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jls


@pytest.fixture(autouse=True)
def _promotion(request):
    if request.node.get_closest_marker("standard_promotion"):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    doctest_namespace.update(jax=jax, jls=jls, jnp=jnp, np=np, optax=optax)
