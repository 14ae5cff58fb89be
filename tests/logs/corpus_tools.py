"""Logs of tools beyond transformers: boosted trees, spaCy, fastai, reinforcement learning, DeepSpeed under a bar, and formats.

Really run: LightGBM, XGBoost, CatBoost, spaCy, fastai, Stable-Baselines3, rsl_rl, transformers, DeepSpeed, and of fairseq its
progress bar and its loss scaler. Only printed, from a real run of a small network: fairseq's old lines, Megatron-LM, darknet,
YOLOv5, DLLogger, Coqui TTS.
"""

from __future__ import annotations

import importlib
import logging
import math
import random
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from corpus_others import private
from corpus_torch import at, scaled, steps
from corpus_transformers import Numbers, Samples, trained
from make_corpus import log, said, scrubbed
from torch import nn
from torch.nn import functional as F

# Boosted trees.


@cache
def table() -> tuple[Any, Any]:
    """400 rows of 6 features and a number to be learned; the last 100 are for validation."""
    import numpy as np

    made = np.random.default_rng(0)
    x = made.normal(size=(400, 6))
    return x, 2 * x[:, 0] + np.sin(3 * x[:, 1]) + 0.1 * made.normal(size=400)


def lightgbm(path: Path, rounds: int = 20, *, classes: bool = False, rate: Any = None, **settings: Any) -> None:
    """lgb.train, evaluated on both parts in every round; `rate` is a learning rate for each round."""
    import lightgbm as lgb

    x, y = table()
    y = y > 0 if classes else y
    settings = {"objective": "binary" if classes else "regression", "num_threads": 1, "verbose": -1, **settings}
    settings.setdefault("metric", "binary_logloss" if classes else "l2")
    with said(path):
        training = lgb.Dataset(x[:300], y[:300])
        valid = training.create_valid(x[300:], y[300:])
        callbacks = [lgb.log_evaluation(1), *([lgb.reset_parameter(learning_rate=rate)] if rate else [])]
        lgb.train(settings, training, rounds, [training, valid], ["training", "valid_1"], callbacks=callbacks)


@log("healthy_lightgbm.log", "LightGBM, two classes, binary_logloss")
def _(path):
    lightgbm(path, classes=True, learning_rate=0.05)


@log(
    "lightgbm_divergence.log",
    "LightGBM at a learning rate of 3: every round doubles what is left to learn",
    "divergence",
    step=(1, 6),
)
def _(path):
    lightgbm(path, learning_rate=3.0)


@log("lightgbm_inf.log", "LightGBM; the learning rate goes from 0.1 to 1e200 in round 9", "inf", step=(9, 9))
def _(path):
    lightgbm(path, rate=lambda i: 0.1 if i < 8 else 1e200)


def xgboost(path: Path, rounds: int = 20, rate: Any = None, **settings: Any) -> None:
    import xgboost as xgb

    x, y = table()
    training, valid = xgb.DMatrix(x[:300], y[:300]), xgb.DMatrix(x[300:], y[300:])
    callbacks = [xgb.callback.LearningRateScheduler(rate)] if rate else []
    with said(path):
        xgb.train({"nthread": 1, **settings}, training, rounds, evals=[(training, "train"), (valid, "eval")], callbacks=callbacks)


@log("healthy_xgboost.log", "XGBoost, rmse on both parts")
def _(path):
    xgboost(path, max_depth=3, eta=0.2)


@log(
    "xgboost_divergence.log",
    "XGBoost with eta 2.6: every round overshoots by more than what was left",
    "divergence",
    step=(0, 6),
)
def _(path):
    xgboost(path, eta=2.6)


@log("xgboost_inf.log", "XGBoost; eta goes from 0.3 to 1e25 after round 8: rmse inf, later nan", "inf", step=(9, 9))
def _(path):
    xgboost(path, rate=lambda i: 0.3 if i < 8 else 1e25)  # it is asked after round i, for the next


@log("healthy_catboost.log", "CatBoost, two classes")
def _(path):
    import catboost

    x, y = table()
    with said(path) as text:
        model = catboost.CatBoostClassifier(iterations=25, learning_rate=0.1, depth=3, thread_count=1, allow_writing_files=False)
        model.fit(x[:300], y[:300] > 0, eval_set=(x[300:], y[300:] > 0), log_cout=text, log_cerr=text)


