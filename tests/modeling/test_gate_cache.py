"""Keys and values of a gated cache: transformers' own, without a copy of all at each step."""

import contextlib
import copy

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from hf_moa.modeling.cache.gate_states import GatedDynamicLayer

MODES = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def layers():
    return DynamicLayer(), GatedDynamicLayer.in_place_of(DynamicLayer())


def states(length, *, batch=3, seed=0, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    pair = torch.randn(2, batch, length, 4, 8, generator=generator).to(**kwargs)
    return pair.transpose(2, 3)  # as projections give them


def repeat_and_select(layer):
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0, 3, 5]))


def assert_same(plain, gated):
    assert gated.get_seq_length() == plain.get_seq_length()
    for name in ("keys", "values"):
        one, other = getattr(gated, name), getattr(plain, name)
        assert torch.equal(one, other), name
        assert one.dtype == other.dtype


@pytest.mark.parametrize("modes", [["grad"], ["no_grad"], ["inference"], list(MODES)], ids="-".join)
def test_keys_and_values_are_those_of_a_dynamic_layer(modes):
    moves = [
        lambda layer: layer.crop(-3),
        lambda layer: layer.reorder_cache(torch.tensor([2, 0, 0])),
        repeat_and_select,
        lambda layer: layer.crop(-1),
        lambda layer: layer.reset(),
    ]
    pair = layers()
    for step in range(35):
        with MODES[modes[step % len(modes)]]():
            new = states(12 if step % 7 == 0 else 1 + step % 3, seed=step)
            for layer in pair:
                layer.update(*new)
            assert_same(*pair)
            if step % 7 == 6:
                for layer in pair:
                    moves[step // 7](layer)
                if step < 34:
                    assert_same(*pair)


def test_steps_are_written_into_room_that_is_there():
    _, layer = layers()
    moved = 0
    with torch.no_grad():
        layer.update(*states(100))
        for step in range(200):
            place = layer.keys.data_ptr()
            layer.update(*states(1, seed=step))
            moved += layer.keys.data_ptr() != place
            held = layer.keys.untyped_storage().nbytes()
            assert held <= layer.keys.nbytes * max(9 / 8, 1 + 8 / layer.keys.shape[2]) + 1
    assert moved <= 10


@pytest.mark.parametrize(
    "move",
    [
        lambda layer: layer.reorder_cache(torch.tensor([2, 0, 0])),
        lambda layer: layer.batch_select_indices(torch.tensor([1, 2, 0])),
    ],
    ids=["reorder", "select"],
)
def test_sequences_move_with_the_room_behind_them(move):
    """A step of a beam search copies the cache once."""
    _, layer = layers()
    with torch.no_grad():
        layer.update(*states(20))
        layer.update(*states(1, seed=1))
        before = layer.keys
        move(layer)
        place = layer.keys.data_ptr()
        assert place != before.data_ptr()
        layer.update(*states(1, seed=2))
        assert layer.keys.data_ptr() == place
    assert torch.equal(before[:, :, -1:], states(1, seed=1)[0])


def test_what_was_handed_out_stays():
    _, layer = layers()
    with torch.no_grad():
        layer.update(*states(5))
        keys, values = layer.update(*states(3, seed=1))
        before = keys.clone(), values.clone()
        other = copy.copy(layer)
        layer.crop(-2)
        layer.update(*states(4, seed=2))
        other.update(*states(2, seed=3))
        layer.update(*states(1, seed=4))
    assert torch.equal(keys, before[0])
    assert torch.equal(values, before[1])
    assert torch.equal(other.keys[:, :, :8], before[0])
    assert torch.equal(other.keys[:, :, 8:], states(2, seed=3)[0])


def test_another_dtype_is_promoted_to():
    pair = layers()
    with torch.no_grad():
        for layer in pair:
            layer.update(*states(5, dtype=torch.bfloat16))
            layer.update(*states(1, dtype=torch.bfloat16, seed=1))
            layer.update(*states(1, seed=2))
    assert_same(*pair)
    assert pair[1].keys.dtype == torch.float32


def test_what_is_offloaded_leaves_no_room_behind():
    _, layer = layers()
    with torch.no_grad():
        layer.update(*states(5))
        layer.update(*states(1, seed=1))
        assert layer._growing
        layer.offload()
    assert not layer._growing
