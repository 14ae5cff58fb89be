"""Training of latent-dlm: every key of the configuration changes what training does, in the way it says."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from latent_toys import ALONE, FRESH, lines, prepared, same, small, weights

pytest.importorskip("diffusers")

from nanproof import StepRecord, UsageError, read_steps
from nanproof_recipes.latent_dlm.arms import BROKEN, FIXED, PATCHED
from nanproof_recipes.latent_dlm.config import KEYS, Config
from nanproof_recipes.latent_dlm.data import dataset
from nanproof_recipes.latent_dlm.model.diffusion import Noiser
from nanproof_recipes.latent_dlm.train import training
from nanproof_recipes.latent_dlm.train.training import Trained, train


@dataclass
class Ran:
    """What a run did, as far as it can be seen from outside."""

    result: Trained
    folder: Path
    first: dict[str, torch.Tensor]
    """Weights before the first step."""
    inputs: list[tuple[Any, ...]]
    """Of every forward in training mode."""
    outputs: list[torch.dtype]
    """Of a linear layer."""
    optimizer: torch.optim.Optimizer

    @property
    def records(self) -> list[StepRecord]:
        return list(read_steps(self.folder / "nanproof" / "steps.jsonl"))

    @property
    def log(self) -> list[dict]:
        return [line for line in lines(self.folder / "training_log.jsonl") if "loss" in line]

    @property
    def evaluated(self) -> list[dict]:
        return [line for line in lines(self.folder / "training_log.jsonl") if "eval_text_loss" in line]

    @property
    def checkpoints(self) -> list[int]:
        return sorted(int(path.name[5:13]) for path in (self.folder / "checkpoints").glob("step-*"))

    @property
    def weights(self):
        return weights(self.result.model)


@pytest.fixture
def go(tmp_path, monkeypatch):
    """Trains once: go(setting, data, optimizer__lr=...)."""

    def trained(setting=FRESH, data=None, folder=None, **changes) -> Ran:
        config, found = small(**changes), {}
        inputs, outputs = [], []
        folder = folder or tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        folder.mkdir(exist_ok=True)

        def schedule(optimizer, rate):
            found["optimizer"] = optimizer
            return LambdaLR(optimizer, rate)

        def look(model):
            found["first"] = weights(model)
            model.register_forward_pre_hook(lambda m, given: inputs.append(given) if m.training else None)
            model.blocks[0].text.qkv.register_forward_hook(lambda m, given, made: outputs.append(made.dtype))

        with monkeypatch.context() as patch:
            patch.setattr(training, "LambdaLR", schedule)
            result = train(config, setting, data if data is not None else prepared(config), folder, ALONE, prepare=look)
        assert result.ending == "finished" and result.nonfinite == 0 and result.config == config
        return Ran(result, folder, found["first"], inputs, outputs, found["optimizer"])

    return trained


# -- model ---------------------------------------------------------------------------------------------------------------------


def layers(go):
    assert [len(go(model__layers=n).result.model.blocks) for n in (1, 2)] == [1, 2]


def width(go):
    assert go(model__width=24).first["bytes.weight"].shape[1] == 24


def heads(go):
    one, four = go(model__heads=1), go(model__heads=4)
    assert [len(run.first["blocks.0.text.q_norm.weight"]) for run in (one, four)] == [16, 4]


def mlp_ratio(go):
    assert go(model__mlp_ratio=2.5).first["blocks.0.latent.mlp.0.weight"].shape == (40, 16)


def text_length(go):
    assert go(model__text_length=8).inputs[0][0].shape == (4, 8)


def latent_length(go):
    assert go(model__latent_length=5).inputs[0][1].shape == (4, 5, 4)


def latent_width(go):
    assert go(model__latent_width=6).inputs[0][1].shape == (4, 2, 6)


# -- data ----------------------------------------------------------------------------------------------------------------------


def from_text(go, **changes) -> tuple[Ran, dataset.Prepared]:
    """Documents of their own, of the length of 6 to 45 bytes."""
    folder = Path(changes.pop("where"))
    folder.mkdir(exist_ok=True)
    (folder / "text").write_text(
        "\f".join(f"{changes.get('word', 'some')} words {'of the text ' * (i % 4)}{i}" for i in range(60))
    )
    changes.pop("word", None)
    changes = {"data__text": str(folder), "data__valid_share": 0.2, **changes}
    data = dataset.make(small(**changes))
    return go(data=data, **changes), data


def text(go, tmp_path):
    one, a = from_text(go, where=tmp_path / "a", word="some")
    two, b = from_text(go, where=tmp_path / "b", word="more")
    assert a.checksum != b.checksum and not same(one.weights, two.weights)
    assert set(one.inputs[0][0].flatten().tolist()) <= set(range(259)) and one.inputs[0][0].shape == (4, 16)


def packed(go, tmp_path):
    """Packed windows hold no padding, so that no mask is made; others do."""
    one, a = from_text(go, where=tmp_path / "a", data__packed=True)
    two, b = from_text(go, where=tmp_path / "a", data__packed=False)
    assert not a.train.padded and all(given[4] is None for given in one.inputs)
    assert b.train.padded and all(given[4] is not None for given in two.inputs)
    assert not torch.cat([given[4] for given in two.inputs]).all()


def valid_share(go, tmp_path):
    one, a = from_text(go, where=tmp_path / "a")
    two, b = from_text(go, where=tmp_path / "a", data__valid_share=0.5)
    assert len(b.valid) > 1.5 * len(a.valid) and len(b.train) < len(a.train)
    assert one.result.measured != two.result.measured


def data_seed(go, tmp_path):
    one, a = from_text(go, where=tmp_path / "a")
    two, b = from_text(go, where=tmp_path / "a", data__seed=1)
    assert a.checksum != b.checksum and one.result.measured != two.result.measured and same(one.first, two.first)


def damaged(go):
    """The arm has a damaged sample, unless the data is not to have one."""
    one, two = go(FIXED), go(FIXED, data__damaged=False)
    assert any("is damaged" in note for note in one.result.notes)
    assert not any("damaged" in note for note in two.result.notes) and two.result.skipped == 0


# -- optimizer -----------------------------------------------------------------------------------------------------------------


def lr(go):
    assert max(record.lr[0] for record in go(optimizer__lr=0.25e-3).records) == pytest.approx(0.25e-3, rel=1e-3)


def grad_clip_norm(go):
    """A step is divided by norm over limit; null and 0 never clip, however large the gradients are."""
    for record in go(optimizer__grad_clip_norm=1e-3).records:
        assert record.action == "clipped" and record.clip == pytest.approx(record.grad_norm / 1e-3, rel=1e-3)
    for off in (None, 0, 0.0):
        run = go(optimizer__grad_clip_norm=off, loss__latent_loss_weight=1e6)
        assert all(record.clip == 1.0 and record.action == "stepped" and record.grad_norm > 1e3 for record in run.records)


def in_optimizer(go, key, name, value):
    run, usual = go(**{f"optimizer__{key}": value}), go()
    assert all(group[name] == value for group in run.optimizer.param_groups) and not same(run.weights, usual.weights)


def weight_decay(go):
    in_optimizer(go, "weight_decay", "weight_decay", 0.5)


def beta1(go):
    run, usual = go(optimizer__beta1=0.5), go()
    assert run.optimizer.param_groups[0]["betas"] == (0.5, usual.optimizer.param_groups[0]["betas"][1]) and not same(
        run.weights, usual.weights
    )


def beta2(go):
    run, usual = go(optimizer__beta2=0.9), go()
    assert run.optimizer.param_groups[0]["betas"] == (0.9, 0.9) and not same(run.weights, usual.weights)


def eps(go):
    in_optimizer(go, "eps", "eps", 1e-2)


# -- training ------------------------------------------------------------------------------------------------------------------


def steps(go):
    run = go(training__steps=7)
    assert run.result.steps == 7 == len(run.records) and run.result.tokens == 7 * 4 * (16 + 2)


def warmup_steps(go):
    """Up in a line, then down along half a cosine, to near 0."""
    rates = [record.lr[0] for record in go(training__steps=12, training__warmup_steps=4, optimizer__lr=1.0).records]
    wanted = [0.25, 0.5, 0.75, 1.0] + [0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(8)]
    assert rates == pytest.approx(wanted, rel=1e-4)
    assert go(training__warmup_steps=0, optimizer__lr=1.0).records[0].lr[0] == 1.0


def dtype(go):
    """Of a linear layer's output; the weights stay in fp32."""
    for name, wanted in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        run = go(training__dtype=name)
        assert set(run.outputs) == {wanted} and run.weights["bytes.weight"].dtype == torch.float32
    assert set(go(training__dtype="auto").outputs) <= {torch.float32, torch.bfloat16}