# spaCy and fastai.


def spacy(path: Path, rate: float) -> None:
    """spacy.cli.train: an entity recognizer on 20 sentences, of which a fifth have the wrong label, so that the loss stays
    above 0."""
    import spacy as tool
    from spacy.cli.init_config import init_config
    from spacy.cli.train import train
    from spacy.tokens import DocBin, Span

    nlp, chosen = tool.blank("en"), random.Random(1)

    def documents(count: int) -> Any:
        made = DocBin()
        for i in range(count):
            doing = chosen.choice(["lives", "works", "was born"])
            doc = nlp(f"{chosen.choice(['Ada', 'Grace', 'Alan'])} {doing} in {chosen.choice(['Paris', 'London', 'Oslo'])} .")
            labels = ("ORG", "PERSON") if i % 5 == 4 else ("PERSON", "GPE")
            doc.ents = [Span(doc, 0, 1, label=labels[0]), Span(doc, len(doc) - 2, len(doc) - 1, label=labels[1])]
            made.add(doc)
        return made

    documents(20).to_disk("train.spacy")
    documents(10).to_disk("dev.spacy")
    init_config(lang="en", pipeline=["ner"], optimize="efficiency").to_disk("config.cfg")
    settings = {"max_steps": 150, "eval_frequency": 10, "optimizer.learn_rate": rate}
    with said(path):
        train(
            Path("config.cfg"),
            overrides={
                "paths.train": "train.spacy",
                "paths.dev": "dev.spacy",
                "components.tok2vec.model.encode.width": 32,
                **{f"training.{name}": value for name, value in settings.items()},
            },
        )


@log("healthy_spacy.log", "spaCy's table: an entity recognizer; a row sums the loss since the row before")
def _(path):
    spacy(path, 0.001)


@log("spacy_nan.log", "spaCy at a learning rate of 1e18: the weights overflow in the first steps", "nan", step=(1, 10))
def _(path):
    spacy(path, 1e18)


def fastai(path: Path, epochs: int, spoiled: int | None = None, bars: bool = True) -> None:
    """fastai's Learner; with `spoiled`, one batch of that epoch is NaN."""
    import fastai.callback.progress  # noqa: F401  # the bar comes by being imported
    from fastai.basics import Callback, DataLoader, DataLoaders, Learner, mae

    torch.manual_seed(0)
    data = Samples(384, noise=0.5)
    pairs = [[(data.x[i], data.y[i]) for i in part] for part in (range(320), range(320, 384))]

    class Spoils(Callback):
        def before_batch(self):
            if self.training and self.epoch == spoiled and self.iter == 1:
                self.learn.xb = (self.x * math.nan,)

    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    loaders = DataLoaders(*[DataLoader(part, bs=160, num_workers=0) for part in pairs])
    learner = Learner(loaders, net, loss_func=nn.MSELoss(), metrics=mae, cbs=Spoils())
    with said(path):
        if bars:
            learner.fit(epochs, 1e-2)
        else:
            with learner.no_bar():
                learner.fit(epochs, 1e-2)


@log("healthy_fastai.log", "fastai's Learner, its table and its bars")
def _(path):
    fastai(path, 8)


@log("fastai_nan.log", "fastai's Learner, its table and its bars; NaN in a batch of epoch 4", "nan", step=(4, 4))
def _(path):
    fastai(path, 7, spoiled=4)


@log(
    "fastai_list_nan.log",
    "fastai's Learner without its bars: a list for each epoch, without names; NaN in a batch of epoch 6",
    "nan",
    line=(7, 7),
)
def _(path):
    fastai(path, 10, spoiled=6, bars=False)


# Reinforcement learning.


def point(reward: Callable[[int, float], float] = lambda step, value: value) -> Any:
    """A point on a line that should go to 0; an episode has 20 steps."""
    import gymnasium
    import numpy as np

    class Point(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-10, 10, (2,), np.float32)
        action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        taken = 0

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.x, self.t = float(self.np_random.normal()), 0
            return self.seen(), {}

        def seen(self):
            return np.array([self.x, self.t / 20], np.float32)

        def step(self, action):
            self.x += 0.3 * float(action[0])
            self.t, self.taken = self.t + 1, self.taken + 1
            return self.seen(), reward(self.taken, -(self.x**2)), False, self.t >= 20, {}

    return Point()


