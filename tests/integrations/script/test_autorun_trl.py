"""The scripts that come with TRL, as they were installed, under `nanproof run`: a tiny model, local data, and a fault that comes
from the environment, so that neither script nor data nor weights know of it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import forked

pytest.importorskip("trl.trainer")
import trl

FAULT = """
import torch
from torch import nn

def look(module, args, output):
    if isinstance(module, nn.Embedding) and torch.is_grad_enabled():
        return output.masked_fill((args[0] == 4).unsqueeze(-1), float("nan"))

nn.modules.module.register_module_forward_hook(look)
"""
"""A `sitecustomize`: from Python's start on, the fourth word has a NaN for its embedding whenever there is something to train."""

TRAINER = """
import sys
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

if __name__ == "__main__":
    tokenizer, model = AutoTokenizer.from_pretrained("model"), AutoModelForCausalLM.from_pretrained("model")
    rows = load_dataset("./rows")["train"].map(lambda row: tokenizer(row["text"]), remove_columns=["text"])
    args = TrainingArguments(sys.argv[1], max_steps=6, per_device_train_batch_size=4, learning_rate=1e-2, report_to="none",
                             use_cpu=True, save_strategy="no", disable_tqdm=True)
    trainer = Trainer(model, args, DataCollatorForLanguageModeling(tokenizer, mlm=False), rows)
    trainer.train()
    trainer.save_model()
"""

COMMON = (
    "--model_name_or_path model --per_device_train_batch_size 4 --max_steps 6 --learning_rate 1e-2 --report_to none --use_cpu "
    "--save_strategy no --logging_steps 1 --bf16 false --dtype float32 --gradient_checkpointing false --disable_tqdm true"
).split()
SCRIPTS = {
    "trainer": lambda out: ["trainer.py", out],
    "sft": lambda out: [_installed("sft"), *COMMON, "--dataset_name", "./rows", "--output_dir", out],
    "grpo": lambda out: [
        *(_installed("grpo"), *COMMON, "--dataset_name", "./prompts", "--output_dir", out),
        *"--num_generations 2 --max_completion_length 8 --reward_funcs rewards.length".split(),
    ],
}


def _installed(name: str) -> str:
    return str(Path(trl.__file__).parent / "scripts" / f"{name}.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, its words, rows of text of which one has the fourth word, prompts, and a reward."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    at = tmp_path_factory.mktemp("trl")
    words = ["<pad>", "<s>", "</s>", "<unk>", "cursed", *(f"w{i}" for i in range(40))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(at / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(at / "model")
    draw = random.Random(0)
    rows = [" ".join(f"w{draw.randrange(40)}" for _ in range(8)) for _ in range(24)]
    rows[9] += " cursed"
    for name, key, some in (("rows", "text", rows), ("prompts", "prompt", rows[:12])):
        (at / name).mkdir()
        (at / name / "train.jsonl").write_text("".join(json.dumps({key: text}) + "\n" for text in some))
    (at / "rewards.py").write_text(
        "def length(completions, **_):\n    return [float(len(set(c.split()))) for c in completions]\n"
    )
    (at / "trainer.py").write_text(TRAINER)
    (at / "fault").mkdir()
    (at / "fault" / "sitecustomize.py").write_text(FAULT)
    return at


def run(folder: Path, args: list[str], guarded: bool, fault: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    if fault:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder / "fault"), environment.get("PYTHONPATH")]))
    before = ["-m", "nanproof", "run", "--json"] if guarded else []
    return subprocess.run(
        [sys.executable, *before, *args], capture_output=True, text=True, cwd=folder, env=environment, timeout=180
    )


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(folder / name / "model.safetensors")


def run_forked(folder: Path, args: list[str]) -> subprocess.CompletedProcess[str]:
    """Guarded and with the fault, where torch is imported before the script is started."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    before = (
        f"import sys; sys.path.insert(0, {str(folder / 'fault')!r}); sys.modules.pop('sitecustomize', 0); import sitecustomize"
    )
    return forked.python("-m", "nanproof", "run", "--json", *args, cwd=folder, env=environment, before=before)


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_survives_a_fault(folder, name):
    """The trainer is guarded by its own adapter: finite weights, at least one refused step, and the place where it came from."""
    args = SCRIPTS[name](f"{name}-bad")
    done = run_forked(folder, args)
    assert done.returncode == 0, done.stderr
    assert all(bool(torch.isfinite(w).all()) for w in weights(folder, f"{name}-bad").values())
    (one,) = json.loads(done.stderr.strip().splitlines()[-1])["guarded"]
    assert one["name"] == {"trainer": "Trainer", "sft": "SFTTrainer", "grpo": "GRPOTrainer"}[name] and one["guarded"]
    assert one["steps"] == 6 and 1 <= one["refused"] == len(one["incidents"]) <= 5
    found = one["incidents"][0]["diagnosis"]
    assert found["op"] == "masked_fill" and "sitecustomize.py" in found["source"] and found["where"] == "model.embed_tokens"


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_without_a_fault_it_ends_in_the_same_weights(folder, name):
    """Within 1e-7: the adapter divides for clipping where torch multiplies."""
    assert run(folder, SCRIPTS[name](f"{name}-without"), guarded=False).returncode == 0
    assert run(folder, SCRIPTS[name](f"{name}-with"), guarded=True).returncode == 0
    without, guarded, before = weights(folder, f"{name}-without"), weights(folder, f"{name}-with"), weights(folder, "model")
    assert without.keys() == guarded.keys()
    assert max(float((without[key] - guarded[key]).abs().max()) for key in without) < 1e-7
    assert max(float((guarded[key] - before[key]).abs().max()) for key in before) > 1e-2, "it was trained at all"


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_fault_is_one(folder, name):
    """Without nanproof the same run ends in NaN, or not at all."""
    done = run(folder, SCRIPTS[name](f"{name}-spoiled"), guarded=False, fault=True)
    spoiled = done.returncode != 0 or any(bool(w.isnan().any()) for w in weights(folder, f"{name}-spoiled").values())
    assert spoiled
