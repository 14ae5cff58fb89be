"""`nanproof run` on loops that clip, with torch's functions and by hand: culprits are those from before clipping, and a healthy
run ends in the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import forked
from integrations.script.clipping_loops import BAD, CULPRIT, LOOPS, REPLACES
from nanproof import read_steps

SCRIPT = Path(__file__).with_name("clipping_loops.py")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Return the weights of all loops by how they end, and what the guard reports."""
    folder = tmp_path_factory.mktemp("clipping")

    def run(bad, *options):
        done = forked.python("-W", "error", *options, SCRIPT, bad, "out.pt", cwd=folder)
        assert done.returncode == 0, done.stderr
        guarded = json.loads(done.stderr.strip().splitlines()[-1])["guarded"] if options else []
        return torch.load(folder / "out.pt"), dict(zip([*LOOPS, REPLACES], guarded, strict=False)), done.stderr

    protected = ("-m", "nanproof", "run", "--json", "--no-diagnose")
    found = {bad: run(bad, *protected) for bad in ("no", "nan", "inf")}
    return found | {"plain": run("no"), "never": run("never")}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", [*LOOPS, REPLACES])
def test_a_healthy_loop_ends_in_the_same_bits(outcome, name):
    weights, guarded, _ = outcome["no"]
    assert same(weights[name], outcome["plain"][0][name])
    assert guarded[name]["steps"] == 10 and guarded[name]["incidents"] == []


@pytest.mark.parametrize("bad", ["nan", "inf"])
@pytest.mark.parametrize("name", list(LOOPS))
def test_the_culprit_is_the_one_from_before_clipping(outcome, name, bad):
    weights, guarded, _ = outcome[bad]
    if name == "clamp_" and bad == "inf":
        assert guarded[name]["incidents"] == []  # an Inf that the script itself makes finite is its choice
        return
    (incident,) = guarded[name]["incidents"]
    assert (incident["step"], incident["kind"]) == (BAD, "nonfinite-gradient")
    assert [culprit for culprit, _ in incident["culprits"]] == [CULPRIT]
    assert same(weights[name], outcome["never"][0][name])


def test_gradients_that_the_script_replaces_itself_are_stepped_on_and_told_once(outcome):
    weights, guarded, said = outcome["nan"]
    assert guarded[REPLACES]["refused"] == 0 and guarded[REPLACES]["incidents"] == []
    assert said.count(f"step {BAD}: backward left non-finite gradients ({CULPRIT})") == 1
    assert all(bool(torch.isfinite(value).all()) for value in weights[REPLACES].values())


MODEL = """
import torch, weakref
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def backward():
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()

for _ in range(3):
    backward()
    optimizer.step()
backward()
"""
UNGUARDED = """
def attempt(clip, parameters, **more):
    other = torch.nn.Parameter(torch.ones(3))
    other.grad = torch.tensor([1.0, float("inf"), 2.0])
    try:
        total = clip([*parameters, other], **more)
    except RuntimeError as error:
        total = type(error)
    print(total, other.grad, [p.grad.norm() for p in parameters])

def total(parameters, **more):
    return get_total_norm([p.grad for p in parameters], **more)

for parameters in [], list(model.parameters()):
    attempt(clip_grad_norm_, parameters, max_norm=1.0, error_if_nonfinite=True)
    attempt(total, parameters, error_if_nonfinite=True)
    attempt(clip_grad_norm_, parameters, max_norm=1.0, norm_type=1.0, error_if_nonfinite=True)
    attempt(clip_grad_value_, parameters, clip_value=0.01)
    attempt(clip_grad_norm_, parameters, max_norm=1.0)
"""


def stdout(tmp_path, script, *options):
    (tmp_path / "script.py").write_text(script)
    done = forked.python("-W", "error", *options, "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tensors_that_nobody_guards_are_clipped_as_by_torch(tmp_path):
    """By themselves and together with gradients of a guarded optimizer: the same numbers, and the same errors."""
    plain = stdout(tmp_path, MODEL + UNGUARDED)
    assert plain.count("RuntimeError") == 6
    assert stdout(tmp_path, MODEL + UNGUARDED, "-m", "nanproof", "run") == plain


@pytest.mark.parametrize(
    "clip", ["get_total_norm([p.grad for p in ps])", "clip_grad_norm_(ps, 0.1)", "clip_grad_value_(ps, 0.1)"]
)
def test_gradients_go_when_the_script_drops_them(tmp_path, clip):
    """A script that looks at the norms, and perhaps leaves the step out."""
    script = f"ps = list(model.parameters())\n{clip}\nrefs = [weakref.ref(p.grad) for p in ps]\noptimizer.zero_grad()\n"
    script += "print(sum(ref() is not None for ref in refs))\n"
    assert stdout(tmp_path, MODEL + script, "-m", "nanproof", "run").split() == ["0"]


READS = """
class Reads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))

with Reads() as reads:
    clip_grad_value_(model.parameters(), 0.01)
print(reads.count)
"""


def test_clipping_by_value_reads_one_number_on_the_host(tmp_path):
    assert stdout(tmp_path, MODEL + READS, "-m", "nanproof", "run").split() == ["1"]


IN_ANOTHER_ORDER = """
import json, sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
decay, rest = [[p for p in model.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False)]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
norms = []
for _ in range(8):
    optimizer.zero_grad()
    model(torch.randn(16, 6)).square().mean().backward()
    norms.append({name: p.grad.norm().item() for name, p in model.named_parameters()})
    nn.utils.clip_grad_norm_(model.parameters(), float(sys.argv[1]))
    optimizer.step()
print(json.dumps([norms, [p.tolist() for p in model.parameters()]]))
"""


@pytest.mark.parametrize("limit", ["0.01", "0.3", "1e9", "inf", "0"])
def test_clipping_all_gradients_at_once_gives_torchs_bits_and_the_norms_from_before(limit, tmp_path):
    """Also where the optimizer has them in another order, and where nothing has to be clipped."""
    (tmp_path / "train.py").write_text(IN_ANOTHER_ORDER)
    plain = forked.python("train.py", limit, cwd=tmp_path)
    done = forked.python("-m", "nanproof", "run", "--run-dir", "records", "train.py", limit, cwd=tmp_path)
    assert done.returncode == plain.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    history = list(read_steps(tmp_path / "records"))
    norms, _ = json.loads(plain.stdout)
    for record, expected in zip(history, norms, strict=True):
        assert record.by_parameter == pytest.approx(expected, rel=2e-3)  # norms.bin has three digits