def ppo(env: Any, *, catch: bool = False, steps: int = 8, callback: Any = None, verbose: int = 1, **settings: Any) -> Any:
    from stable_baselines3 import PPO

    torch.set_num_threads(1)
    settings = {"n_steps": 128, "batch_size": 64, "n_epochs": 4, "seed": 0, "device": "cpu", **settings}
    model = PPO("MlpPolicy", env, verbose=verbose, **settings)
    try:
        model.learn(steps * 128, callback=callback)
    except (ValueError, RuntimeError):
        if not catch:
            raise
        print(scrubbed(traceback.format_exc()))
    return model


@log("healthy_sb3.log", "Stable-Baselines3, PPO on CartPole")
def _(path):
    with said(path):
        ppo("CartPole-v1", steps=8, n_epochs=10)


@log(
    "sb3_value_inf.log",
    "Stable-Baselines3, PPO; rewards of 1e25 from the fifth rollout on (after 512 steps): their square is Inf in fp32",
    "inf",
    line=(102, 123),
)
def _(path):
    with said(path):
        ppo(point(lambda step, value: value * 1e25 if step > 512 else value), steps=8)


@log(
    "sb3_noise_annealed.log",
    "Stable-Baselines3, PPO; a callback lowers the noise in a line that reaches 0 at the seventh rollout: the real traceback",
    "bad-probabilities",
    line=(124, 157),
)
def _(path):
    from stable_baselines3.common.callbacks import BaseCallback

    class Annealed(BaseCallback):
        rollouts = 0

        def _on_rollout_start(self):
            std = max(0.0, 0.9 - 0.15 * self.rollouts)
            self.model.policy.log_std.data.fill_(math.log(std) if std > 1e-6 else -math.inf)
            self.rollouts += 1

        def _on_step(self):
            return True

    with said(path):
        ppo(point(), steps=10, catch=True, callback=Annealed())


@log(
    "sb3_nan_observation.log",
    "Stable-Baselines3, PPO on CartPole whose state becomes NaN after 500 steps: the real traceback",
    "bad-probabilities",
    line=(56, 89),
)
def _(path):
    import gymnasium

    class Broken(gymnasium.ObservationWrapper):
        taken = 0

        def observation(self, observation):
            self.taken += 1
            return observation * math.nan if self.taken > 500 else observation

    with said(path):
        ppo(Broken(gymnasium.make("CartPole-v1")), steps=8, catch=True)


@log(
    "healthy_sb3_unmonitored.log",
    "Stable-Baselines3, PPO, the flat table of its predecessors: no Monitor, so that eprewmean is nan; all losses are finite",
)
def _(path):
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.logger import HumanOutputFormat, Logger
    from stable_baselines3.common.vec_env import DummyVecEnv

    class Flat(BaseCallback):
        updates = 0

        def _on_rollout_start(self):
            known = self.model.logger.name_to_value
            if self.updates:
                flat.record("eplenmean", math.nan)
                flat.record("eprewmean", math.nan)
                flat.record("explained_variance", float(known["train/explained_variance"]))
                flat.record("fps", int(self.num_timesteps / (time.monotonic() - began)))
                flat.record("nupdates", self.updates)
                flat.record("policy_entropy", -known["train/entropy_loss"])
                flat.record("policy_loss", known["train/policy_gradient_loss"])
                flat.record("total_timesteps", self.num_timesteps)
                flat.record("value_loss", known["train/value_loss"])
                flat.dump(self.num_timesteps)
            self.updates += 1

        def _on_step(self):
            return True

    with said(path) as text:
        began = time.monotonic()
        flat = Logger(None, [HumanOutputFormat(text)])
        ppo(DummyVecEnv([point]), steps=12, verbose=0, callback=Flat())


