"""Which modules are observed: "auto" finds the blocks of well-known architectures, names are the user's own, and what cannot be
meant is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import nanproof
from nanproof import Observe, UsageError
from nanproof.observe._sites import MOST, choose, named

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def blocks(name: str, *parts: str, count: int = 2) -> list[str]:
    return [f"{name}.{i}{part}" for i in range(count) for part in ("", *(f".{p}" for p in parts))]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(4, 8), nn.Linear(8, 4)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.attn, self.attn_dropout = nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(0.1)
        self.moe = nn.Module()
        self.moe.gate, self.moe.experts = nn.Linear(4, 3), nn.ModuleList(Expert() for _ in range(3))


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))


class Residual(nn.Module):
    def __init__(self, conv3: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)
        if conv3:
            self.conv3 = nn.Conv2d(4, 4, 1)


class ResNet(nn.Module):
    def __init__(self, conv3: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.layer1 = nn.Sequential(Residual(conv3), Residual(conv3))
        self.fc = nn.Linear(4, 2)


def build(kind: str) -> nn.Module:
    t = transformers
    makers = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(vocab_size=50, num_key_value_heads=1, **SMALL)),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=1)
        ),
        "bert": lambda: t.BertForSequenceClassification(t.BertConfig(vocab_size=50, **SMALL)),
        "vit": lambda: t.ViTForImageClassification(t.ViTConfig(image_size=8, patch_size=4, **SMALL)),
        "moe": MixtureOfExperts,
        "resnet": ResNet,
        "bottleneck": lambda: ResNet(conv3=True),
        "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        "cnn": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)),
        "normed": lambda: nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)),
            nn.ReLU(),
            nn.utils.parametrizations.spectral_norm(nn.Linear(8, 2)),
        ),
        "mlp": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2)),
    }
    return makers[kind]()


AUTO = {
    "llama": blocks("model.layers", "self_attn", "mlp"),
    "gpt2": blocks("transformer.h", "attn", "mlp"),
    "bert": blocks("bert.encoder.layer", "attention"),  # what its MLP ends with is the block's output
    "vit": blocks("vit.layers", "attention", "mlp"),
    "moe": blocks("layers", "attn", "moe"),
    "resnet": blocks("layer1"),
    "bottleneck": blocks("layer1"),  # its last convolution is as large as the output, and normalised before it is added
    "encoder": blocks("layers", "self_attn", "linear2"),
    "cnn": ["0", "4"],
    "normed": ["0", "2"],
    "mlp": ["0", "3"],
}


@pytest.mark.parametrize("kind", AUTO)
def test_auto_takes_blocks_and_their_parts(kind):
    """The residual stream, attention and MLP, in the model's order; without blocks, every layer with a weight matrix."""
    model = build(kind)
    chosen = choose(model, "auto")
    if kind == "vit" and "vit.layers.0" not in named(model):  # transformers 5.0 to 5.9
        assert [n for n in chosen if n.count(".") == 3] == ["vit.encoder.layer.0", "vit.encoder.layer.1"]
        return
    assert list(chosen) == AUTO[kind]
    modules = dict(model.named_modules())
    assert all(modules[name] is module for name, module in chosen.items())


def test_auto_takes_so_many_at_the_most():
    model = nn.ModuleList(nn.Sequential(nn.Linear(1, 1)) for _ in range(MOST + 3))
    assert list(choose(model, "auto")) == [str(i) for i in range(MOST)]


def test_names_are_those_of_the_users_model_under_any_wrapper():
    plain = build("encoder")
    names = list(choose(plain, "auto"))
    assert list(choose(torch.compile(build("encoder"), backend="eager"), "auto")) == names
    assert list(choose(nn.DataParallel(build("encoder")), "auto")) == names
    assert list(choose(nn.DataParallel(torch.compile(build("encoder"), backend="eager")), "auto")) == names
    inside = build("encoder")
    inside.layers[0] = torch.compile(inside.layers[0], backend="eager")
    inside.layers[1] = checkpoint_wrapper(inside.layers[1])
    found = choose(inside, "layers.*")
    assert list(found) == list(choose(plain, "layers.*")), "a wrapper has no name of its own, and hides none"
    assert found["layers.0"] is inside.layers[0]._orig_mod
    assert found["layers.1"] is inside.layers[1]._checkpoint_wrapped_module
    for i in (0, 1):
        both = build("encoder")
        both.layers[i] = checkpoint_wrapper(both.layers[i])
        both.layers[1 - i] = checkpoint_wrapper(both.layers[1 - i])
        assert list(choose(both, "auto")) == names


