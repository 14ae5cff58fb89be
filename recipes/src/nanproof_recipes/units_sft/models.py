"""The language model: the real one out of its wheel, any other by path or hub name, or a tiny one made on the spot."""

from __future__ import annotations

import contextlib
import io
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanproof import UsageError
from nanproof_recipes import weights
from nanproof_recipes.machine import needs
from nanproof_recipes.units_sft.data import questions

REAL, TINY = "smollm2-135m", "tiny"
SYSTEM = "Convert units. Give the result as <answer>number</answer>."
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Language:
    """A causal language model and its tokenizer."""

    model: Any
    tokenizer: Any
    source: str

    @property
    def end(self) -> int:
        """The token that a reply is taught to end in: that of the chat template, whatever the tokenizer calls its end. Out of a
        .gguf file the latter differs between versions of transformers."""
        there = self.tokenizer.get_vocab()
        found = next((there[mark] for mark in ("<|im_end|>", "<|eot_id|>") if mark in there), self.tokenizer.eos_token_id)
        if found is None:
            raise UsageError("--model: its tokenizer has no token that ends a text. Choose another model")
        return int(found)

    @property
    def ends(self) -> list[int]:
        """Tokens after which nothing more is generated."""
        return sorted({self.end, *([self.tokenizer.eos_token_id] if self.tokenizer.eos_token_id is not None else [])})


def load_language(source: str = REAL, seed: int = 0) -> Language:
    """In fp32, on the CPU; what is done to it is the arm's."""
    needs("transformers", "peft", "accelerate")
    if source == TINY:
        return tiny(seed)
    if source == REAL:
        needs("gguf")
        return _from(weights.find(weights.SMOLLM2))
    path = Path(source)
    if path.suffix == ".gguf":
        needs("gguf")
        if not path.is_file():
            raise UsageError(f"--model {source}: there is no such file")
        return _from(path)
    return _from(path if path.exists() else source)


def _from(place: Path | str) -> Language:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, options = (
        (str(place.parent), {"gguf_file": place.name}) if isinstance(place, Path) and place.is_file() else (str(place), {})
    )
    try:
        # transformers shows a bar while it unpacks a .gguf file, whatever it is told about bars
        with contextlib.redirect_stderr(io.StringIO()) if options else contextlib.nullcontext():
            # False: code in the folder is not run, and nobody is asked to run it
            tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False, **options)
            model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, trust_remote_code=False, **options)
    except (OSError, ValueError, RuntimeError, struct.error) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"--model {place}: could not be loaded ({first}). Give a folder or .gguf file that is there, a hub name that can be "
            f"reached, {TINY}, or {REAL} after `nanproof recipe weights`"
        ) from error
    if options:
        model = _plain(model)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return Language(model, tokenizer, place.stem if isinstance(place, Path) else where)


def _plain(model: Any) -> Any:
    """The same weights in a model that does not call itself quantized: they were made fp32 on loading."""
    config = type(model.config).from_dict({k: v for k, v in model.config.to_dict().items() if k != "quantization_config"})
    config.name_or_path = ""  # the folder of a .gguf file is no model's name, and PEFT would look for it on a hub
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True, strict=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    for name, buffer in model.named_buffers():
        if plain.get_buffer(name).is_meta:  # those that no state holds, such as the rotary frequencies
            owner, _, last = name.rpartition(".")
            setattr(plain.get_submodule(owner), last, buffer)
    return plain


def tiny(seed: int = 0) -> Language:
    """A model of a second's size: made from a config, with a tokenizer trained on the spot, taught for some seconds to go on from
    questions, without the tags that the recipe is about."""
    tokenizer = _tiny_tokenizer()
    model = _tiny_model(tokenizer)
    model.load_state_dict(_tiny_weights(seed))
    return Language(model, tokenizer, TINY)


@cache
def _tiny_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core: Any = Tokenizer(models.BPE())
    digits, parts = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, parts])
    core.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    sample = questions.make(400, 0, seed=0)["train"]
    core.train_from_iterator([f"{q.text}\n{q.answer('worked')}\n{SYSTEM}\nsystem user assistant" for q in sample], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=_TEMPLATE
    )


def _tiny_model(tokenizer: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


@cache
def _tiny_weights(seed: int, steps: int = 200) -> dict[str, Any]:
    """What a pretrained model is to the real recipe, this is to the tiny one."""
    from nanproof_recipes.units_sft.data.samples import Collator, example, prompt

    tokenizer = _tiny_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _tiny_model(tokenizer)
        language, collate = Language(model, tokenizer, TINY), Collator(tokenizer.pad_token_id)
        texts = questions.make(1000, 0, seed=10_000 + seed)["train"]
        rows = [
            example(language, prompt(language, q.text), q.answer("worked").replace("<answer>", "").replace("</answer>", ""))
            for q in texts
        ]
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(steps):
            batch = collate([rows[(step * 32 + i) % len(rows)] for i in range(32)])
            optimizer.zero_grad()
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    weights_now: dict[str, Any] = model.state_dict()
    return weights_now


def with_adapters(model: nn.Module, rank: int, alpha: int, *, own_dtype: bool, seed: int) -> Any:
    """LoRA on every linear layer but the head. `own_dtype`: adapters in the dtype of the model, fp16 too; PEFT makes fp32."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0)
    torch.manual_seed(seed)
    return get_peft_model(model, settings, autocast_adapter_dtype=not own_dtype)