def rsl_rl(path: Path, iterations: int, reward: Callable[[int, Any], Any] = lambda step, value: value, **settings: Any) -> None:
    """rsl_rl's OnPolicyRunner on 16 points that should go to 0; an iteration is 24 steps."""
    from rsl_rl.runners import OnPolicyRunner

    class Points:
        num_envs, num_actions, max_episode_length, device, cfg = 16, 2, 25, "cpu", types.SimpleNamespace()

        def __init__(self):
            self.x, self.t, self.taken = torch.randn(16, 2), torch.zeros(16, dtype=torch.long), 0
            self.episode_length_buf = self.t

        def get_observations(self):
            return self.x.clone(), {"observations": {}}

        def step(self, action):
            self.taken += 1
            self.x = (self.x + 0.2 * action.clamp(-1, 1)).clamp(-3, 3)
            self.t += 1
            done = self.t >= 25
            gained = reward(self.taken, -0.1 * self.x.square().sum(1))
            shown = {"Episode_Reward/near_origin": -self.x.norm(dim=1).mean()}
            self.x[done], self.t[done] = torch.randn(int(done.sum()), 2), 0
            return self.x.clone(), gained, done.long(), {"observations": {}, "time_outs": done, "log": shown}

    torch.manual_seed(0)
    learner = {"class_name": "PPO", "num_learning_epochs": 2, "num_mini_batches": 2, "schedule": "fixed", "learning_rate": 3e-3}
    policy = {"class_name": "ActorCritic", "actor_hidden_dims": [32], "critic_hidden_dims": [32], "activation": "elu"}
    config = {
        "algorithm": {**learner, "entropy_coef": 0.0, **settings},
        "policy": policy,
        "num_steps_per_env": 24,
        "save_interval": 1000,
        "empirical_normalization": False,
    }
    with said(path):
        try:
            OnPolicyRunner(Points(), config, log_dir="rsl", device="cpu").learn(iterations)
        except RuntimeError:
            print(scrubbed(traceback.format_exc()))


@log("healthy_rsl_rl.log", "rsl_rl's blocks, PPO on a toy")
def _(path):
    rsl_rl(path, 11)


@log("rsl_rl_inf.log", "rsl_rl; rewards of 1e25 from iteration 6 on: their square is Inf in fp32", "inf", step=(6, 6))
def _(path):
    rsl_rl(path, 9, lambda step, value: value * 1e25 if step > 24 * 6 else value)


@log(
    "rsl_rl_std.log",
    "rsl_rl with an entropy coefficient of the wrong sign: the std, a plain parameter, falls below 0 in iteration 8",
    "bad-probabilities",
    line=(139, 169),
)
def _(path):
    rsl_rl(path, 40, entropy_coef=-1.0, learning_rate=3e-2)


# Large models.


def megatron(row: dict[str, float], total: int) -> None:
    """As Megatron-LM's training_log prints: an average that is not above 0, NaN too, is left out; the gradient's norm is not."""
    line = " iteration {:8d}/{:8d} |".format(int(row["step"]), total)
    line += " consumed samples: {:12d} |".format(32 * int(row["step"]))
    line += f" elapsed time per iteration (ms): {4.2:.1f} | learning rate: {row['lr']:.3E} | global batch size: {32:5d} |"
    if row["loss"] > 0.0:
        line += " {}: {:.6E} |".format("lm loss", row["loss"])
    line += f" loss scale: {1.0:.1f} | grad norm: {row['grad_norm']:.3f} |"
    print(line + f" number of skipped iterations: {0:3d} | number of nan iterations: {0:3d} |")


@log(
    "megatron_loss_missing.log",
    "Megatron-LM's format in bf16, where nothing counts NaN: from iteration 31 on lm loss is not in the line",
    "nan",
    step=(31, 31),
)
def _(path):
    with said(path):
        for row in steps(38, batch=at(31), first=1):
            megatron(row, 500000)


@cache
def fairseq() -> tuple[Any, Any]:
    """Its progress bar and its loss scaler, without the package around them, which does not import on a Python of today."""
    found = Path(next(p for p in sys.path if (Path(p) / "fairseq").is_dir())) / "fairseq"
    for name, folder in (("fairseq", found), ("fairseq.optim", found / "optim")):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(folder)]
    bar = importlib.import_module("fairseq.logging.progress_bar")
    return bar, importlib.import_module("fairseq.optim.dynamic_loss_scaler")


