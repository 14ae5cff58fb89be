"""What the second look at a bad row may hold on to, and when it must not be taken."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from nanproof.explain.locate._logit_origin import PromptKeeper


class Tower(nn.Module):
    """Sees."""

    main_input_name = "pixel_values"

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, pixel_values):
        return self.layer(pixel_values)


class Model(nn.Module):
    """Logits of a vocabulary of 8."""

    def __init__(self):
        super().__init__()
        self.tower, self.embed, self.head = Tower(), nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))


@pytest.fixture
def ranks():
    """Two ranks of which one is here: collectives return at once, with nothing in them."""
    from torch import distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_nothing_of_training_is_held_on_to():
    """Neither tokens nor pixels of a call that is to be differentiated."""
    model = Model()
    keeper = PromptKeeper(model)
    model.tower(torch.ones(1, 4))
    model(torch.tensor([[1, 2]]))
    assert keeper.prompt() is None and keeper._pixels is None
    with torch.no_grad():
        pixels = torch.ones(1, 4)
        model.tower(pixels)
        model(torch.tensor([[1, 2]]))
    assert keeper.prompt().pixels is pixels
    keeper.close()


def split_by_fsdp(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def split_by_zero_3(model):
    for number, p in enumerate(model.parameters()):
        p.ds_id = number  # what DeepSpeed puts on every parameter that it splits


@pytest.mark.parametrize("split", [None, split_by_fsdp, split_by_zero_3])
def test_one_rank_alone_does_not_run_a_model_that_is_split_over_ranks(ranks, split):
    """Its forward gathers weights, and the other ranks would not come. The weights that are here are looked at."""
    model = Model()
    if split is not None:
        split(model)
    keeper, ids, forwards = PromptKeeper(model), torch.tensor([[2, 1]]), []
    model.head.register_forward_hook(lambda *_: forwards.append(1))
    with torch.no_grad():
        model(ids)
        model.embed.weight.data[1, 0] = math.nan
        found = keeper.find(keeper.prompt(), ids, row=0, position=0)
    assert (len(forwards) > 1) == (split is None)
    assert found.where == "embed" and found.because.startswith("weight embed.weight has 1 NaN")
    keeper.close()
