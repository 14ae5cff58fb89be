"""The choice of a precision, what is said against a model's dtypes, and the cast that puts it right. Every claim that is made
about fp16 and bf16 is run."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn, optim

from nanproof import UsageError
from nanproof.core.support._casting import buffers_beside
from nanproof.numerics.precision import Device, Precision, _cpu_instructions, cast_trainable, choose, precision_for, problems

TURING = Device("cuda", False, "Tesla T4 (compute capability 7.5)")
HOPPER = Device("cuda", True, "H200 (compute capability 9.0)")
OLD_CPU = Device("cpu", False, "this CPU has no instructions for bf16")
NEW_CPU = Device("cpu", True, "this CPU has instructions for bf16 (AMX)")
MPS = Device("mps", False, "whether mps computes in bf16 is not known here")


@pytest.mark.parametrize(
    ("device", "ask", "name", "says"),
    [
        (HOPPER, "auto", "bf16", "H200 (compute capability 9.0) computes in bf16"),
        (
            TURING,
            "auto",
            "fp16",
            "Tesla T4 (compute capability 7.5) does not compute in bf16, so the forward is fp16 with a loss",
        ),
        (NEW_CPU, "auto", "bf16", "this CPU has instructions for bf16 (AMX), which has the range of fp32"),
        (OLD_CPU, "auto", "fp32", "no instructions for bf16"),
        (MPS, "auto", "fp32", "not known"),
        (HOPPER, "fp16", "fp16", "as asked; the forward is fp16 with a loss scale"),
        (HOPPER, "fp32", "fp32", "as asked; weights and forward are fp32"),
        (HOPPER, "bf16", "bf16", "as asked; H200"),
        (TURING, "fp16", "fp16", "as asked"),
        (OLD_CPU, "bf16", "bf16", "as asked; this CPU has no instructions for bf16, so it may be slower"),
        (MPS, "bf16", "bf16", "as asked"),
    ],
)
def test_what_a_device_gets(device, ask, name, says):
    """Weights are fp32 in every case, and only fp16 is scaled."""
    chosen = precision_for(device, ask)
    assert (chosen.name, chosen.weights, chosen.device) == (name, torch.float32, device.kind)
    assert chosen.compute == {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[name]
    assert chosen.scaler == (name == "fp16")
    assert chosen.trainer_arguments() == {"bf16": name == "bf16", "fp16": name == "fp16"}
    assert says in chosen.reason and str(chosen) == f"{name}: {chosen.reason}"


@pytest.mark.parametrize(
    ("device", "ask", "says"),
    [
        (TURING, "bf16", 'begins with 8.0.*Ask for "fp16"'),
        (OLD_CPU, "fp16", r"Trainer\(fp16=True\) trains in fp32.*GradScaler\(\"cpu\"\) do work"),
        (MPS, "fp16", "known to work on CUDA only"),
        (Device("vulkan", False, "", autocast=False), "bf16", "no autocast for vulkan"),
    ],
)
def test_what_cannot_work_is_refused(device, ask, says):
    with pytest.raises(UsageError, match=says):
        precision_for(device, ask)


def test_this_machine():
    """`choose` asks the device that is there: what it says of a CPU is what torch says."""
    chosen = choose(device="cpu")
    assert chosen.name == ("bf16" if any(_cpu_instructions().values()) else "fp32")
    assert isinstance(chosen.grad_scaler(), type(None))
    linear = nn.Linear(4, 4)
    with choose(device="cpu", ask="bf16").autocast():
        assert linear(torch.ones(2, 4)).dtype == torch.bfloat16
    with choose(device="cpu", ask="fp32").autocast("cpu"):
        assert linear(torch.ones(2, 4)).dtype == torch.float32
    assert choose(linear).device == "cpu"
    with pytest.raises(UsageError, match="auto"):
        choose(ask="fp8")
    with pytest.raises(UsageError, match="a device of torch"):
        choose(device="toaster")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="no CUDA device"):
            choose(device="cuda")


def test_the_reason_says_what_the_model_is_held_in():
    assert "cast_trainable" not in choose(nn.Linear(2, 2)).reason
    said = choose(nn.Linear(2, 2).half()).reason
    assert said.endswith("2 of the parameters that learn are fp16: cast them to fp32 first, cast_trainable(model) does it")


def test_a_scaler_is_made_where_it_is_needed():
    scaled = Precision("fp16", torch.float32, torch.float16, True, "", "cpu").grad_scaler()
    assert isinstance(scaled, torch.amp.GradScaler) and scaled.is_enabled()


def test_the_trainer_ignores_fp16_on_a_cpu(tmp_path):
    """What `choose(ask="fp16")` says of a CPU: no autocast, no scaler, no word. In torch itself both are there."""
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    try:
        args = TrainingArguments(str(tmp_path), fp16=True, use_cpu=True, report_to=[])
        accelerator = Trainer(model=nn.Linear(2, 2), args=args).accelerator
        assert accelerator.scaler is None and not accelerator.native_amp
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)  # one for the whole process, with fp16 in it
    with torch.autocast("cpu", dtype=torch.float16):
        assert nn.Linear(4, 4)(torch.ones(2, 4)).dtype == torch.float16
    assert torch.amp.GradScaler("cpu").is_enabled()


# -- problems ------------------------------------------------------------------------------------------------------------------


def stepped(cls, dtype, gradient, steps=10, **settings):
    """A weight of 1 after steps with a constant gradient."""
    p = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = cls([p], lr=2e-4, **settings)
    for _ in range(steps):
        p.grad = torch.full_like(p, gradient)
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad"])
def test_eps_that_is_zero_in_fp16_ends_the_run(name, foreach):
    """A gradient of 0, which a LoRA's A has in its first step, is 0/0; `problems` says so of these optimizers, and only there."""
    cls = getattr(optim, name)
    assert stepped(cls, torch.float16, 0.0, foreach=foreach).isnan().all()
    assert stepped(cls, torch.float32, 0.0, foreach=foreach).isfinite().all()
    model = nn.Linear(2, 2).half()
    found = [p.slug for p in problems(model, cls(model.parameters(), foreach=foreach))]
    assert found == ["fp16-optimizer-underflow", "bf16-update-rounding"]


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad"])
def test_fused_optimizers_divide_in_fp32(name):
    cls = getattr(optim, name)
    assert torch.equal(stepped(cls, torch.float16, 0.0, fused=True), torch.ones(3).half())
    model = nn.Linear(2, 2).half()
    assert [p.slug for p in problems(model, cls(model.parameters(), fused=True))] == ["bf16-update-rounding"]


