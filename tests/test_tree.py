import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from shared import FLOATS, NAN, ONE, W, assert_identical, bits

import jls
from jls._tree import combine, leaves_at_floats, named_floats, partition


@pytest.mark.parametrize("pred", [True, np.bool_(True), np.array(True), "device"])
def test_select_takes_python_numpy_and_device_predicates(pred):
    pred = jnp.asarray(True) if isinstance(pred, str) else pred
    assert jls.select(pred, {"a": jnp.float32(2.0)}, {"a": jnp.float32(3.0)})["a"] == 2


def test_select_is_bitwise_and_keeps_subnormals_and_minus_zero(jit_or_eager):
    odd = jnp.array([1e-45, -0.0, jnp.nan, -jnp.inf], jnp.float32)
    select = jit_or_eager(jls.select)
    for pred in (True, False):
        trees = (odd, jnp.zeros(4)) if pred else (jnp.zeros(4), odd)
        assert bits(select(jnp.asarray(pred), *trees)) == bits(odd)


@pytest.mark.parametrize("dtype", [*FLOATS, jnp.int8, jnp.uint32, jnp.bool_])
def test_select_keeps_every_dtype(jit_or_eager, dtype):
    new, old = jnp.ones(3, dtype), jnp.zeros(3, dtype)
    select = jit_or_eager(jls.select)
    chosen = select(jnp.asarray(False), new, old)
    assert (chosen.dtype, bits(chosen)) == (old.dtype, bits(old))


def test_select_carries_none_static_keys_and_float0():
    key, other = jax.random.key(1), jax.random.key(2)
    float0 = np.zeros(2, jax.dtypes.float0)
    new = {"n": None, "f": jnp.tanh, "s": "relu", "k": key, "z": float0, "i": 3}
    old = {"n": None, "f": jnp.tanh, "s": "relu", "k": other, "z": float0, "i": 4}
    chosen = jls.select(False, new, old)
    assert (chosen["n"], chosen["f"], chosen["s"]) == (None, jnp.tanh, "relu")
    assert jnp.array_equal(jax.random.key_data(chosen["k"]), jax.random.key_data(other))
    assert chosen["z"] is float0
    assert chosen["i"] == 4


def test_select_gives_a_python_number_the_dtype_of_the_other():
    chosen = jls.select(True, {"step": 0}, {"step": jnp.int32(5)})
    assert (chosen["step"], chosen["step"].dtype) == (0, jnp.int32)


def test_select_leaves_weak_what_is_weak_in_both(jit_or_eager):
    choose = jit_or_eager(functools.partial(jls.select, True))
    weak, strong = jnp.asarray(2.0), jnp.float32(3.0)
    for new, old, is_weak in (
        (weak, weak, True),
        (weak, 3.0, True),
        (weak, strong, False),
        (strong, weak, False),
    ):
        chosen = choose(new, old)
        assert (chosen, chosen.dtype, chosen.weak_type) == (new, jnp.float32, is_weak)


def test_select_works_under_vmap():
    chosen = jax.vmap(jls.select)(jnp.array([True, False]), jnp.ones(2), jnp.zeros(2))
    assert chosen.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("pred", "error"),
    [(1, TypeError), (None, TypeError), (jnp.ones(2, bool), ValueError)],
)
def test_select_refuses_what_is_no_predicate(pred, error):
    with pytest.raises(error, match="pred must be"):
        jls.select(pred, jnp.ones(2), jnp.zeros(2))


@pytest.mark.parametrize(
    ("number", "array"),
    [
        (0.5, jnp.int32(1)),
        (True, jnp.int32(1)),
        (1, jnp.asarray(True)),
        (2j, jnp.float32(1.0)),
        (1, 2.0),
    ],
)
def test_select_never_rounds_a_python_number(number, array):
    if not isinstance(array, float):
        with pytest.raises(ValueError, match=r"same dtype, got .*Python"):
            jls.select(True, number, array)
    assert jls.select(True, 1, jnp.float32(2.0)) == 1.0
    assert jls.select(True, 2, 3).dtype == jnp.int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Static:
    value: Any
    name: str = dataclasses.field(metadata={"static": True})