def gradient_accumulation_steps(go):
    """Two micro-batches of 4 are the same step as one batch of 8: the losses are divided. Each sample has noise of its own."""
    only = {"modes__unconditional": 0.0, "modes__text_to_latent": 1.0, "modes__latent_to_text": 0.0, "training__steps": 4}
    data = prepared(small())

    class Same(Noiser):
        def draw(self, batch, generator=None, mode=None):
            drawn = [
                super(Same, self).draw(
                    {key: value[i : i + 1] for key, value in batch.items()},
                    torch.Generator().manual_seed(int(batch["ids"][i].sum())),
                    mode,
                )
                for i in range(len(batch["ids"]))
            ]
            names = [name for name in drawn[0].__slots__ if getattr(drawn[0], name) is not None]
            return replace(drawn[0], **{name: torch.cat([getattr(one, name) for one in drawn]) for name in names})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "Noiser", Same)
        whole = go(data=data, training__train_batch_size=8, **only)
        split = go(data=data, training__train_batch_size=4, training__gradient_accumulation_steps=2, **only)
    assert len(split.inputs) == 2 * len(whole.inputs) and split.result.tokens == whole.result.tokens
    for a, b in zip(whole.records, split.records, strict=True):
        assert (a.loss, a.grad_norm) == pytest.approx((b.loss, b.grad_norm), rel=1e-4)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(whole.weights.values(), split.weights.values(), strict=True))