def test_a_larger_eps_survives_and_how_far_a_smaller_one_jumps():
    """1e-4 stays sane. 1e-6 is not 0 in fp16, but a gradient of 0.001 moves its weight a thousand times the learning rate."""
    model = nn.Linear(2, 2).half()
    assert [p.slug for p in problems(model, optim.AdamW(model.parameters(), eps=1e-4))] == ["bf16-update-rounding"]
    assert stepped(optim.AdamW, torch.float16, 0.0, eps=1e-4).isfinite().all()
    [jump, _] = problems(model, optim.AdamW(model.parameters(), eps=1e-6))
    claimed = float(jump.sentence.split("move its weight ")[1].split(" ")[0])
    moved = (1 - stepped(optim.AdamW, torch.float16, 1e-3, steps=1, eps=1e-6)[0].item()) / 2e-4
    assert moved == pytest.approx(claimed, rel=0.05) and 900 < claimed < 1100


def test_optimizers_that_do_not_divide_by_eps_are_left_alone():
    model = nn.Linear(2, 2).half()
    assert stepped(optim.SGD, torch.float16, 0.0).isfinite().all()
    assert [p.slug for p in problems(model, optim.SGD(model.parameters(), 0.1))] == ["bf16-update-rounding"]


def test_fp16_weights_under_a_scaler():
    """The words are torch's own: its GradScaler is asked."""
    model = nn.Linear(2, 2).half()
    scaler, optimizer = torch.amp.GradScaler("cpu"), optim.SGD(model.parameters(), 0.1)
    scaler.scale(model(torch.ones(1, 2).half()).sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients") as raised:
        scaler.unscale_(optimizer)
    for arguments in ({"scaler": scaler}, {"fp16": True}):
        first, rounding = problems(model, **arguments)
        assert first.slug == "fp16-weights-with-grad-scaler"
        assert str(raised.value) in first.sentence and "2 parameters that learn are fp16 (weight, bias)" in first.sentence
        assert rounding.slug == "bf16-update-rounding"
    assert len(problems(model, scaler=torch.amp.GradScaler("cpu", enabled=False))) == 1


@pytest.mark.parametrize(("dtype", "part"), [(torch.float16, 4096), (torch.bfloat16, 512)])
def test_updates_that_are_lost(dtype, part):
    """Just below the share that is named an update changes no weight; 1 - 1e-4 is 1 in bf16. With Adam's rate the size above
    which weights stand still is named, and they do."""
    weights = torch.logspace(-3, 3, 4001, base=2).to(dtype)
    assert torch.equal(weights - weights * (0.999 / part), weights)
    assert not torch.equal(weights - weights * (2.1 / part), weights)
    assert dtype == torch.float16 or 1 - torch.tensor(1e-4, dtype=dtype) == 1
    model = nn.Linear(2, 2).to(dtype)
    [found] = problems(model, optim.AdamW(model.parameters(), 2e-4, eps=1e-4), bf16=True)
    assert f"an update below 1/{part} of its weight is lost" in found.sentence and "autocast does not help" in found.sentence
    assert f"lr=0.0002, so those above {2e-4 * part:.2g} in size" in found.sentence
    far = nn.Parameter(torch.full((3,), 2e-4 * part * 1.01, dtype=dtype))
    optimizer, before = optim.Adam([far], 2e-4, fused=True), far.detach().clone()
    for _ in range(20):
        far.grad = torch.ones_like(far)
        optimizer.step()
    assert torch.equal(far, before)


def test_nothing_is_said_of_frozen_half_precision():
    """PEFT's default: an fp16 base under fp32 adapters, with a scaler too."""
    peft = pytest.importorskip("peft")
    from integrations import tiny

    model = peft.get_peft_model(tiny.llama().half(), peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    learning = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in learning} == {torch.float32} and {p.dtype for p in model.parameters()} > {torch.float32}
    assert problems(model, optim.AdamW(learning), fp16=True, scaler=torch.amp.GradScaler("cpu")) == []
    pure = peft.get_peft_model(
        tiny.llama().half(), peft.LoraConfig(r=4, target_modules="all-linear"), autocast_adapter_dtype=False
    )
    learning = [p for p in pure.parameters() if p.requires_grad]
    found = [p.slug for p in problems(pure, optim.AdamW(learning))]
    assert found == ["fp16-optimizer-underflow", "bf16-update-rounding"]
    names = cast_trainable(pure)
    assert len(names) == len(learning) and all("lora_" in name for name in names)
    assert problems(pure, optim.AdamW(learning), fp16=True) == []
    assert {p.dtype for p in pure.parameters() if not p.requires_grad} == {torch.float16}


def test_every_slug_is_in_the_catalogue():
    """And every fix leads to the function that does it."""
    from nanproof.explain._cause import Cause

    model = nn.Linear(2, 2).half()
    found = problems(model, optim.Adam(model.parameters()), fp16=True)
    assert {p.slug for p in found} <= {cause.slug for cause in Cause.catalogue} and len(found) == 3
    assert all("cast_trainable(model)" in p.fix and p.slug in str(p) for p in found)


# -- the cast ------------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Embedding and head are one tensor; a norm with running statistics learns, another is frozen."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm, self.frozen = nn.BatchNorm1d(4), nn.BatchNorm1d(4).requires_grad_(False)

    def forward(self, ids):
        return self.head(self.frozen(self.norm(self.embed(ids))))


def test_the_cast_keeps_objects_ties_and_values():
    model = Tied().half()
    before = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in before.items()}
    model.embed.weight.grad = torch.full_like(model.embed.weight, 0.5)
    assert cast_trainable(model) == ("embed.weight", "norm.weight", "norm.bias")
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before) and model.head.weight is model.embed.weight
    assert all(torch.equal(after[name].half(), values[name]) for name in values)
    assert model.embed.weight.grad.dtype == torch.float32 and bool((model.embed.weight.grad == 0.5).all())
    assert model.norm.running_var.dtype == torch.float32 and model.norm.num_batches_tracked.dtype == torch.int64
    assert model.frozen.running_var.dtype == model.frozen.weight.dtype == torch.float16
    assert cast_trainable(model) == ()


