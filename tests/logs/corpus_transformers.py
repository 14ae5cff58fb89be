"""Logs of transformers' Trainer and of TRL: what they print, with their progress bars, and trainer_state.json."""

from __future__ import annotations

import json
import math
import shutil
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import torch
from make_corpus import log, said, scrubbed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset


class Numbers(nn.Module):
    """A regression, for which NaN in the data is a matter of one float."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.net(features)
        return {"loss": F.mse_loss(out, labels), "logits": out}


class Samples(Dataset):
    def __init__(
        self, count: int = 512, bad: int | None = None, seed: int = 0, value: float = math.nan, noise: float = 0.1
    ) -> None:
        torch.manual_seed(seed)
        self.x = torch.randn(count, 8)
        self.y = (self.x[:, :2].sum(1, keepdim=True)).sin() * 3 + noise * torch.randn(count, 1)
        if bad is not None:
            self.x[bad, 0] = value

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"features": self.x[i], "labels": self.y[i]}


class Tokens(Dataset):
    """Sequences that count upwards; the first `ignored` samples have no label that counts."""

    def __init__(self, count: int = 256, ignored: int = 0, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(4, 40, (count, 1), generator=generator)
        self.ids = (start + torch.arange(16)) % 60 + 2
        self.labels = self.ids.clone()
        self.labels[:ignored] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def llama(seed: int = 0, vocab: int = 64) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def ordered(kind: type) -> type:
    """A Trainer that takes the samples in their order, so that the step of a bad one is known."""
    from torch.utils.data import SequentialSampler

    class Ordered(kind):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)

    return Ordered


def trained(
    path: Path,
    model: Any,
    data: Any,
    *,
    state: bool = False,
    evaluated: Any = None,
    scaler: bool = False,
    catch: bool = False,
    **arguments: Any,
) -> Any:
    """Run the Trainer; its output, or its trainer_state.json, is the log."""
    from transformers import Trainer, TrainingArguments

    settings = {
        "output_dir": "out",
        "use_cpu": True,
        "report_to": "none",
        "logging_steps": 5,
        "per_device_train_batch_size": 8,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "seed": 0,
    }
    trainer = ordered(Trainer)(
        model=model, args=TrainingArguments(**{**settings, **arguments}), train_dataset=data, eval_dataset=evaluated
    )
    if scaler:
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
        trainer.accelerator.native_amp = True
        trainer.accelerator.state._mixed_precision = "fp16"
        trainer.accelerator.autocast_handler = None
    run(path, trainer, state, catch)
    return trainer


def run(path: Path, trainer: Any, state: bool = False, catch: bool = False) -> None:
    with said(Path("spoken.txt") if state else path):
        try:
            trainer.train()
        except Exception:
            if not catch:
                raise
            print(scrubbed(traceback.format_exc()))
    if state:
        trainer.save_state()
        shutil.copy(Path(trainer.args.output_dir) / "trainer_state.json", path)


@log(
    "hf_nan_sample.log",
    "transformers' Trainer, its bar and dictionaries; a NaN in sample 200: step 26 of batches of 8",
    "hidden-nan",
    step=(26, 30),
)
def _(path):
    trained(path, Numbers(), Samples(bad=200))


@log("hf_nan_sample_state.json", "The same, its trainer_state.json", "hidden-nan", step=(26, 30))
def _(path):
    trained(path, Numbers(), Samples(bad=200), state=True)


@log("hf_unfiltered.log", "The same with logging_nan_inf_filter=False, a line every step", "nan", step=(26, 26))
def _(path):
    trained(path, Numbers(), Samples(bad=200), logging_nan_inf_filter=False, logging_steps=1, num_train_epochs=1)


@log("hf_ignored_labels.log", "A tiny Llama; every label is -100", "no-targets", step=(5, 5))
def _(path):
    trained(path, llama(), Tokens(ignored=256))


@log("hf_ignored_labels_state.json", "The same, its trainer_state.json", "no-targets", step=(5, 5))
def _(path):
    trained(path, llama(), Tokens(ignored=256), state=True)


@log(
    "hf_some_ignored.log",
    "A tiny Llama; the labels of the first 40 samples are -100: five batches of nothing",
    "no-targets",
    severity="warning",
    step=(1, 5),
)
def _(path):
    trained(path, llama(), Tokens(ignored=40), logging_steps=1, num_train_epochs=1)


@log("hf_pure_fp16.log", "A tiny Llama loaded in fp16 with the plain AdamW: 0/0 in the first update", "hidden-nan", step=(1, 10))
def _(path):
    trained(path, llama().half(), Tokens(64), optim="adamw_torch", logging_steps=1, num_train_epochs=3)


@log("hf_rate_too_high.log", "A tiny Llama at a learning rate that rises to 1 over 200 steps", "divergence", step=(14, 130))
def _(path):
    model = llama()
    trained(
        path,
        model,
        Tokens(512),
        learning_rate=1.0,
        lr_scheduler_type="linear",
        warmup_steps=200,
        num_train_epochs=4,
        logging_steps=2,
    )


@log(
    "hf_overfit_state.json",
    "32 samples with noise as large as the signal, 60 epochs, evaluated in each",
    "overfit",
    severity="warning",
    step=(8, 120),
)
def _(path):
    trained(
        path,
        Numbers(128),
        Samples(32, noise=2.0),
        state=True,
        evaluated=Samples(256, seed=9, noise=2.0),
        eval_strategy="steps",
        eval_steps=8,
        logging_steps=8,
        num_train_epochs=80,
        learning_rate=5e-3,
    )


@log("hf_no_gradient.log", "Every parameter is frozen: the real traceback", "crash", line=(1, 80))
def _(path):
    trained(path, Numbers().requires_grad_(False), Samples(), catch=True)


@log(
    "hf_scaler_state.json",
    "Trainer with a real GradScaler on the CPU; Inf in the features of a third of the batches",
    "scaler-skipping",
    step=(5, 10),
)
def _(path):
    trained(path, Numbers(), inf_in(Samples(768), (0, 3, 4)), state=True, scaler=True, num_train_epochs=1, optim="adamw_torch")


@log("hf_scaler.log", "The same over 3 epochs, what it prints", "scaler-skipping", step=(5, 10))
def _(path):
    trained(
        path, Numbers(), inf_in(Samples(256), (0, 3, 4)), scaler=True, num_train_epochs=3, optim="adamw_torch", logging_steps=10
    )


@log(
    "hf_scaler_fused.log",
    "The same with the fused AdamW, which skips by itself, so that the schedule goes on",
    "nan-gradient",
    severity="warning",
    step=(5, 10),
)
def _(path):
    trained(path, Numbers(), inf_in(Samples(768), (0, 3, 4)), scaler=True, num_train_epochs=1)


def inf_in(data: Samples, batches: tuple[int, ...]) -> Samples:
    """Inf in the first sample of these of every eleven batches of 8."""
    for i in range(0, len(data), 8):
        if i // 8 % 11 in batches:
            data.x[i] = math.inf
    return data


@log("healthy_hf.log", "transformers' Trainer, its bar and dictionaries, evaluation")
def _(path):
    trained(path, llama(), Tokens(512), evaluated=Tokens(64, seed=3), eval_strategy="epoch", num_train_epochs=3, warmup_steps=10)


@log("healthy_hf_state.json", "trainer_state.json of a cosine schedule")
def _(path):
    trained(path, llama(1), Tokens(512), state=True, lr_scheduler_type="cosine", learning_rate=3e-3, num_train_epochs=3)


# TRL.


@cache
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *[f"w{i}" for i in range(60)]]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    found.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return found


def sentences(count: int = 256, seed: int = 0) -> list[str]:
    starts = torch.randint(0, 40, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [" ".join(f"w{(s + i) % 60}" for i in range(12)) for s in starts]


COMMON = {
    "output_dir": "out",
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "logging_steps": 2,
    "save_strategy": "no",
    "per_device_train_batch_size": 8,
    "num_train_epochs": 1,
    "seed": 0,
    "gradient_checkpointing": False,
}


def sft(path: Path, model: Any = None, state: bool = False, **arguments: Any) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_dict({"text": sentences()})
    config = SFTConfig(**{**COMMON, "max_length": 32, "learning_rate": 2e-3, **arguments})
    run(path, SFTTrainer(model or llama(), args=config, train_dataset=data, processing_class=tokenizer()), state)


@log("trl_sft_fp16.log", "TRL's SFTTrainer, the model in fp16 with the plain AdamW", "hidden-nan", step=(1, 8))
def _(path):
    sft(path, llama().half(), optim="adamw_torch")


@log(
    "trl_sft_diverges_state.json",
    "TRL's SFTTrainer, a learning rate of 2 after a warm-up, no clipping",
    "divergence",
    step=(10, 90),
)
def _(path):
    sft(path, state=True, learning_rate=2.0, warmup_steps=100, num_train_epochs=4, max_grad_norm=0.0)


@log("healthy_trl_sft.log", "TRL's SFTTrainer with LoRA")
def _(path):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    sft(path, model, num_train_epochs=3, learning_rate=5e-3)


def grpo(
    path: Path,
    reward: Any,
    *,
    state: bool = False,
    catch: bool = False,
    model: Any = None,
    callbacks: Any = None,
    **arguments: Any,
) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    data = Dataset.from_dict({"prompt": [" ".join(text.split()[:4]) for text in sentences(64)]})
    config = GRPOConfig(
        **{
            **COMMON,
            "num_generations": 4,
            "max_completion_length": 6,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "max_steps": 24,
            **arguments,
        }
    )
    trainer = GRPOTrainer(
        model or llama(), reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks
    )
    run(path, trainer, state, catch)


def rising(completions: list[str], **_: Any) -> list[float]:
    """The more even words the better."""
    return [sum(int(w[1:]) % 2 == 0 for w in c.split() if w[0] == "w") / 6 for c in completions]


@log("trl_grpo_equal_rewards.log", "TRL's GRPOTrainer with a reward of 1 for every completion", "no-targets", step=(1, 1))
def _(path):
    grpo(path, lambda completions, **_: [1.0] * len(completions))


@log(
    "trl_grpo_sampling.log",
    "TRL's GRPOTrainer at a learning rate of 1e38: weights overflow, and sampling dies: the real traceback",
    "bad-probabilities",
    line=(4, 60),
)
def _(path):
    grpo(path, rising, catch=True, learning_rate=1e38, lr_scheduler_type="constant")


@log("healthy_trl_grpo.log", "TRL's GRPOTrainer, a graded reward")
def _(path):
    grpo(path, rising, max_steps=30)


@log("healthy_trl_grpo_kl_state.json", "TRL's GRPOTrainer with a KL term: a loss that begins at 0 and grows")
def _(path):
    llama().save_pretrained("base")
    tokenizer().save_pretrained("base")
    grpo(path, rising, model="base", beta=0.05, state=True, max_steps=30)


@log("healthy_trl_dpo_state.json", "TRL's DPOTrainer: a loss that begins at 0.69")
def _(path):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    texts = sentences(128)
    data = Dataset.from_dict(
        {
            "prompt": [" ".join(t.split()[:4]) for t in texts],
            "chosen": [" " + " ".join(t.split()[4:]) for t in texts],
            "rejected": [" " + " ".join(reversed(t.split()[4:])) for t in texts],
        }
    )
    config = DPOConfig(**{**COMMON, "learning_rate": 2e-4, "num_train_epochs": 3, "max_length": 32})
    llama().save_pretrained("base")
    tokenizer().save_pretrained("base")
    run(path, DPOTrainer("base", args=config, train_dataset=data, processing_class=tokenizer()), True)


def states(path: Path) -> list[dict[str, Any]]:
    """The log history of a state, for whoever checks the maker."""
    return json.loads(path.read_text())["log_history"]