def fairseq_run(path: Path, n: int, spoiled: Callable[[int], bool], scale: float) -> None:
    """fp16 under autocast, fairseq's scaler and its bar; a line every 5 updates."""
    bar, scaler = fairseq()
    torch.manual_seed(1)
    net, truth = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 10)), torch.randn(16, 10)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    scaling = scaler.DynamicLossScaler(init_scale=scale, scale_window=50)
    with said(path) as text:
        handler = logging.StreamHandler(text)
        handler.setFormatter(logging.Formatter("%(asctime)s | %(levelname)s | %(name)s | %(message)s", "%Y-%m-%d %H:%M:%S"))
        root = logging.getLogger()
        before, level, root.handlers = root.handlers, root.level, [handler]
        root.setLevel(logging.INFO)
        updates, shown = 0, bar.SimpleProgressBar(range(n), epoch=1, log_interval=5)
        try:
            for i in shown:
                x = torch.randn(32, 16)
                y = (x @ truth).argmax(1)
                with torch.autocast("cpu", torch.float16):
                    out = net(x * 3e38 if spoiled(i) else x)
                loss = F.cross_entropy(out.float(), y)
                opt.zero_grad()
                scaling.scale(loss).backward()
                for p in net.parameters():
                    p.grad.div_(scaling.loss_scale)
                norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                try:
                    scaling.check_overflow(norm.item())
                except OverflowError as error:
                    told = f"NOTE: gradient overflow detected, ignoring gradient, {error}"
                    logging.getLogger("fairseq.trainer").info(told)
                    continue
                opt.step()
                scaling.update()
                updates += 1
                bits = loss.item() / math.log(2)
                values = {"loss": round(bits, 3), "ppl": round(2**bits, 2), "wps": 9120.4, "ups": 17.83, "wpb": 512, "bsz": 32}
                values |= {"num_updates": updates, "lr": 0.003, "gnorm": round(norm.item(), 3), "clip": 100}
                values |= {"loss_scale": scaling.loss_scale, "train_wall": 1, "wall": 2}
                shown.log(values, tag="train_inner", step=updates)
        except FloatingPointError:
            print(scrubbed(traceback.format_exc()))
        finally:
            root.handlers = before
            root.setLevel(level)


@log(
    "fairseq_overflow.log",
    "fairseq's bar and loss scaler; every batch after the 60th overflows in fp16: the scale sinks to its minimum, the real error",
    "scale-collapse",
    line=(13, 40),
)
def _(path):
    fairseq_run(path, 200, lambda i: i > 60, 128.0)


@log("healthy_fairseq.log", "fairseq's bar and loss scaler, fp16 with a scale that grows")
def _(path):
    fairseq_run(path, 160, lambda i: False, 128.0)


@log(
    "fairseq_old_overflow.log",
    "fairseq's lines of 2019 (printed by a loop), a real GradScaler: after batch 40 all overflows, the scale sinks below 1",
    "scale-collapse",
    line=(9, 26),
)
def _(path):
    with said(path):
        before, done = 65536.0, 0
        for row in scaled(70, lambda step: step > 40):
            if row["scale"] < before:
                print(f"| WARNING: overflow detected, setting loss scale to: {row['scale']}")
            elif row["step"] % 5 == 0:
                bits = row["loss"] / math.log(2)
                print(
                    f"| epoch 001:  {int(row['step']):5d} / 2000 loss={bits:.3f}, nll_loss={bits:.3f}, ppl={2**bits:.2f}, "
                    f"wps=9120, ups=17.8, wpb=512.000, bsz=32.000, num_updates={done}, lr={row['lr']:g}, "
                    f"gnorm={row['grad_norm']:.3f}, clip=100%, oom=0.000, loss_scale={row['scale']:.3f}, wall=2, train_wall=1"
                )
            done += row["scale"] >= before
            before = row["scale"]


