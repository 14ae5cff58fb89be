"""The model: transformers' own LLaVA without torchvision, in two sizes or out of a folder; adapters only where it speaks."""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch

from nanproof import UsageError
from nanproof_recipes.machine import nonfinite_tensors
from nanproof_recipes.vlm_grpo.arms import setting
from nanproof_recipes.vlm_grpo.data.scenes import GRID
from nanproof_recipes.vlm_grpo.models import IMAGE, VERDICT, Seeing, load, with_adapters
from nanproof_recipes.vlm_grpo.train.asking import examine, never, prompts, reply
from nanproof_recipes.vlm_grpo.train.grpo_loop import train
from nanproof_recipes.vlm_grpo.train.judge import readable, verdict
from nanproof_recipes.vlm_grpo.train.warm import examples

# -- made on the spot ------------------------------------------------------------------------------------------------------------


def test_the_tiny_model_is_a_llava_that_needs_no_torchvision(vlm, monkeypatch):
    """With torchvision out of reach, a new one is made and takes scenes."""
    from transformers import LlavaForConditionalGeneration, LlavaProcessor

    monkeypatch.setitem(sys.modules, "torchvision", None)  # an import of it raises
    seeing = load("tiny")
    assert isinstance(seeing.model, LlavaForConditionalGeneration) and isinstance(seeing.processor, LlavaProcessor)
    assert prompts(seeing, vlm.valid[:2])["pixel_values"].shape == (2, 3, 32, 32)
    assert "torchvision" not in {name.partition(".")[0] for name, module in sys.modules.items() if module is not None}
    assert sum(p.numel() for p in seeing.model.parameters()) < 600_000
    assert {p.dtype for p in seeing.model.parameters()} == {torch.float32}


def test_base_has_about_fifty_million_parameters():
    with torch.device("meta"):
        model = load("base").model
    assert 45e6 < sum(p.numel() for p in model.parameters()) < 55e6


