"""`nanproof run`: optimizers that one loss feeds take one step: one verdict, one record, one incident, one folder. Optimizers
with a backward of their own, as in a GAN, keep their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import forked
from crosses import part_of
from integrations.script.group_loops import BAD, LOOPS, STEPS
from nanproof import read_incidents, read_steps
from nanproof.core.support._index import read_index

SCRIPT = Path(__file__).with_name("group_loops.py")


def weights(name, mode, folder, *run):
    """Run a loop, protected if `run` says so. Returns its weights and the process."""
    done = forked.python("-W", "error", *run, SCRIPT, name, mode, "out.pt", cwd=folder)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "out.pt"), done


def protected(name, mode, folder, *options):
    state, done = weights(name, mode, folder, "-m", "nanproof", "run", "--json", *options)
    guarded = json.loads(done.stderr.strip().splitlines()[-1])["guarded"]
    return state, [one for one in guarded if one["steps"]], done


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


SCALED = [name for name in LOOPS if name.startswith("scaler")]
ALONE = {name: 2 for name in LOOPS if "gan" in name or name == "ensemble"}
"""Guards of the loops whose optimizers are not all fed by one backward. The others have one."""
OPTIMIZERS = {
    "one for each parameter": "4 × SGD",
    "made lazily": "24 × Adam",
    "two tasks": "3 × Adam",
    "actor-critic, actor": "Adam and RMSprop",
}
NUMBERS = {"wgan, critic": 3 * BAD + 2, "gan, not detached, critic": BAD - 1}
"""Steps of the bad batch where it is not BAD. WGAN's critic takes three for each. Where the critic's loss reaches the generator
too, the critic's first step is taken for one of the generator's run."""


@pytest.mark.parametrize("name", [name for name in LOOPS if name not in SCALED])
def test_a_bad_batch_leaves_no_trace_in_any_optimizer(name, tmp_path):
    """Bit for bit the run in which it never came, and told once."""
    never, _ = weights(name, "never", tmp_path)
    state, guarded, _ = protected(name, "bad", tmp_path, "--run-dir", "records", "--no-diagnose")
    assert same(state, never)
    assert len(guarded) == ALONE.get(name, 1)
    (incident,) = (incident for one in guarded for incident in one["incidents"])
    assert (incident["step"], incident["action"]) == (NUMBERS.get(name, BAD), "skipped")
    assert sum(one["refused"] for one in guarded) == 1
    assert [i.step for i in read_incidents(tmp_path / guarded[0]["run_dir"])] == [i["step"] for i in guarded[0]["incidents"]]
    assert sorted(path.name for path in (tmp_path / "records").glob("optimizer-*")) == ["optimizer-2"] * (len(guarded) - 1)
    several = [str(folder) for folder, _ in read_index(tmp_path / "records")]
    assert several == ([str(tmp_path / one["run_dir"]) for one in guarded] if len(guarded) > 1 else [])
    for one in guarded:
        assert [record.step for record in read_steps(tmp_path / one["run_dir"])] == list(range(one["steps"]))
    if name in OPTIMIZERS:
        assert guarded[0]["name"] == OPTIMIZERS[name]


@pytest.mark.parametrize("name", part_of(list(LOOPS), every=3))
def test_a_healthy_loop_ends_in_the_same_bits(name, tmp_path):
    """As without nanproof, and nothing is told of it."""
    plain, _ = weights(name, "clean", tmp_path)
    state, guarded, _ = protected(name, "clean", tmp_path)
    assert len(guarded) == ALONE.get(name, 1)
    assert all(not one["incidents"] and not one["refused"] for one in guarded)
    if name not in SCALED:  # where torch may leave out one optimizer and step the other
        assert same(state, plain)


@pytest.mark.parametrize("mode", ["clean", "bad"])
@pytest.mark.parametrize("name", SCALED)
def test_a_gradscaler_leaves_out_all_of_them_or_none(name, mode, tmp_path):
    """Alone, it steps those whose own gradients did not overflow. An overflow is counted once, and is not an incident."""
    _, plain = weights(name, "bad", tmp_path)
    assert "half taken" in plain.stdout
    state, (one,), done = protected(name, mode, tmp_path, "--run-dir", "records")
    assert "half taken" not in done.stdout and all(bool(torch.isfinite(value).all()) for value in state.values())
    scales = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("scale")]
    halved = sum(after < before for before, after in zip([2.0**20, *scales], scales, strict=False))
    assert one["overflows"] == halved and one["name"] == "SGD and AdamW" and not one["incidents"]
    norms = [record.grad_norm for record in read_steps(tmp_path / "records")]
    assert len(norms) == STEPS - halved and max(norms) < 100, "without the loss scale"


LATE = ["--optimizer", "fused", "--policy", "lag=2"]


@pytest.mark.parametrize("name", ["one for each parameter", "actor-critic, critic", "gan, generator first, critic"])
def test_late_verdicts(name, tmp_path):
    """As on CUDA: none of the optimizers takes the bad step, and the steps behind it are those of the run without it."""
    never, _, _ = protected(name, "never", tmp_path, *LATE)
    state, guarded, _ = protected(name, "bad", tmp_path, *LATE)
    assert [i["step"] for one in guarded for i in one["incidents"]] == [BAD]
    assert same(state, never)


def test_the_cause_is_found_across_optimizers(tmp_path):
    """The model is one, so the step can be run again, and names the parameter, whichever optimizer holds it."""
    _, (one,), _ = protected("muon, fault in muon", "bad", tmp_path)
    (incident,) = one["incidents"]
    assert one["name"] == "AdamW and Muon" and one["model"] == "Net"
    assert [name for name, _ in incident["culprits"]] == ["body.weight"]
    assert incident["diagnosis"]["cause"] == "sqrt-at-zero"


SECOND_ONLY = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)
    def forward(self, x):
        return self.b(torch.relu(self.a(x))).square().mean()
net = Net()
first, second = torch.optim.Adam(net.a.parameters()), torch.optim.Adam(net.b.parameters())
for i in range(10):
    loss = net(torch.randn(8, 4))
    if i == 5:
        loss = loss + (net.b.bias * 0).sqrt().sum()
    first.zero_grad(); second.zero_grad(); loss.backward(); first.step(); second.step()
"""