DEEPSPEED = """
import os, sys, torch, deepspeed
from tqdm import tqdm
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29767", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
deepspeed.init_distributed("gloo", verbose=False)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 10))
config = {"train_micro_batch_size_per_gpu": 16, "steps_per_print": 1000, "zero_optimization": {"stage": 1},
          "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}}, "gradient_clipping": 1.0,
          "fp16": {"enabled": True, "initial_scale_power": 12, "hysteresis": 1}}
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger
get_accelerator().is_fp16_supported = lambda: True  # its check, not its arithmetic
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
truth = torch.randn(16, 10)
for target in (logger, *logger.handlers):
    target.setLevel("INFO")
bar = tqdm(total=2724, ascii=True, mininterval=0, ncols=100)
for step in range(1, 61):
    x = torch.randn(16, 16)
    y = (x @ truth).argmax(1)
    if step > 20:
        x[0] = 7e4
    engine.backward(torch.nn.functional.cross_entropy(engine(x.half()).float(), y))
    engine.step()
    bar.update()
"""


@log(
    "deepspeed_bar.log",
    "DeepSpeed, fp16, no losses printed, behind a tqdm bar as under a Trainer; features beyond fp16's range from step 21",
    "scale-collapse",
    step=(20, 21),
)
def _(path):
    Path("run.py").write_text(DEEPSPEED)
    command = [sys.executable, "-u", "run.py"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240)
    text = scrubbed(done.stdout.decode())
    assert "OVERFLOW" in text and "minimum" in text, text[-600:]
    private(text.encode())
    path.write_bytes(text.encode())


@log("dllogger_nan.log", "DLLogger's lines (printed by a loop); NaN data at iteration 23", "nan", step=(23, 23))
def _(path):
    with said(path):
        print("DLL 2026-01-01 10:00:00.000000 - PARAMETER batch_size : 32 learning_rate : 0.003 amp : False seed : 0 ")
        for row in steps(40, batch=at(23)):
            dllogger(row)


@log("healthy_dllogger.log", "DLLogger's lines (printed by a loop)")
def _(path):
    with said(path):
        for row in steps(80, evaluate=40):
            if row["step"] % 2 == 0 or "eval_loss" in row:
                dllogger(row)


def dllogger(row: dict[str, float]) -> None:
    """As StdOutBackend prints with the step's format of NVIDIA's BERT."""
    at_step = f"DLL 2026-01-01 10:00:{int(row['step']) % 60:02d}.123456 - "
    at_step += f"Training Epoch: 0 Training Iteration: {int(row['step'])} "
    print(f"{at_step} loss : {row['loss']}  grad_norm : {row['grad_norm']}  lr : {row['lr']} ")
    if "eval_loss" in row:
        print(f"{at_step}Validation Iteration: 0  loss : {row['eval_loss']} ")


# Detectors.


@log("darknet_nan.log", "darknet's lines (printed by a loop); NaN data at batch 2677", "nan", step=(2677, 2677))
def _(path):
    with said(path):
        darknet(steps(2710, batch=at(2677), first=2640, seed=2))


@log(
    "healthy_darknet.log",
    "darknet's lines (printed by a loop, those of its layers made up): a layer that had no object prints -nan, as it should",
)
def _(path):
    with said(path):
        darknet(steps(60, first=1, seed=2), regions=True)