def test_a_seed_makes_the_weights_and_leaves_the_random_numbers_of_the_process_alone():
    before = torch.get_rng_state()
    a, b, c = (load("tiny", seed).model.lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)
    with_adapters(load("tiny").model, 2, 4, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_word_of_every_answer_and_verdict_is_one_token(vlm):
    there = vlm.warm.tokenizer.get_vocab()
    words = {word for scene in (*vlm.train, *vlm.valid) for word in f"{scene.question} {scene.answer}".split()}
    assert words | set(map(str, range(11))) <= set(there)
    scene = vlm.valid[0]
    ids = vlm.warm.tokenizer(scene.answer, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(scene.answer.split()) and vlm.warm.tokenizer.decode(ids) == scene.answer


def test_a_prompt_has_one_place_for_each_patch_of_its_image_and_is_padded_on_the_left(vlm):
    asked = prompts(vlm.warm, vlm.valid)
    assert (asked["input_ids"] == vlm.warm.token(IMAGE)).sum(1).tolist() == [16] * len(vlm.valid)
    lengths = asked["attention_mask"].sum(1)
    assert lengths.min() < lengths.max() and bool((asked["attention_mask"][:, -1] == 1).all())
    assert bool((asked["attention_mask"].diff(dim=1) >= 0).all())
    text = vlm.warm.tokenizer.decode(asked["input_ids"][0][asked["attention_mask"][0] == 1])
    assert text.split()[0] == "<user>" and text.split()[-1] == "<assistant>" and vlm.valid[0].question in text


def test_the_picture_decides_the_reply(vlm):
    """Other pixels, other logits: what sees is connected with what speaks."""
    one = prompts(vlm.warm, vlm.valid[:1])
    other = {**one, "pixel_values": prompts(vlm.warm, vlm.valid[1:2])["pixel_values"]}
    with torch.no_grad():
        a, b = (vlm.warm.model(**x, logits_to_keep=1).logits for x in (one, other))
    assert (a - b).abs().max() > 1e-3


def test_adapters_are_in_the_language_model_alone(vlm):
    model = vlm.adapted().model
    learning = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(learning) == 3 * 7 * 2  # layers, linear layers of each, A and B
    assert all("language_model" in name and "lora_" in name for name in learning)
    assert not any("lora" in name for name, _ in model.named_modules() if "vision" in name or "projector" in name)


# -- out of a folder -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(vlm, tmp_path_factory):
    where = tmp_path_factory.mktemp("model")
    vlm.warm.model.save_pretrained(where)
    vlm.warm.processor.save_pretrained(where)
    return where


def test_a_saved_model_is_loaded_and_says_the_same(vlm, folder):
    found = load(str(folder))
    assert type(found.model) is type(vlm.warm.model) and {p.dtype for p in found.model.parameters()} == {torch.float32}
    ours, theirs = (examine(s, vlm.valid, temperature=0)[1] for s in (vlm.warm, found))
    assert ours == theirs and found.token(VERDICT) == vlm.warm.token(VERDICT)


def without_the_judge(vlm, folder):
    """The same model with a tokenizer that does not know the judge's token and has a special token of its own."""
    vlm.warm.model.save_pretrained(folder)
    vlm.warm.processor.save_pretrained(folder)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace(f'"{VERDICT}"', '"<other>"'))
    for path in (folder / "tokenizer_config.json", folder / "processor_config.json"):
        if path.exists():
            path.write_text(path.read_text().replace(f'"{VERDICT}"', '"<other>"'))
    return folder


def test_a_foreign_tokenizer_learns_the_judges_token_and_keeps_its_special_ones(vlm, tmp_path):
    """Its own special tokens stay out of the text of a reply. The new row is drawn without touching the process' numbers."""
    where = without_the_judge(vlm, tmp_path)
    before = torch.get_rng_state()
    found, again = load(str(where)), load(str(where))
    assert torch.equal(torch.get_rng_state(), before)
    size = len(vlm.warm.tokenizer)
    assert found.token(VERDICT) == size and found.model.get_output_embeddings().weight.shape[0] == size + 1
    assert torch.equal(found.model.lm_head.weight, again.model.lm_head.weight)
    assert torch.equal(found.model.lm_head.weight[:size], vlm.warm.model.lm_head.weight)
    ids = [found.token(word) for word in ("<other>", "red", VERDICT, "<user>", "circle")]
    assert found.tokenizer.decode(ids, skip_special_tokens=True).split() == ["red", "circle"]
    assert found.token("<other>") in found.tokenizer.all_special_ids
    assert size in never(found) and verdict(found, "", vlm.valid[0]) == [size, found.token("0")]
    said = reply(found, prompts(found, vlm.valid[:3]), banned=never(found))
    assert int(said.ids.max()) < size


def test_a_token_that_is_not_there_is_no_unknown_word(vlm):
    with pytest.raises(UsageError, match="no token <nothing>"):
        vlm.warm.token("<nothing>")


def test_a_missing_folder_is_named_without_steering_the_terminal(tmp_path):
    with pytest.raises(UsageError, match=r"--model .*: no such folder.*tiny, base") as error:
        load(str(tmp_path / "\x1b[2J"))
    assert "\x1b" not in str(error.value)


def test_a_folder_that_is_no_model_of_images_and_text_is_refused(vlm, folder, tmp_path):
    """Empty; a language model alone; one whose weights would have to be unpickled; one whose file of weights is cut off."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def refused(name, said="could not be loaded as a model of images and text"):
        with pytest.raises(UsageError, match=rf"--model .*{name}: {said}"):
            load(str(tmp_path / name))

    for name in ("empty", "text", "pickled", "cut"):
        (tmp_path / name).mkdir()
    refused("empty")
    config = LlamaConfig(vocab_size=49, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "text")
    vlm.warm.tokenizer.save_pretrained(tmp_path / "text")
    refused("text")
    for name in ("pickled", "cut"):
        for path in folder.iterdir():
            if path.suffix != ".safetensors":
                (tmp_path / name / path.name).write_bytes(path.read_bytes())
    torch.save(vlm.warm.model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    refused("pickled")
    (tmp_path / "cut" / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    refused("cut")


def test_code_in_a_folder_is_not_run_and_nobody_is_asked_to(tmp_path, monkeypatch):
    """transformers asks on standard input, where it is not told."""
    asked = []
    monkeypatch.setattr("builtins.input", lambda said="": asked.append(said) or "y")
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    told = {"model_type": "own", "processor_class": "P", "auto_map": {"AutoConfig": "own.C", "AutoProcessor": "own.P"}}
    for name in ("config.json", "processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps(told))
    with pytest.raises(UsageError, match="could not be loaded as a model of images and text"):
        load(str(tmp_path))
    assert asked == [] and not (tmp_path / "ran").exists()


def test_a_folder_without_a_chat_template_is_refused(folder, tmp_path):
    for path in folder.iterdir():
        if "chat_template" not in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    for name in ("processor_config.json", "tokenizer_config.json"):
        told = json.loads((tmp_path / name).read_text())
        told.pop("chat_template", None)
        (tmp_path / name).write_text(json.dumps(told))
    with pytest.raises(UsageError, match="end-of-sequence token and a chat template are needed"):
        load(str(tmp_path))


@pytest.mark.parametrize("name", ["image_token_id", "image_token_index"])
def test_the_place_of_an_image_is_found_under_either_name(vlm, name):
    """It is banned, and where a ban was lifted an unknown word stands in its place."""
    image, unknown = vlm.warm.token(IMAGE), vlm.warm.tokenizer.unk_token_id
    seeing = Seeing(SimpleNamespace(config=SimpleNamespace(**{name: image})), vlm.warm.processor, "tiny")
    assert image in never(seeing) and readable(seeing, [9, image, 8]) == [9, unknown, 8]
    nothing = Seeing(SimpleNamespace(config=SimpleNamespace()), vlm.warm.processor, "tiny")
    assert nothing.image_token is None and readable(nothing, [9, image]) == [9, image]


# -- the warm start --------------------------------------------------------------------------------------------------------------


def test_exactly_the_answer_and_its_end_are_supervised(vlm):
    rows = examples(vlm.warm, vlm.valid)
    end = vlm.warm.tokenizer.eos_token_id
    begins = prompts(vlm.warm, vlm.valid)["input_ids"].shape[1]
    for scene, ids, seen, labels in zip(vlm.valid, rows["input_ids"], rows["attention_mask"], rows["labels"], strict=True):
        wanted = [vlm.warm.token(word) for word in scene.answer.split()] + [end]
        assert labels[labels >= 0].tolist() == wanted and bool((labels[:begins] == -100).all())
        assert ids[begins : begins + len(wanted)].tolist() == wanted == labels[begins : begins + len(wanted)].tolist()
        assert seen[begins:].tolist() == [1] * len(wanted) + [0] * (len(labels) - begins - len(wanted))


def test_an_end_that_is_also_the_padding_is_supervised_once(vlm):
    """As foreign tokenizers without padding have it."""
    processor = deepcopy(vlm.warm.processor)
    processor.tokenizer.pad_token = processor.tokenizer.eos_token
    rows = examples(Seeing(vlm.warm.model, processor, "tiny"), vlm.valid)
    assert (rows["labels"] == processor.tokenizer.eos_token_id).sum(1).tolist() == [1] * len(vlm.valid)


def test_the_warm_start_teaches_the_form_of_a_reply(vlm):
    assert vlm.losses[-1] < 0.6 * vlm.losses[0]
    marks, texts = examine(vlm.warm, vlm.valid)
    assert marks.caption > 0.1 and marks.scenes == len(texts) == 16 and marks.reward == marks.caption + marks.place
    assert sum(word.isdigit() and int(word) < GRID for text in texts for word in text.split()) > 10


def test_a_foreign_model_with_parts_of_words_and_no_padding_is_trained(vlm, tmp_path):
    """A byte-level tokenizer, whose end is also its padding: the death of the broken arm, and a step of the fixed one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["</s>", IMAGE]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator([f"{s.question} {s.answer}" for s in vlm.train], trainer)
    processor = LlavaProcessor(
        image_processor=vlm.warm.processor.image_processor,
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", additional_special_tokens=[IMAGE]),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE,
        chat_template="{% for m in messages %}{% for p in m['content'] %}{{ p['text'] or '<image>' }}{% endfor %}{% endfor %}:",
    )
    told = vlm.warm.model.config.to_dict()
    told["text_config"].update(vocab_size=len(processor.tokenizer), eos_token_id=0, pad_token_id=None)
    config = LlavaConfig.from_dict({**told, "image_token_index": processor.tokenizer.convert_tokens_to_ids(IMAGE)})
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    seeing = load(str(tmp_path / "model"))
    assert seeing.tokenizer.pad_token_id == seeing.tokenizer.eos_token_id == 0 and seeing.token(VERDICT) == 300
    labels = examples(seeing, vlm.valid)["labels"]
    assert [seeing.tokenizer.decode(row[row >= 0]) for row in labels] == [f"{scene.answer}</s>" for scene in vlm.valid]
    ends = {}
    for arm in ("broken", "fixed"):
        found = setting(arm, steps=2, batch=8, group=4, warmup=1, trainer="loop")
        own = Seeing(deepcopy(seeing.model), seeing.processor, seeing.source)
        trained = train(own, vlm.train, found, tmp_path / arm, lambda done, said: None)
        ends[arm] = trained.ending[:18], trained.steps, nonfinite_tensors(trained.model)[0]
    assert ends == {"broken": ("raised RuntimeErro", 1, 42), "fixed": ("finished", 2, 0)}
