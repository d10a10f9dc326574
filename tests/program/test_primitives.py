"""The rows of primitives, against those that JAX has: a new one is an entry there."""

import functools
import importlib
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

from jls._program.primitives import TABLE, TABLES, primitive_of

VERSION = jax.__version_info__[:2]
# What `import jax` brings, and the modules that make primitives of their own.
MODULES = (
    *("jax", "jax.lax", "jax.lax.linalg", "jax.nn", "jax.numpy", "jax.random"),
    *("jax.scipy.linalg", "jax.custom_batching"),
    *("jax.experimental.compute_on", "jax.experimental.xla_metadata"),
    "jax.experimental.hijax",
)
# Parts of kernels, which are one operation each, and of JAX's own tools and tests.
FOREIGN = (
    *("pallas", "mosaic", "triton", "cudnn", "thunky", "checkify", "export"),
    "internal_test_util",
)

# Nothing is known of these, and nothing is assumed.
UNKNOWN = {
    "references to memory": """
        accum_grad_in_ref addupdate box_get box_set broadcast_to create_linear
        empty_ref free_ref freeze get log_extend log_read new_box new_log new_ref pin
        run_state swap unpin with_memory_space_constraint
    """,
    "loops until convergence, or on some platform": """
        approx_top_k cholesky_update custom_linear_solve eig eigh geqp3 geqrf
        hessenberg householder_product lu lu_pivots_to_permutation ormqr qr schur svd
        symmetric_product triangular_solve tridiagonal tridiagonal_solve
    """,
    "functions of the host, foreign code, effects": """
        buffer_callback debug_callback debug_print ffi_call inspect_sharding
        io_callback program_order pure_callback tpu_custom_call
    """,
    "between devices, in parts or of unreduced values": """
        all_gather_done all_gather_reduced all_gather_reduced_start all_gather_start
        all_to_all_done all_to_all_start full_to_shard pbroadcast_done
        pbroadcast_dynamic pbroadcast_start pgather ppermute_done ppermute_start precv
        preduced psend psum_done psum_invariant_start psum_start ragged_all_to_all
        reduce_scatter_done reduce_scatter_start reduced_vary_cast
        reduced_vary_cast_p shard_alike shard_to_full unreduced_pmax unreduced_pmin
        unreduced_psum unreduced_psum_start unreduced_reduce_scatter
        unreduced_reduce_scatter_start vary_unreduced_cast vary_unreduced_cast_p
        xla_pmap
    """,
    "of transformations, gone before a program is read": """
        call_hi_primitive_linearized compute_on custom_jvp_call_jaxpr custom_lin
        custom_partitioning custom_transpose_call linear_call remat_opt stage
        unreachable xla_metadata_call zeros_like
    """,
    "tokens, empty arrays, extended dtypes": """
        after_all create_token dce_sink empty empty2 from_edtype scaled_dot tie
        to_edtype
    """,
}


@functools.cache
def names_in_jax():
    """The names of the primitives that modules of JAX hold."""
    for module in MODULES:
        importlib.import_module(module)
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith("jax._src.") and not any(x in name for x in FOREIGN)
    ]
    return {
        value.name
        for module in modules
        for value in vars(module).values()
        if isinstance(value, Primitive)
    }


def version(text):
    return tuple(map(int, text.split(".")))


def is_here(row):
    """Whether the row says that this version of JAX has its primitive."""
    since = not row.since or version(row.since) <= VERSION
    return since and (not row.until or version(row.until) >= VERSION)


def unknown():
    return {name for names in UNKNOWN.values() for name in names.split()}


def missing():
    return sorted(names_in_jax() - TABLE.keys() - unknown())


def test_every_primitive_of_jax_has_a_row_or_is_said_to_be_unknown():
    assert missing() == []


def test_no_primitive_has_two_rows():
    assert sum(map(len, TABLES)) == len(TABLE)
    assert sorted(TABLE.keys() & unknown()) == []


def test_rows_are_of_primitives_that_jax_has():
    wanted = {name for name, row in TABLE.items() if is_here(row)}
    assert sorted(wanted - names_in_jax()) == []


def test_rows_of_other_versions_say_so():
    others = {name for name, row in TABLE.items() if not is_here(row)}
    assert sorted(others & names_in_jax()) == []


def test_removed_row_is_missed(monkeypatch):
    here = [name for name, row in TABLE.items() if is_here(row)]
    assert len(here) > 100
    for name in here:
        with monkeypatch.context() as patch:
            patch.delitem(TABLE, name)
            assert missing() == [name]


@pytest.mark.parametrize(
    ("fun", "is_known"),
    [
        (lambda x: x.at[0].set(1.0), True),
        (lambda x: x.at[jnp.arange(2)].set(x[:2]), True),
        (lambda x: x.at[0].apply(jnp.sin), False),
    ],
)
def test_a_scatter_is_known_if_all_that_it_does_is_to_write(fun, is_known):
    program = jax.make_jaxpr(fun)(jnp.zeros(8))
    (scatter,) = (x for x in program.eqns if x.primitive.name == "scatter")
    assert (primitive_of(scatter) is TABLE["scatter"]) == is_known