def darknet(rows: Iterator[dict[str, float]], regions: bool = False) -> None:
    average = None
    for row in rows:
        step, loss = int(row["step"]), row["loss"]
        average = loss if average is None else 0.9 * average + 0.1 * loss
        if regions and step % 4 == 1:
            for layer in (82, 94, 106):
                seen = layer != 82 + 12 * (step // 4 % 3)
                overlap, class_, thing = (f"{v:.6f}" if seen else "-nan" for v in (0.3 + step / 300, 0.99 - loss / 9, 0.4))
                recall = "0.500000" if seen else "-nan"
                print(
                    f"Region {layer} Avg IOU: {overlap}, Class: {class_}, Obj: {thing}, No Obj: 0.003217, "
                    f".5R: {recall}, .75R: {recall},  count: {2 * seen}"
                )
        print(f"{step}: {loss:f}, {average:f} avg, {0.001:f} rate, {4.1:f} seconds, {step * 64} images")


def detector(epochs: int, bad: int | None = None) -> Iterator[dict[str, float]]:
    """A small network with three losses, box, object and class; the mean of each over an epoch. `bad`: NaN from that epoch on."""
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    y = x @ torch.randn(16, 8)
    net = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 8))
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(epochs):
        total = torch.zeros(3)
        for i in range(0, 512, 64):
            features = x[i : i + 64].clone()
            if epoch == bad and i == 256:
                features[0, 0] = math.nan
            out, want = net(features), y[i : i + 64]
            parts = torch.stack(
                [
                    0.05 * F.mse_loss(out[:, :3], want[:, :3].tanh()),
                    0.1 * F.binary_cross_entropy_with_logits(out[:, 3], (want[:, 3] > 0).float()),
                    0.05 * F.cross_entropy(out[:, 4:], want[:, 4:].argmax(1)),
                ]
            )
            opt.zero_grad()
            parts.sum().backward()
            opt.step()
            total += parts.detach()
        out = net(x)
        right = ((out[:, 3] > 0) == (y[:, 3] > 0)) & (out[:, 4:].argmax(1) == y[:, 4:].argmax(1)) & out.isfinite().all(1)
        losses = dict(zip(("box", "obj", "cls"), (total / 8).tolist(), strict=True))
        yield {"epoch": epoch, "epochs": epochs, "right": right.float().mean().item(), **losses}


def yolo(rows: Iterator[dict[str, float]], header: bool) -> None:
    """YOLOv5's table, its bar at 100%."""
    names = ("Epoch", "gpu_mem", "box", "obj", "cls", "labels", "img_size")
    for row in rows:
        if header:
            print("\n" + "%10s" * 7 % names)
        shown = ("%10s" * 2 + "%10.4g" * 5) % (
            f"{row['epoch']}/{row['epochs'] - 1}",
            "2.64G",
            *(row["box"], row["obj"], row["cls"]),
            17 + row["epoch"] % 5,
            640,
        )
        print(shown + ": 100%|██████████| 8/8 [00:02<00:00,  3.27it/s]")
        if header:
            found = row["right"]
            print(f"{'Class':>20}" + "%11s" * 6 % ("Images", "Labels", "P", "R", "mAP@.5", "mAP@.5:.95"))
            print(f"{'all':>20}" + "%11i" * 2 % (128, 929) + "%11.3g" * 4 % (found, found, found, found))


@log("yolo_nan.log", "YOLOv5's table (printed by a loop); a NaN in the data of epoch 7", "nan", step=(7, 7))
def _(path):
    with said(path):
        yolo(detector(14, bad=7), header=True)


@log("yolo_rows_nan.log", "Rows of YOLOv5's table without its header, as people paste them; a NaN in epoch 6", "nan", line=(7, 7))
def _(path):
    with said(path):
        yolo(detector(12, bad=6), header=False)


@log("healthy_yolo_rows.log", "Rows of YOLOv5's table without its header (printed by a loop)")
def _(path):
    with said(path):
        yolo(detector(20), header=False)


# Plain loops that log little.


def gan(n: int, rate: Callable[[int], float], seed: int = 0) -> None:
    """A GAN of two small networks on points on a circle; d_loss and g_loss is all it prints."""
    torch.manual_seed(seed)
    maker = nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
    judge = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid())
    makes, judges = (torch.optim.Adam(m.parameters(), lr=2e-3, betas=(0.5, 0.999)) for m in (maker, judge))
    one, zero = torch.ones(64, 1), torch.zeros(64, 1)
    for step in range(n):
        judges.param_groups[0]["lr"] = rate(step)
        angle = 2 * math.pi * torch.rand(64, 1)
        real, fake = torch.cat([angle.cos(), angle.sin()], 1), maker(torch.randn(64, 4))
        wrong = F.binary_cross_entropy(judge(real), one) + F.binary_cross_entropy(judge(fake.detach()), zero)
        judges.zero_grad()
        wrong.backward()
        judges.step()
        missed = F.binary_cross_entropy(judge(fake), one)
        makes.zero_grad()
        missed.backward()
        makes.step()
        if step % 10 == 0:
            print(f"Epoch [{step // 100 + 1}/{n // 100}], Step [{step % 100}/100], d_loss: {wrong:.4f}, g_loss: {missed:.4f}")