def train_batch_size(go):
    assert {len(given[0]) for given in go(training__train_batch_size=3).inputs} == {3}


def eval_every(go):
    """And at the end, always."""
    assert [line["step"] for line in go(training__eval_every=3).evaluated] == [3, 6, 9, 10]
    assert [line["step"] for line in go(training__eval_every=5).evaluated] == [5, 10]


def checkpoint_every(go):
    assert go(training__checkpoint_every=4).checkpoints == [4, 8]
    assert go(BROKEN_WHOLE, training__checkpoint_every=4).checkpoints == [4, 8]


def log_every(go):
    """The last step of every so many, and the last of the run; the mean over them, of every term."""
    run = go(training__log_every=4)
    assert [line["step"] for line in run.log] == [3, 7, 9]
    for line, part in zip(run.log, (run.records[:4], run.records[4:8], run.records[8:]), strict=True):
        assert line["loss"] == pytest.approx(sum(r.loss for r in part) / len(part), rel=1e-4)
        assert line["latent_loss"] == pytest.approx(sum(dict(r.terms)["latent_loss"] for r in part) / len(part), rel=1e-4)
        assert line["learning_rate"] == pytest.approx(part[-1].lr[0], rel=1e-4)


def keep_checkpoints(go):
    for arm in (FRESH, BROKEN_WHOLE):
        kept = go(arm, training__checkpoint_every=2, training__keep_checkpoints=2, training__prove_steps=0).checkpoints
        assert kept[-2:] == [8, 10] and len(kept) <= 3


def prove_steps(go, tmp_path):
    """A checkpoint that has not proved good is not gone on from."""
    for prove, went_on in ((1, True), (50, False)):
        folder = tmp_path / f"prove-{prove}"
        for _ in range(2):
            again = go(folder=folder, training__checkpoint_every=4, training__prove_steps=prove)
        assert any("went on from" in note for note in again.result.notes) is went_on


