"""docs/comparison.md says what the libraries do: it is asked again wherever they are.

A library that is not installed, or of which the page does not speak in the installed
version, is skipped. To bring a column up to date, write the new version on the page and
run, in a fresh environment (MaxText needs Python 3.12):

    pip install -e ".[test]" keras mixed-precision-for-jax torch ai2-olmo-core maxtext
    pip install --no-deps --pre levanter
    pytest tests/pages/comparison tests/devices/test_comparison_on_devices.py
"""

import dataclasses
import re

import comparison_page
import jax
import jax.numpy as jnp
import jax_peers
import pytest
import spike_peers
import torch_peer

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore"),  # of other libraries
]

SCALERS = {
    "jls": jax_peers.Jls,
    "Flax": jax_peers.Flax,
    "jmp": jax_peers.Jmp,
    "optax": jax_peers.Optax,
    "MPX": jax_peers.Mpx,
    "Keras": jax_peers.Keras,
    "torch": torch_peer.Torch,
}
GUARDS = {
    "jls": spike_peers.Jls,
    "OLMo-core": spike_peers.OlmoCore,
    "Levanter": spike_peers.Levanter,
    "MaxText": spike_peers.MaxText,
}
SCALING = {
    **comparison_page.table("In JAX, you apply the step"),
    **comparison_page.table("In JAX, the optimizer skips the step"),
    **comparison_page.table("Outside JAX"),
}
SPIKES = comparison_page.table("Finite steps that are bad")

# What is not asked by running it here; each is said with its source on the page.
READ = {
    *((name, row) for name, row in SCALING if name in ("Paddle", "MindSpore")),
    *((name, row) for name, row in SPIKES if name == "AXLearn"),
    *((name, row) for name, row in SPIKES if row == "judges the norm before clipping"),
    *((name, row) for name, row in SPIKES if row == "counts its skips"),
}
# Asked where there are devices: tests/devices/test_comparison_on_devices.py.
ON_DEVICES = {key for key in SCALING if key[1] == "devices agree inside shard_map"}


def asked(table):
    return sorted(
        key
        for key, cell in table.items()
        if key not in READ | ON_DEVICES and cell != "-"
    )


def ask(library, row):
    """The answer of the class to the row of that name."""
    return getattr(library(), re.sub(r"\W+", "_", row.lower()))()


@pytest.mark.parametrize(("name", "row"), asked(SCALING))
def test_scaling_is_as_the_page_says(name, row):
    if why_not := comparison_page.why_not(name):
        pytest.skip(why_not)
    assert ask(SCALERS[name], row) == SCALING[name, row]


def test_jls_is_in_every_table():
    rows = {row for _, row in SCALING}
    assert {row for name, row in SCALING if name == "jls"} == rows
    said = [cell for (name, _), cell in SCALING.items() if name == "jls"]
    assert sorted(said) == ["axis_name", *["yes"] * (len(rows) - 1)]


@pytest.mark.parametrize(("name", "row"), asked(SPIKES))
def test_guards_do_as_the_page_says(name, row):
    if why_not := comparison_page.why_not(name):
        pytest.skip(why_not)
    assert ask(GUARDS[name], row) == SPIKES[name, row]


def test_only_optax_is_not_asked_about_a_scale():
    dashes = [name for (name, _), cell in SCALING.items() if cell == "-"]
    assert dashes == ["optax"] * 3


def peer(name):
    if why_not := comparison_page.why_not(name):
        pytest.skip(why_not)
    return SCALERS[name]()


def test_footnote_flax_takes_the_real_part():
    scaling = peer("Flax").init(8.0).scaling
    function = scaling.value_and_grad(lambda z: jnp.real(z * (2 - 3j)))
    assert function(jnp.complex64(1.0)).grad.dtype == jnp.float32


def test_footnote_jmp_unscales_in_float16():
    scaling = peer("jmp").init().scaling
    tiny = jnp.float16(2.0**-10)
    for scale in 2.0**15, jnp.float16(2.0**15):
        assert dataclasses.replace(scaling, loss_scale=scale).unscale(tiny) == 0
    scale = jnp.float32(2.0**15)
    assert dataclasses.replace(scaling, loss_scale=scale).unscale(tiny) == 2.0**-25


def test_footnote_jmp_loses_its_floor():
    scaling = peer("jmp").init(scale=4.0).scaling
    scaling = dataclasses.replace(scaling, min_loss_scale=jnp.float32(4.0))
    backoff = type(scaling).adjust
    assert backoff(scaling, jnp.bool_(False)).loss_scale == 4
    assert jax.jit(backoff)(scaling, jnp.bool_(False)).loss_scale == 2


def test_footnote_jmp_traces_a_number_twice():
    traces = []

    @jax.jit
    def adjust(scaling):
        traces.append(scaling)
        return scaling.adjust(jnp.bool_(True))

    scaling = dataclasses.replace(peer("jmp").init().scaling, loss_scale=8.0)
    adjust(adjust(adjust(scaling)))
    assert len(traces) == 2


def test_footnote_mpx_leaves_the_powers_of_two():
    mpx = peer("MPX")
    run = mpx.after([1.0, *[jax_peers.INF] * 2], scale=2.0**15, interval=1)
    assert mpx.scale(run) == 65504 / 4


def test_every_footnote_is_used_and_written():
    used = set(re.findall(r"(\[\^[\w-]+\])(?!:)", comparison_page.TEXT))
    assert used == set(re.findall(r"^(\[\^[\w-]+\]):", comparison_page.TEXT, re.M))


def test_every_no_has_a_footnote():
    rows = [line for line in comparison_page.TEXT.splitlines() if line[:2] == "| "]
    cells = [cell.strip() for row in rows for cell in row.strip("|").split("|")[1:]]
    noes = [cell for cell in cells if re.match(r"no\b|up to you|TypeError", cell)]
    assert noes
    for cell in noes:
        assert comparison_page.FOOTNOTE.search(cell), cell
