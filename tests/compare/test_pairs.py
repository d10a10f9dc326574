"""`jls.compare` names the line of an edit, and says nothing of equal programs."""

import functools
import linecache

import edited
import held_out
import jax
import pytest
import two_forms

import jls

pytestmark = pytest.mark.standard_promotion

MODULES = (edited, held_out, two_forms)
EDITED = [(module, name) for module in MODULES for name in module.EDITED]
EQUAL = [(module, name) for module in MODULES for name in module.EQUAL]


def marked(place, name):
    """Whether a comment on a line says that the mistake is there."""
    line = linecache.getline(place.file, place.line).strip()
    return line.endswith(f"# bug: {name.removesuffix(', scan')}")


def test_there_are_as_many_pairs_as_it_takes():
    assert len(EDITED) + len(EQUAL) >= 60
    assert len(EQUAL) >= 20
    assert len(held_out.EDITED) + len(held_out.EQUAL) >= 20


@pytest.mark.parametrize(("module", "name"), EDITED)
def test_the_line_of_an_edit_is_named(module, name):
    a, b, args = module.EDITED[name](name)
    found = jls.compare(a, b, *args)
    assert not found.equal
    said = [found.birth.a, found.birth.b] if found.birth else []
    said += [*found.only_a[:1], *found.only_b[:1]]
    assert any(marked(place, name) for place in said), found


@pytest.mark.parametrize(("module", "name"), EQUAL)
def test_of_equal_programs_nothing_is_said(module, name):
    a, b, args = module.EQUAL[name]()
    found = jls.compare(a, b, *args)
    assert found.equal, found
    assert (found.birth, found.only_a, found.only_b) == (None, (), ())


# Half against float32.

HALF = ("eps", "halves", "scale", "mask", "no bias", "gelu", "weights", "clip", "b2")


def in_half(loss_fn, dtype):
    return jax.grad(jls.autocast(loss_fn, dtype))


@pytest.mark.parametrize("name", HALF)
def test_the_line_of_an_edit_is_named_in_half(name):
    args = edited.GPT, edited.zeros(edited.GPT), edited.TEXT
    wrong = edited.gpt_step(name, dtype="bfloat16")
    found = jls.compare(edited.gpt_step(), wrong, *args)
    said = [found.birth.a, found.birth.b] if found.birth else []
    said += [*found.only_a[:1], *found.only_b[:1]]
    assert any(marked(place, name) for place in said), found


HALF_EQUAL = {
    "gpt": (edited.gpt_loss, (edited.GPT, edited.TEXT)),
    "gpt, scan": (
        functools.partial(edited.gpt_loss, kind="scan"),
        (edited.GPT, edited.TEXT),
    ),
    "gpt, remat": (
        functools.partial(edited.gpt_loss, kind="remat"),
        (edited.GPT, edited.TEXT),
    ),
    "gru": (
        functools.partial(held_out.gru, bug=""),
        (held_out.GRU, held_out.SEQUENCES),
    ),
    "vae": (functools.partial(held_out.vae, bug=""), held_out.VAE_ARGS),
    "ppo": (functools.partial(held_out.ppo, bug=""), (held_out.PPO, held_out.PLAYED)),
}


@pytest.mark.parametrize("name", HALF_EQUAL)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_of_half_without_an_edit_nothing_is_said(name, dtype):
    loss_fn, args = HALF_EQUAL[name]
    found = jls.compare(jax.grad(loss_fn), in_half(loss_fn, dtype), *args)
    assert found.equal, found
    assert found.birth is None