def training_seed(go):
    """First weights, order of the samples, and noise."""
    one, two, again = go(training__seed=1), go(training__seed=2), go(training__seed=1)
    assert not same(one.first, two.first) and same(one.weights, again.weights)
    assert not torch.equal(one.inputs[0][0], two.inputs[0][0]) and not torch.equal(one.inputs[0][2], two.inputs[0][2])
    only = prepared(small(), count=4)  # one batch: what differs between its rounds is the noise
    noise = go(data=only, training__seed=1)
    assert not torch.equal(noise.inputs[0][2], noise.inputs[1][2])


# -- loss ----------------------------------------------------------------------------------------------------------------------


def loss_scale(go):
    """Divided out again: the same weights up to rounding, and so is the norm that is clipped; a power of two costs no digit."""
    plain, scaled = go(training__steps=6), go(training__steps=6, loss__loss_scale=1024.0)
    assert [record.scale for record in scaled.records] == [1024.0] * 6 and plain.records[0].scale is None
    for a, b in zip(plain.records, scaled.records, strict=True):
        assert (a.loss, a.grad_norm, a.clip) == pytest.approx((b.loss, b.grad_norm, b.clip), rel=1e-4)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(plain.weights.values(), scaled.weights.values(), strict=True))


def weighted(go, key, other):
    """The loss is the sum of its terms, each times its weight; one of weight 0 teaches nothing."""
    name = key.removeprefix("loss__").removesuffix("_weight")
    for record in go(**{key: 0.25}).records:
        terms = dict(record.terms)
        assert record.loss == pytest.approx(terms[other] + 0.25 * terms[name], rel=1e-4)
    head = "text_out" if name == "text_loss" else "latent_out"
    off = go(**{key: 0.0}, optimizer__weight_decay=0.0)
    assert torch.equal(off.first[f"{head}.out.weight"], off.weights[f"{head}.out.weight"])
    assert off.records[0].loss == pytest.approx(dict(off.records[0].terms)[other], rel=1e-5)


def text_loss_weight(go):
    weighted(go, "loss__text_loss_weight", "latent_loss")


def latent_loss_weight(go):
    weighted(go, "loss__latent_loss_weight", "text_loss")


def prediction(go):
    """Of latents that are all 0, the first prediction, 0, is right about x0; about noise it is wrong by 1, about v by less."""
    data = prepared(small())
    data = replace(data, train=dataset.Pairs(data.train.ids, torch.zeros_like(data.train.latents)))
    first = {}
    for kind in ("epsilon", "v", "x0"):
        run = go(data=data, loss__prediction=kind, training__train_batch_size=64, training__steps=1)
        first[kind] = dict(run.records[0].terms)["latent_loss"]
    assert first["epsilon"] == pytest.approx(1, abs=0.2) and 0.2 < first["v"] < 0.8 and first["x0"] == 0


def normalize_latents(go):
    """Where the prediction is 0 and targets have length 1 and 4 channels, the mean square is 1 / 4."""
    assert dict(go(loss__normalize_latents=True).records[0].terms)["latent_loss"] == pytest.approx(0.25, rel=1e-5)
    assert dict(go().records[0].terms)["latent_loss"] > 0.4


def diffusion_steps(go):
    times = torch.cat([given[3] for given in go(loss__diffusion_steps=5).inputs])
    assert {round(float(t) * 5, 4) for t in times} <= {0.0, 1.0, 2.0, 3.0, 4.0, 5.0} and len(set(times.tolist())) > 3


# -- modes ---------------------------------------------------------------------------------------------------------------------


def only(go, mode):
    shares = dict.fromkeys(("modes__unconditional", "modes__text_to_latent", "modes__latent_to_text"), 0.0)
    given = go(**{**shares, f"modes__{mode}": 1.0}).inputs
    return torch.cat([one[2] for one in given]), torch.cat([one[3] for one in given])