def three(folder, run_dir="records"):
    """What report, watch and doctor say of a run, as data."""
    commands = ("report", run_dir, "--json"), ("watch", run_dir, "--json"), ("doctor", run_dir, "--json")
    return [json.loads(forked.python("-m", "nanproof", *command, cwd=folder).stdout) for command in commands]


def test_report_watch_and_doctor_agree(tmp_path):
    """The incident is in the second optimizer's part alone: all of them show it, and once."""
    (tmp_path / "second.py").write_text(SECOND_ONLY)
    run = ["-m", "nanproof"]
    done = forked.python(*run, "run", "--run-dir", "records", "second.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("nonfinite-gradient, skipped") == 2, "when it happens, and in the summary"
    assert "2 × Adam of Net: 10 steps, 1 refused" in done.stderr
    report, watch, doctor = three(tmp_path)
    assert [(i["step"], i["kind"]) for i in report["incidents"]] == [(5, "nonfinite-gradient")]
    assert [(i["step"], i["kind"]) for i in watch["incidents"]] == [(5, "nonfinite-gradient")]
    (log,) = doctor["logs"]
    assert [finding["step"] for finding in log["findings"]] == [5]


GAN = """
import sys, torch
from torch import nn
torch.manual_seed(0)
class Generator(nn.Linear): pass
class Critic(nn.Linear): pass
one, two = Generator(4, 8), Critic(8, 1)
first, second = torch.optim.SGD(two.parameters(), 0.01), torch.optim.Adam(one.parameters())
bad = {int(x) for x in sys.argv[1].split(",") if x}
for i in range(30):
    real, noise = torch.randn(8, 8), torch.randn(8, 4)
    if i == 7:
        real[3] = float("nan")
    if i in bad:
        noise[5] = float("inf")
    loss = two(real).square().mean() + (two(one(torch.randn(8, 4)).detach()) - 1).square().mean()
    first.zero_grad(); loss.backward(); first.step()
    loss = two(one(noise)).square().mean()
    second.zero_grad(); loss.backward(); second.step()
"""


def gan(folder, bad):
    (folder / "gan.py").write_text(GAN)
    return forked.python("-m", "nanproof", "run", "--json", "--run-dir", "records", "gan.py", bad, cwd=folder)


def test_the_optimizers_of_a_gan_are_one_run(tmp_path):
    """report, watch and doctor show the incidents of both, with the optimizer of each, and count the same."""
    done = gan(tmp_path, "12,13")
    assert done.returncode == 0, done.stderr
    report, watch, doctor = three(tmp_path)
    (log,) = doctor["logs"]
    critic, generator = "SGD of Critic", "Adam of Generator"
    assert [(i["optimizer"], i["step"], i["count"]) for i in report["incidents"]] == [(critic, 7, 1), (generator, 12, 2)]
    assert [(i["optimizer"], i["step"]) for i in watch["incidents"]] == [(critic, 7), (generator, 12), (generator, 13)]
    assert [(f["optimizer"], f["step"], f["recorded"]["count"]) for f in log["findings"]] == [(critic, 7, 1), (generator, 12, 2)]
    assert report["optimizers"] == watch["optimizers"] == log["recorded"]["optimizers"]
    assert [(one["name"], one["steps"], one["refused"], one["incidents"]) for one in report["optimizers"]] == [
        (critic, 30, 1, 1),
        (generator, 30, 2, 2),
    ]
    assert report["all_incidents"] == watch["counts"]["incidents"] == log["recorded"]["incidents"] == 3
    assert watch["counts"]["skipped"] == log["recorded"]["refused"] == 3
    assert [len(part["marks"]) for part in (report, *report["parts"])] == [1, 2]
    assert {report["state"], watch["state"], log["recorded"]["state"]} == {"ended"}


def test_a_gan_whose_second_optimizer_is_halted_is_halted(tmp_path):
    """All tools say so, and the summary of the script too."""
    done = gan(tmp_path, ",".join(map(str, range(5, 30))))
    assert done.returncode == 1
    summary = json.loads(done.stderr.strip().splitlines()[-1])
    assert summary["halted"] and [one["halted"] for one in summary["guarded"]] == [None, 15]
    report, watch, doctor = three(tmp_path)
    (log,) = doctor["logs"]
    assert {report["state"], watch["state"], log["recorded"]["state"]} == {"halted"}
    assert (log["status"], log["recorded"]["halted"]) == ("failure", 15)
    assert "was halted at step 15 of Adam of Generator" in report["summary"]


def test_a_run_with_one_optimizer_leaves_out_the_folders_of_an_earlier_one(tmp_path):
    gan(tmp_path, "")
    (tmp_path / "second.py").write_text(SECOND_ONLY)
    assert forked.python("-m", "nanproof", "run", "--run-dir", "records", "second.py", cwd=tmp_path).returncode == 0
    assert (tmp_path / "records" / "optimizer-2" / "steps.jsonl").exists()
    report, watch, _ = three(tmp_path)
    assert report["optimizers"] == watch["optimizers"] == [] and report["all_incidents"] == 1


def test_doctor_starts_from_what_the_run_recorded(tmp_path):
    """Where every batch is bad there is no loss scaler: kind, count, cause and fix are those of the records."""
    (tmp_path / "bad.py").write_text("""
import torch
model = torch.nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(40):
    x = torch.randn(8, 4)
    if i > 2: x[1, 1] = float("nan")
    loss = model(x).square().mean(); optimizer.zero_grad(); loss.backward(); optimizer.step()
""")
    forked.python("-m", "nanproof", "run", "--run-dir", "records", "bad.py", cwd=tmp_path)
    *_, doctor = three(tmp_path)
    (log,) = doctor["logs"]
    halted, refused = log["findings"]
    assert (halted["kind"], halted["severity"], halted["step"]) == ("nonfinite-loss", "failure", 13)
    assert (halted["recorded"]["action"], halted["recorded"]["cause"]) == ("halted", "nonfinite-batch")
    kept = refused["recorded"]
    assert (kept["action"], kept["count"], kept["cause"]) == ("skipped", 10, "nonfinite-batch")
    assert (tmp_path / kept["bundle"]).is_dir()
    assert kept["fix"] and any("replay" in command for command in refused["commands"])
