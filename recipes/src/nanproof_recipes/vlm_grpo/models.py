"""The vision-language model: transformers' own LLaVA at a size that trains in a minute, or any local one.

Its tokenizer is trained on the spot, on the words of the scenes; its image processor is the one that needs no torchvision. The
sizes are those of a toy and of a run on one large GPU: the class, the processor and the way through them are the real ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from nanproof import UsageError
from nanproof_recipes.library import printable
from nanproof_recipes.machine import needs
from nanproof_recipes.vlm_grpo.data import scenes

TINY, BASE = "tiny", "base"
VERDICT = "<iou>"
"""The judge's token: what follows it is how well the place was met, in tenths. No model may write it."""
IMAGE = "<image>"
_ADAPTED = r".*(language_model|text_model)\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
"""Layers of the language model, as LLaVA's and Idefics' classes name it. What sees has layers of these names too."""
_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['content'] is string %} {{ m['content'] }} {% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %} <image> {% else %} {{ part['text'] }} {% endif %}{% endfor %}{% endif %}"
    "{% if m['role'] == 'assistant' %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Size:
    """Of both halves of a model."""

    hidden: int
    layers: int
    heads: int
    seen_hidden: int
    seen_layers: int
    patch: int = 8


SIZES = {TINY: Size(96, 3, 4, 64, 2), BASE: Size(512, 12, 8, 384, 8, patch=4)}


@dataclass(frozen=True, slots=True)
class Seeing:
    """A model that takes images and text, and its processor."""

    model: Any
    processor: Any
    source: str

    @property
    def tokenizer(self) -> Any:
        return self.processor.tokenizer

    @property
    def image_token(self) -> int | None:
        """What stands for an image in the text. Configs have it under one of two names."""
        config = self.model.config
        found = getattr(config, "image_token_id", None)
        found = getattr(config, "image_token_index", None) if found is None else found
        return None if found is None else int(found)

    def token(self, word: str) -> int:
        """Of a word that is one token. The id of <unk> is no answer: another word would be banned, or judged."""
        there = self.tokenizer.get_vocab()
        if word not in there:
            raise UsageError(f"--model {printable(self.source)}: its tokenizer has no token {word}. Load it with `load`")
        return int(there[word])


def load(source: str = TINY, seed: int = 0) -> Seeing:
    """In fp32, on the CPU. `source`: "tiny" or "base", made from a config with new weights, or a folder with a model."""
    needs("transformers", "tokenizers", "PIL", "peft")
    if source in SIZES:
        processor = _processor(SIZES[source].patch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Seeing(_new(SIZES[source], processor.tokenizer), processor, source)
    return _from(source, seed)


def _from(source: str, seed: int) -> Seeing:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    said = printable(source)
    if not Path(source).is_dir():
        raise UsageError(f"--model {said}: no such folder. Give tiny, base, or a folder with a model and its processor")
    own: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}  # code of the folder is not run, nor asked about
    try:
        processor = AutoProcessor.from_pretrained(source, **own)
        # only safetensors: nothing is unpickled
        model = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32, use_safetensors=True, **own)
    except (OSError, ValueError, RuntimeError, ImportError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        first = printable((str(error).strip().splitlines() or [type(error).__name__])[0])
        raise UsageError(f"--model {said}: could not be loaded as a model of images and text ({first})") from error
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is None or getattr(processor, "image_processor", None) is None:
        raise UsageError(f"--model {said}: its processor has no tokenizer or no image processor. Give one for images and text")
    if tokenizer.eos_token_id is None or getattr(processor, "chat_template", None) is None:
        raise UsageError(f"--model {said}: an end-of-sequence token and a chat template are needed")
    if not any(re.fullmatch(_ADAPTED, name) for name, _ in model.named_modules()):
        raise UsageError(
            f"--model {said}: {type(model).__name__} has no language_model or text_model with the usual linear layers, so there "
            "is nothing to put adapters on"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if VERDICT not in tokenizer.get_vocab():
        tokenizer.add_tokens([VERDICT], special_tokens=True)  # add_special_tokens would make the special ones it has plain
        rows = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[index]
        with torch.random.fork_rng(devices=[]):  # the new row is drawn
            torch.manual_seed(seed)
            model.resize_token_embeddings(max(len(tokenizer), rows))
    return Seeing(model, processor, source)


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core: Any = Tokenizer(models.WordLevel(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = ["<pad>", "<end>", "<unk>", "<user>", "<assistant>", IMAGE, VERDICT]
    trainer = trainers.WordLevelTrainer(special_tokens=special, show_progress=False)
    texts = [f"{s.question} {s.answer}" for s in scenes.make(2000, 0, seed=0)["train"]]
    every = [" ".join(map(str, range(11))), *scenes.COLOURS, *scenes.FORMS, *scenes.SIZES]
    core.train_from_iterator([*texts, *every], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<end>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>", IMAGE, VERDICT],
        padding_side="left",
    )


def _processor(patch: int) -> Any:
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    side = {"height": scenes.SIDE, "width": scenes.SIDE}
    images = CLIPImageProcessorPil(
        size=side, crop_size=side, do_resize=False, do_center_crop=False, image_mean=[0.3] * 3, image_std=[0.3] * 3
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=_tokenizer(),
        patch_size=patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE,
        chat_template=_TEMPLATE,
    )


def _new(size: Size, tokenizer: Any) -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sees = CLIPVisionConfig(
        hidden_size=size.seen_hidden,
        intermediate_size=2 * size.seen_hidden,
        num_hidden_layers=size.seen_layers,
        num_attention_heads=max(1, size.seen_hidden // 16),
        image_size=scenes.SIDE,
        patch_size=size.patch,
    )
    says = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config = LlavaConfig(
        vision_config=sees,
        text_config=says,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=(scenes.SIDE // size.patch) ** 2,
        tie_word_embeddings=False,
    )
    model = LlavaForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def adapters(rank: int, alpha: int) -> Any:
    """LoRA on every linear layer of the language model; what sees stays as it is."""
    from peft import LoraConfig

    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=_ADAPTED,
        task_type="CAUSAL_LM",
        lora_dropout=0.0,
    )


def with_adapters(model: nn.Module, rank: int, alpha: int, *, seed: int) -> Any:
    """The model with new adapters: nothing else of it learns."""
    from peft import get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, adapters(rank, alpha))
