"""Tiny trainers of TRL: a Llama of one layer, a tokenizer of 32 words, data in memory. Runs of a few steps take a blink."""

from __future__ import annotations

import random

import torch
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

disable_progress_bar()
WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(29))]
BAD, TOOL = 31, 30
"""Tokens that the data does not hold unless a test puts them there."""


def tokenizer():
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


TOKENIZER = tokenizer()


def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **special, max_position_embeddings=64))


def lines(count, length, seed=0, bad_row=None):
    """Lines of words; `bad_row` has BAD in its middle."""
    rng = random.Random(seed)
    made = [[WORDS[rng.randrange(3, 23)] for _ in range(length)] for _ in range(count)]
    if bad_row is not None:
        made[bad_row][length // 2] = WORDS[BAD]
    return [" ".join(words) for words in made]


def arguments(kind, folder, **kwargs):
    here = {"output_dir": str(folder), "save_strategy": "no", "report_to": [], "disable_tqdm": True, "logging_steps": 1}
    plain = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False}
    training = {"per_device_train_batch_size": 4, "max_steps": 6, "learning_rate": 1e-2, "seed": 1, "optim": "adamw_torch"}
    return kind(**{**here, **plain, **training, **kwargs})


def sft(folder, bad_row=None, **kwargs):
    data = Dataset.from_dict({"text": lines(24, 8, bad_row=bad_row)})
    return SFTTrainer(model(), arguments(SFTConfig, folder, **kwargs), train_dataset=data, processing_class=TOKENIZER)


def dpo(folder, bad_row=None, **kwargs):
    data = {"prompt": [f"{line} " for line in lines(24, 4)], "chosen": lines(24, 5, 1, bad_row), "rejected": lines(24, 3, 2)}
    return DPOTrainer(
        model(),
        model(),
        arguments(DPOConfig, folder, **kwargs),
        train_dataset=Dataset.from_dict(data),
        processing_class=TOKENIZER,
    )


def count_w5(completions, **_):
    """A reward: how often a word was said."""
    return [float(text.count("w5")) for text in completions]


def grpo(folder, bad_row=None, start=None, reward=count_w5, rollout=None, evaluate=0, **kwargs):
    """`start`: a model to train; one that lies in a folder can have a reference."""
    data = Dataset.from_dict({"prompt": lines(24, 4, bad_row=bad_row)})
    made = {"num_generations": 4, "max_completion_length": 5, "generation_kwargs": {"suppress_tokens": [BAD, TOOL]}}
    return GRPOTrainer(
        start if start is not None else model(),
        reward_funcs=reward,
        args=arguments(GRPOConfig, folder, **{**made, **kwargs}),
        train_dataset=data,
        eval_dataset=data.select(range(evaluate)) if evaluate else None,
        processing_class=TOKENIZER,
        rollout_func=rollout,
    )


def divide_by_zero_at_bad_tokens(module):
    """A layer that divides by 0 where a token is BAD, when it is trained: the data triggers it, and sampling does not."""
    seen: list[list[int]] = []

    def hook(_, args, out):
        if not torch.is_grad_enabled():
            return out
        bad = args[0] == BAD
        seen.append(bad.any(1).nonzero().flatten().tolist())
        return out / (~bad).to(out.dtype).unsqueeze(-1)

    module.get_input_embeddings().register_forward_hook(hook)
    return seen


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def finite(trainer):
    return all(bool(p.isfinite().all()) for p in trainer.model.parameters())


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]