def unconditional(go):
    text, latent = only(go, "unconditional")
    assert (text > 0).double().mean() > 0.9 and (latent > 0).all()


def text_to_latent(go):
    text, latent = only(go, "text_to_latent")
    assert (text == 0).all() and (latent > 0).all()


def latent_to_text(go):
    text, latent = only(go, "latent_to_text")
    assert (text > 0).double().mean() > 0.9 and (latent == 0).all()


BROKEN_WHOLE = replace(BROKEN, damaged=False)
OWN = {"data.seed": data_seed, "training.seed": training_seed}
ELSEWHERE = {"training.parallel"}
"""Takes two processes: test_latent_team.py."""
EFFECTS = {key: OWN.get(key) or globals()[key.partition(".")[2]] for key in KEYS if key not in ELSEWHERE}


@pytest.mark.parametrize("key", EFFECTS)
def test_every_key_has_its_effect(key, go, request):
    check = EFFECTS[key]
    more = {"tmp_path": request.getfixturevalue("tmp_path")} if "tmp_path" in check.__code__.co_varnames else {}
    check(go, **more)


# -- the rest ------------------------------------------------------------------------------------------------------------------


def test_too_little_text_for_a_batch_is_an_error_that_says_so(go):
    for setting in (FRESH, PATCHED):
        with pytest.raises(UsageError, match="train_batch_size=9"):
            go(setting, training__train_batch_size=9, data=prepared(small(), count=8))


def test_a_run_of_many_epochs_mixes_every_one_anew(go):
    """All samples are seen in every epoch, in another order."""
    run = go(training__steps=12, data=prepared(small(), count=16), modes__unconditional=0.0, modes__text_to_latent=1.0,
             modes__latent_to_text=0.0)  # fmt: skip
    epochs = [torch.cat([given[0] for given in run.inputs[i : i + 4]]) for i in (0, 4, 8)]
    orders = [[tuple(row) for row in epoch.tolist()] for epoch in epochs]
    assert set(orders[0]) == set(orders[1]) == set(orders[2]) and len({tuple(order) for order in orders}) == 3
    assert len(set(orders[0])) == 16


def test_bf16_weights_are_bf16_and_are_measured_in_it(go):
    run = go(BROKEN_WHOLE)
    assert {w.dtype for w in run.weights.values()} == {torch.bfloat16} and run.result.measured.finite
    assert any("bf16" in note for note in run.result.notes)


def test_a_folder_that_is_trained_in_again_holds_the_checkpoints_of_the_new_run(go, tmp_path):
    """A loop without a guard begins anew: what is left of a longer run may not crowd out what it keeps."""
    folder = tmp_path / "again"
    go(BROKEN_WHOLE, folder=folder, training__checkpoint_every=4, training__steps=20)
    again = go(BROKEN_WHOLE, folder=folder, training__checkpoint_every=4, training__steps=10)
    assert again.checkpoints == [4, 8] and [line["step"] for line in again.log] == list(range(10))


def test_measuring_changes_nothing(go):
    """The same weights whether it was measured or not."""
    often, seldom = go(training__eval_every=1), go()
    assert same(often.weights, seldom.weights)
    assert often.evaluated[-1] == seldom.evaluated[-1]


def test_a_window_or_two_can_be_measured(go):
    """Of so few bytes perhaps none is masked: that is NaN, not an error."""
    config = small(model__text_length=2, model__latent_length=1)
    data = prepared(config)
    data = replace(data, valid=dataset.Pairs(data.valid.ids[:1], data.valid.latents[:1]))
    for seed in range(3):
        go(data=data, model__text_length=2, model__latent_length=1, training__steps=2, training__seed=seed)


def test_the_configurations_that_ship_are_of_this_kind():
    """What is tested here on a minuscule model is what those set."""
    for size in ("tiny", "base"):
        assert set(KEYS) == {
            f"{part}.{key}" for part, keys in Config.load(size).to_json().items() if part != "size" for key in keys
        }