def test_patterns_and_functions():
    model = build("encoder")
    assert list(choose(model, "layers.1.linear?")) == ["layers.1.linear1", "layers.1.linear2"]
    assert list(choose(model, ["*.norm2", "layers.0.linear1"])) == ["layers.0.linear1", "layers.0.norm2", "layers.1.norm2"]
    assert list(choose(model, ("*.norm1",))) == ["layers.0.norm1", "layers.1.norm1"]
    norms = choose(model, lambda name, module: isinstance(module, nn.LayerNorm) and "1" in name)
    assert list(norms) == ["layers.0.norm1", "layers.1.norm1", "layers.1.norm2"]
    assert "layers" not in choose(model, "*"), "a list of modules is never called"


@pytest.mark.parametrize("modules", ["layers.7", ["Layers.0", "nothing.*"], lambda name, module: False])
def test_what_matches_nothing_is_refused_and_names_are_shown(modules):
    model = build("encoder")
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with pytest.raises(UsageError, match=r"matches no module; the model has layers\.0, "):
        nanproof.Guard(model, optimizer, observe=Observe(modules=modules))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_scripted_modules_take_no_hooks_and_are_left_out():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    model = nn.Sequential(nn.Linear(4, 8), scripted, nn.Linear(8, 1))
    assert list(choose(model, "*")) == ["0", "2"]
    with nanproof.Guard(
        model, torch.optim.SGD(model.parameters(), 1e-2), loss_fn=lambda m, b: m(b).square().mean(), observe=True
    ) as guard:
        guard.train_step(torch.randn(3, 4))
    assert guard.history[0].observed is not None and set(guard.history[0].observed.by_site) == {"0", "2"}


def test_a_model_that_is_one_module_has_nothing_inside(caplog):
    """ "auto" finds nothing, and that is no reason to warn; the rest of the record is there."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with pytest.raises(UsageError, match="the model has none inside"):
        nanproof.Guard(model, optimizer, observe=Observe(modules="*"))
    with nanproof.Guard(model, optimizer, loss_fn=lambda m, b: m(b).square().mean(), observe=Observe(every=1)) as guard:
        for _ in range(3):
            guard.train_step(torch.randn(3, 4))
    assert not caplog.records and all(r.observed and not r.observed.sites and r.observed.updates for r in guard.history)


@pytest.mark.parametrize("why", ["modules", "folder"])
def test_a_guard_that_was_refused_leaves_no_hook(why, tmp_path):
    model, file = build("mlp"), tmp_path / "file"
    file.touch()
    wrong = {"observe": Observe(modules="nothing")} if why == "modules" else {"observe": True, "run_dir": file / "run"}
    with pytest.raises(UsageError):
        nanproof.Guard(model, torch.optim.SGD(model.parameters(), 1e-2), **wrong)
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize(
    "wrong",
    [
        {"every": 0}, {"every": -1}, {"every": 1.5}, {"every": True}, {"every": "10"}, {"gradients": 1}, {"weights": None},
        {"attention": "yes"}, {"forecast": 0}, {"modules": ""}, {"modules": []}, {"modules": ["a", 3]}, {"modules": None},
        {"modules": 7}, {"modules": {"a"}},
    ],
)  # fmt: skip
def test_settings_that_cannot_be_meant(wrong):
    [(name, value)] = wrong.items()
    with pytest.raises(UsageError, match=rf"Observe\({name}="):
        Observe(**wrong)
    assert value is not getattr(Observe(), name)


def test_what_observe_takes():
    assert Observe.of(None) is None and Observe.of(False) is None
    assert Observe.of(True) == Observe() == nanproof.Observe()
    settings = Observe(every=3)
    assert Observe.of(settings) is settings
    model = build("mlp")
    for wrong in (42, "auto", {"every": 3}, Observe):
        with pytest.raises(UsageError, match="observe="):
            nanproof.Guard(model, torch.optim.SGD(model.parameters(), 1e-2), observe=wrong)