@log("healthy_gan.log", "A small GAN that prints d_loss and g_loss")
def _(path):
    with said(path):
        gan(1000, lambda step: 2e-3)


@log(
    "gan_saturated.log",
    "A small GAN; the discriminator's learning rate goes from 2e-3 to 0.5 at step 300, line 31: it saturates, its gradient is 0",
    "divergence",
    line=(31, 33),
)
def _(path):
    with said(path):
        gan(800, lambda step: 2e-3 if step < 300 else 0.5)


@log("healthy_perplexity.log", "A loop that prints nothing but the perplexity")
def _(path):
    with said(path):
        for row in steps(300):
            if row["step"] % 3 == 0:
                print(f"Epoch: 1 Step: {row['step']} Train Perplexity: {math.exp(row['loss']):.3f}")


@log(
    "perplexity_divergence.log",
    "A loop that prints nothing but the perplexity; the learning rate goes from 3e-3 to 0.3 at step 150",
    "divergence",
    step=(147, 165),
)
def _(path):
    with said(path):
        for row in steps(210, lr=lambda s: 3e-3 if s < 150 else 0.3):
            if row["step"] % 3 == 0:
                print(f"Epoch: 1 Step: {row['step']} Train Perplexity: {math.exp(row['loss']):.3f}")


@log("healthy_short.log", "Three epochs that go well: too few to judge")
def _(path):
    with said(path):
        for i, row in enumerate(row for row in steps(91) if row["step"] % 45 == 0):
            print(f"epoch {i + 1}: loss {row['loss']:.4f}")


# Pieces of logs, as people paste them.


def fragment(path: Path, data: Any, first: int, last: int, **settings: Any) -> None:
    """The entries of a real trainer_state.json from step `first` to `last`, and no more of it."""
    trained(Path("state.json"), Numbers(), data, state=True, **settings)
    entries = Path("state.json").read_text().split("    {\n")
    chosen = [e for e in entries if any(f'"step": {s}\n' in e for s in range(first, last + 1))]
    path.write_text("".join("    {\n" + e.rstrip().removesuffix("],").rstrip() + "\n" for e in chosen))


@log(
    "fragment_nan.json",
    "Four entries from the middle of a real trainer_state.json; NaN in sample 200, which is in step 26",
    "hidden-nan",
    step=(26, 30),
)
def _(path):
    fragment(path, Samples(bad=200), 25, 40)


@log("healthy_fragment.json", "Six entries from the middle of a real trainer_state.json")
def _(path):
    fragment(path, Samples(), 20, 45)


@log(
    "exception_without_header.log",
    "A loop whose last batch has the wrong width: of the real traceback only the exception was kept",
    "crash",
    line=(21, 21),
)
def _(path):
    def wrong(step, x):
        return x[:, :8] if step == 20 else x

    with said(path):
        try:
            for row in steps(30, batch=wrong):
                print(f"step {row['step']} loss {row['loss']:.4f}")
        except RuntimeError:
            print(traceback.format_exc().strip().splitlines()[-1])


@log(
    "exception_glued.log",
    "Coqui TTS' lines and its check (printed by a loop); NaN at step 33, which is not printed; the last line break was lost",
    "nan-warnings",
    line=(32, 32),
)
def _(path):
    def train_step(rows):
        for row in rows:
            loss = {"decoder_loss": row["loss"], "grad_norm": row["grad_norm"]}
            if math.isnan(loss["decoder_loss"]):
                raise RuntimeError(" [!] NaN loss with decoder_loss.")
            if row["step"] % 5 == 0:
                print(f"\n   --> STEP: {row['step']}/64 -- GLOBAL_STEP: {8400 + row['step']}")
                for name, value in loss.items():
                    print(f"     | > {name}: {value:.5f}  ({value:.5f})")

    def main(args):
        train_step(args)

    with said(path):
        try:
            main(steps(64, batch=at(33)))
        except RuntimeError as error:
            print("\nTraceback (most recent call last):")
            print('  File "train_tts.py", line 721, in <module>')
            print(f"    main(args)RuntimeError: {error}")
