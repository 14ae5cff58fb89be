"""Norms and names, against the slow and obvious way."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nanproof.core.judge._parameters import Parameters, clean_name, fills_its_memory
from nanproof.core.support._inner import nonfinite

dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
shapes = st.lists(st.integers(1, 5), min_size=0, max_size=3)


def parameters_of(tensors):
    model = nn.Module()
    for i, t in enumerate(tensors):
        model.register_parameter(f"p{i}", nn.Parameter(torch.zeros_like(t)))
        getattr(model, f"p{i}").grad = t
    return Parameters(model, torch.optim.SGD(model.parameters(), lr=0.1))


@settings(max_examples=60)
@given(st.lists(st.tuples(dtypes, shapes, st.floats(-4, 4)), min_size=1, max_size=6), st.integers(0, 1000))
def test_norms_agree_with_float64(specs, seed):
    """Any mixture of dtypes and shapes, within what float32 sums allow; half-precision gradients never overflow in between."""
    g = torch.Generator().manual_seed(seed)
    tensors = [(torch.randn(shape, generator=g) * 10**power).to(dtype) for dtype, shape, power in specs]
    parameters = parameters_of(tensors)
    present = parameters.present()
    norms = parameters.norms(parameters.gradients(present))
    truth = torch.stack([t.double().norm() for t in tensors])
    torch.testing.assert_close(norms.double(), truth, rtol=1e-5, atol=1e-12)


def test_a_norm_above_the_range_of_fp16_is_finite():
    parameters = parameters_of([torch.full((100,), 60000.0, dtype=torch.float16)])
    assert parameters.norms(parameters.gradients([0])).item() == pytest.approx(6e5, rel=1e-3)


def test_absent_gradients_are_left_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0](torch.ones(1, 2)).sum().backward()
    parameters = Parameters(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert [parameters.names[i] for i in parameters.present()] == ["0.weight", "0.bias"]


@pytest.mark.parametrize(
    ("wrapped", "clean"),
    [
        ("_orig_mod.layer.weight", "layer.weight"),
        ("module.weight", "module.weight"),
        ("layer._checkpoint_wrapped_module.weight", "layer.weight"),
        ("submodule.weight", "submodule.weight"),
        ("a.module_list.0.weight", "a.module_list.0.weight"),
    ],
)
def test_names_are_the_users_own(wrapped, clean):
    assert clean_name(wrapped) == clean


def test_nonfinite_sees_what_isfinite_sees():
    inf, nan = float("inf"), float("nan")
    cases = {"fine": [1.0, -2.0], "nan": [1.0, nan], "inf": [inf, 0.0], "minus": [-inf, 0.0], "both": [nan, inf]}
    tensors = [(k, torch.tensor(v, dtype=d)) for k, v in cases.items() for d in (torch.float32, torch.bfloat16)]
    tensors += [("complex", torch.tensor([complex(0, nan)])), ("whole", torch.tensor([1, 2])), ("empty", torch.zeros(0))]
    assert set(nonfinite(tensors)) == {"nan", "inf", "minus", "both", "complex"}


def test_dense_memory_is_told_from_gaps():
    x = torch.zeros(4, 3, 2, 2)
    assert fills_its_memory(x) and fills_its_memory(x.to(memory_format=torch.channels_last))
    assert fills_its_memory(torch.zeros(3, 4).t()) and fills_its_memory(torch.zeros(()))
    assert not fills_its_memory(x[:, :2]) and not fills_its_memory(torch.zeros(1).expand(5))


def test_a_gradient_that_is_sparse_in_some_steps_only():
    """Norms are grouped anew when a gradient changes its layout and nothing else."""
    embedding, linear = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)
    model = nn.ModuleList([embedding, linear])
    parameters = Parameters(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for sparse in (False, True, True, False, True):
        model.zero_grad()
        loss = linear(embedding(torch.tensor([1, 3]))).square().sum()
        (loss if sparse else loss + embedding.weight.sum()).backward()
        present, gradients = parameters.present_gradients()
        assert gradients[0].is_sparse == sparse
        expected = torch.stack([g.to_dense().norm() for g in gradients])
        torch.testing.assert_close(parameters.norms(gradients, None, present), expected)