@pytest.mark.parametrize(
    ("new", "old", "message"),
    [
        (
            {"a": 1.0},
            {"b": 1.0},
            "same structure, but 'a' is only in on_true",
        ),
        ({"a": 1.0}, {"a": 1.0, "b": {"c": 1.0}}, "but 'b' is only in on_false"),
        ({"a": [1.0, {}]}, {"a": [1.0]}, "but 'a/1' is only in on_true"),
        ((1.0,), [1.0], "but on_true is a tuple, on_false a list"),
        (None, jnp.ones(2), r"but on_true is None, on_false float32\[2\]"),
        ({"a": {"b": ()}}, {"a": {"b": None}}, "'a/b' is a tuple in on_true, None in"),
        (Static(1.0, "x"), Static(1.0, "y"), "differ in static fields of a Static"),
        ([Static(1.0, "x")], [Static(1.0, "y")], "fields of a Static at '0'"),
        ({"a": jnp.ones(2)}, {"a": jnp.ones(3)}, r"'a' must have the same shape"),
        (
            {"a": jnp.ones(2)},
            {"a": jnp.ones(2, jnp.bfloat16)},
            r"'a' must have the same dtype, got float32 and bfloat16",
        ),
        ({"a": "relu"}, {"a": "tanh"}, r"'a' are not arrays and differ: 'relu'"),
    ],
)
def test_select_refuses_trees_that_differ(new, old, message):
    with pytest.raises(ValueError, match=message):
        jls.select(True, new, old)


def test_floats_have_paths_that_differ():
    tree = {"a/b": 1.0, "a": {"b": jnp.ones(2), "n": 3}}
    paths, leaves = named_floats(tree)
    assert paths == ["['a']['b']", "['a/b']"]
    assert leaves[1] == 1.0
    assert named_floats({"a": [1.0, None, 2j]})[0] == ["a/0", "a/2"]


LEAVES = {
    "int": jnp.int32(3),
    "python int": 3,
    "bool": jnp.array(True),
    "key": jax.random.key(3),
    "float0": np.zeros(2, jax.dtypes.float0),
    "None": None,
    "function": jax.nn.relu,
    "string": "relu",
    "MaskedNode": optax.MaskedNode(),
}


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
def test_leaf_that_is_not_floating_point_passes_untouched(leaf):
    """jmp J8, J8b, J8c, J8d, M5, O4: such leaves became floats or raised."""
    state = jls.dynamic(8.0).init()
    tree = {"leaf": leaf, "w": W}
    for function, w in ((jls.scale, 8 * W), (jls.unscale, W / 8)):
        result = function(state, tree)
        assert result["leaf"] is leaf or result["leaf"] == leaf == ()
        assert_identical(result["w"], w)
    assert jls.all_finite(tree)
    assert jls.select(False, tree, {"leaf": leaf, "w": ONE})["w"].tolist() == [1.0, 1.0]

    optimizer = jls.loss_scaled(optax.identity(), jls.dynamic(8.0))
    opt_state = optimizer.init(tree)
    for w, applied in ((W, True), (NAN, False)):
        updates, opt_state = optimizer.update({"leaf": leaf, "w": w}, opt_state, tree)
        assert opt_state.applied == applied
        chex.assert_trees_all_equal_structs(updates, tree)
        assert updates["w"].tolist() == (w.tolist() if applied else [0.0, 0.0])


def test_select_refuses_leaves_of_two_dtypes_by_name():
    """jmp J8d: select_tree on bfloat16 and float32 was an error inside lax."""
    with pytest.raises(ValueError, match=r"at 'w' must have the same dtype"):
        jls.select(True, {"w": W}, {"w": W.astype(jnp.bfloat16)})


@jax.tree_util.register_pytree_node_class
class Strict:
    """A node that holds nothing but arrays, as many of users' own do."""

    def __init__(self, x, n):
        self.x, self.n = jnp.asarray(x), n

    def tree_flatten(self):
        return (self.x, self.n), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_partition_and_combine_are_inverse_and_build_no_node_in_between():
    tree = {
        "a": [Strict(jnp.ones(2, jnp.float16), 3), None, 2.0],
        "b": (jnp.arange(2),),
    }
    floats, rest = partition(tree)
    assert [jnp.result_type(x) for x in floats] == [jnp.float16, jnp.float32]
    assert_identical(jax.tree.leaves(combine(floats, rest)), jax.tree.leaves(tree))
    assert jax.tree.structure(combine(floats, rest)) == jax.tree.structure(tree)
    assert leaves_at_floats({"a": [Strict(5, 6), None, 7], "b": (8,)}, rest) == [5, 7]


def test_nodes_that_take_arrays_alone_go_through_a_step(jit_or_eager):
    params = {"layer": Strict(jnp.ones(2), jnp.ones(3))}
    assert jls.all_finite(params)
    optimizer = jls.loss_scaled(optax.sgd(0.5))
    update = jit_or_eager(optimizer.update)
    updates, state = update(params, optimizer.init(params), params)
    assert_identical(updates["layer"].x, jnp.full(2, -0.5))
    updates, state = update(jax.tree.map(lambda x: x * jnp.inf, params), state, params)
    assert_identical(updates["layer"].n, jnp.full(3, -0.0))
    assert state.skips == 1


def test_a_reference_is_no_array_under_jit():
    ref = jax.new_ref(jnp.ones(3))
    assert jax.jit(lambda ref: jls.all_finite({"ref": ref, "w": jnp.ones(2)}))(ref)