def test_the_cast_takes_the_optimizers_state_along():
    """The step after the cast is the one that a run in fp32 from the same state takes."""
    model = nn.Linear(3, 3).bfloat16()
    optimizer = optim.Adam(model.parameters(), 0.1)
    x = torch.randn(4, 3)
    model(x.bfloat16()).square().sum().backward()
    optimizer.step()
    oracle = copy.deepcopy(model).float()
    other = optim.Adam(oracle.parameters(), 0.1)
    state = copy.deepcopy(optimizer.state_dict())
    other.load_state_dict(state)  # torch casts the moments to the weights' dtype
    cast_trainable(model, optimizer=optimizer)
    assert {v.dtype for s in optimizer.state.values() for v in s.values()} == {torch.float32}
    for m, o in ((model, optimizer), (oracle, other)):
        o.zero_grad()
        m(x).square().sum().backward()
        o.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), oracle.parameters(), strict=True))


def test_the_cast_widens_only():
    model = nn.Linear(2, 2).double()
    assert cast_trainable(model) == () and model.weight.dtype == torch.float64
    assert cast_trainable(nn.Linear(2, 2), torch.float64) == ("weight", "bias")
    with pytest.raises(UsageError, match="weights that learn are not half"):
        cast_trainable(model, torch.bfloat16)


def test_a_shared_buffer_is_cast_once():
    """Two modules that own one buffer: it is found once."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)).half()
    model[1].running_mean = model[0].running_mean
    assert len(buffers_beside(model, model.parameters())) == 3
    cast_trainable(model)
    assert model[1].running_mean is model[0].running_mean and model[0].running_mean.dtype == torch.float32
