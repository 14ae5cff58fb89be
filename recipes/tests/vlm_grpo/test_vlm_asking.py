"""Asking: replies end where they end, banned tokens are not drawn, and temperature 0 is the likeliest token. The judge's head and
the document's patches do what they are measured for."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nanproof import UsageError
from nanproof_recipes.vlm_grpo.models import IMAGE, VERDICT, Seeing
from nanproof_recipes.vlm_grpo.patches import DocumentProcessor, document_callback
from nanproof_recipes.vlm_grpo.train import asking
from nanproof_recipes.vlm_grpo.train.asking import Chance, examine, marked, never, prompts, reply
from nanproof_recipes.vlm_grpo.train.judge import LoweredHead, lower, verdict
from nanproof_recipes.vlm_grpo.train.rewards import caption_reward, place_reward


class Ends:
    """Row i ends at step i; a row whose number is too large never does."""

    def __init__(self, end):
        self.end, self.step = end, 0

    def __call__(self, ids, scores):
        scores = scores.clone()
        scores[:, self.end] = -math.inf
        scores[self.step : self.step + 1, self.end] = 1e9
        self.step += 1
        return scores


def test_a_reply_counts_up_to_its_end_and_whole_where_it_has_none(vlm):
    """Row by row: the tokens before the end, and it. The last row meets the greatest length without one."""
    end, asked = vlm.warm.tokenizer.eos_token_id, prompts(vlm.warm, vlm.valid[:5])
    said = reply(vlm.warm, asked, processors=[Ends(end)], banned=never(vlm.warm), most=4)
    assert said.ids.shape == said.mask.shape == (5, 4)
    for i, (ids, mask) in enumerate(zip(said.ids.tolist(), said.mask.tolist(), strict=True)):
        assert mask == [1 if j <= i else 0 for j in range(4)]
        assert (end in ids) == (i < 4) and (i == 4 or ids[i] == end)
        words = [vlm.warm.tokenizer.convert_ids_to_tokens(t) for t in ids[: sum(mask)]]
        assert said.texts[i].split() == [word for word in words if not word.startswith("<")]


def test_a_reply_has_room_for_the_longest_answer_in_any_tokenizer(vlm):
    """Twelve tokens where a word is one. A tokenizer of single characters needs more, or no reply could ever be right."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    assert asking.longest(vlm.warm) == 12 and reply(vlm.warm, prompts(vlm.warm, vlm.valid)).ids.shape[1] <= 12
    core = Tokenizer(models.WordLevel({"?": 0, "<end>": 1}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters = Seeing(
        None, SimpleNamespace(tokenizer=PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")), "letters"
    )
    assert asking.longest(letters) == max(len(f"{s.caption} box 7 7 7 7") for s in vlm.train) + 4


def test_banned_tokens_are_never_drawn(vlm):
    """Where every token is as likely as any other, they are drawn if they are not banned."""
    asked, banned = prompts(vlm.warm, vlm.valid), never(vlm.warm)
    assert banned == sorted({vlm.warm.token(IMAGE), vlm.warm.token(VERDICT)})
    free = reply(vlm.warm, asked, processors=[Chance()], most=12).ids
    held = reply(vlm.warm, asked, processors=[Chance()], banned=banned, most=12).ids
    assert set(free.flatten().tolist()) >= set(banned) and not set(held.flatten().tolist()) & set(banned)


def test_temperature_0_is_the_likeliest_token_of_a_forward_without_a_cache(vlm):
    asked, end = prompts(vlm.warm, vlm.valid[:4]), vlm.warm.tokenizer.eos_token_id
    said = reply(vlm.warm, asked, temperature=0, banned=never(vlm.warm), most=5)
    again = reply(vlm.warm, asked, temperature=0, banned=never(vlm.warm), most=5)
    assert torch.equal(said.ids, again.ids)
    for i in range(4):
        ids = asked["input_ids"][i][asked["attention_mask"][i] == 1].tolist()
        for token in said.ids[i][said.mask[i] == 1].tolist():
            with torch.no_grad():
                logits = vlm.warm.model(input_ids=torch.tensor([ids]), pixel_values=asked["pixel_values"][i : i + 1]).logits[
                    0, -1
                ]
            logits[never(vlm.warm)] = -math.inf
            assert token == int(logits.argmax())
            ids.append(token)
            assert token != end or token == said.ids[i][said.mask[i] == 1][-1]


def test_the_model_is_asked_in_eval_and_left_as_it_was(vlm):
    seeing, modes = vlm.seeing(), []
    seeing.model.register_forward_pre_hook(lambda module, args: modes.append((module.training, torch.is_grad_enabled())))
    for mode in (True, False):
        seeing.model.train(mode)
        reply(seeing, prompts(seeing, vlm.valid[:1]), most=2)
        assert seeing.model.training is mode
    assert set(modes) == {(False, False)}


def test_the_mode_comes_back_after_an_error(vlm):
    seeing = vlm.seeing()
    seeing.model.train()
    with torch.no_grad():
        seeing.model.lm_head.weight.fill_(math.nan)
    with pytest.raises(RuntimeError, match="probability tensor"):
        reply(seeing, prompts(seeing, vlm.valid[:1]))
    assert seeing.model.training


def test_an_examination_asks_all_in_order_and_marks_by_both_rewards(vlm):
    done = []
    marks, texts = examine(vlm.warm, vlm.valid, temperature=0, at_once=5, tick=lambda n, said: done.append(n))
    assert done == [5, 10, 15, 16] and texts == examine(vlm.warm, vlm.valid, temperature=0)[1]
    captions = [caption_reward(text, scene) for text, scene in zip(texts, vlm.valid, strict=True)]
    places = [place_reward(text, scene) for text, scene in zip(texts, vlm.valid, strict=True)]
    assert (marks.caption, marks.place) == pytest.approx((sum(captions) / 16, sum(places) / 16))
    assert marked([s.answer for s in vlm.valid], vlm.valid).reward == 2


def test_nothing_to_ask_about_is_an_error_and_no_division(vlm):
    with pytest.raises(UsageError, match="no scene to ask about"):
        examine(vlm.warm, [])


def as_rows(scenes):
    return {
        "input_ids": torch.tensor([[scene.shade] for scene in scenes]),
        "pixel_values": torch.stack([pixels(s) for s in scenes]),
    }


def as_patches(scenes):
    return {
        "input_ids": torch.tensor([[scene.shade] for scene in scenes]),
        "pixel_values": torch.cat([pixels(s) for s in scenes]),
    }


def pixels(scene):
    return torch.from_numpy(scene.pixels())


@pytest.mark.parametrize(("make", "most", "once"), [(as_rows, 2**28, True), (as_patches, 2**28, False), (as_rows, 40_000, False)])
def test_scenes_are_prepared_once_where_each_is_a_row_and_all_are_small(vlm, monkeypatch, make, most, once):
    """And they are the same tensors as those that are made for these scenes alone, also where a picture is many rows."""
    monkeypatch.setattr(asking, "MOST", most)
    calls = []

    def made(scenes):
        calls.append(len(scenes))
        return make(scenes)

    prepared, which = asking.Prepared(made, vlm.train, torch.device("cpu")), [3, 3, 1]
    found, wanted = prepared.rows(which), make([vlm.train[i] for i in which])
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)
    assert calls == ([2, 64] if once else [2, 3])


# -- the judge -------------------------------------------------------------------------------------------------------------------


def test_a_verdict_is_the_judges_mark_and_tenths_of_the_place(vlm):
    for scene in vlm.valid[:6]:
        for text in (scene.answer, scene.caption, "box 0 0 7 7", "point 1 1"):
            mark, *digits = verdict(vlm.warm, text, scene)
            assert mark == vlm.warm.token(VERDICT)
            assert vlm.warm.tokenizer.decode(digits) == str(round(10 * place_reward(text, scene)))


def logits_of(seeing, asked):
    with torch.no_grad():
        return seeing.model(**asked, logits_to_keep=1).logits


def test_a_lowered_head_lowers_one_token_in_the_policy_and_none_in_the_reference(vlm):
    asked, mark = prompts(vlm.warm, vlm.valid[:3]), vlm.warm.token(VERDICT)
    seeing = vlm.adapted(moved=0.05)
    policy = logits_of(seeing, asked)
    with seeing.model.disable_adapter():
        reference = logits_of(seeing, asked)
    lower(seeing.model, mark, 120.0)
    lowered, wanted = logits_of(seeing, asked), policy.clone()
    wanted[..., mark] -= 120
    assert torch.allclose(lowered, wanted, atol=1e-4) and not torch.allclose(policy, reference)
    assert isinstance(seeing.model.get_base_model().get_output_embeddings(), LoweredHead)
    with seeing.model.disable_adapter():
        assert torch.equal(logits_of(seeing, asked), reference)
    assert torch.equal(logits_of(seeing, asked), lowered)  # the adapters are back


def test_a_lowered_head_changes_no_reply_of_a_sampler_that_bans_the_token(vlm):
    """Same random numbers, same tokens: it differs from a ban by the banned token alone."""
    asked, drawn = prompts(vlm.warm, vlm.valid), []
    for by in (0.0, 120.0):
        seeing = vlm.adapted(moved=0.05)
        lower(seeing.model, seeing.token(VERDICT), by)
        torch.manual_seed(5)
        banned = never(seeing) if by == 0 else [t for t in never(seeing) if t != seeing.token(VERDICT)]
        drawn.append(reply(seeing, asked, banned=banned).ids)
    assert torch.equal(*drawn)


@pytest.mark.parametrize("bias", [True, False])
def test_a_lowered_head_keeps_the_bias_of_the_head(bias):
    class Adapter:
        disable_adapters = False
        active_adapters = ("default",)

    head, x = nn.Linear(4, 6, bias=bias), torch.randn(2, 4)
    lowered, wanted = LoweredHead(head, Adapter, 2, 7.0), head(x).clone()
    wanted[:, 2] -= 7
    assert torch.allclose(lowered(x), wanted, atol=1e-5)
    Adapter.disable_adapters = True
    assert torch.equal(lowered(x), head(x))


# -- the document's patches ------------------------------------------------------------------------------------------------------


def as_documented(row):
    """NaN to -100, clip to 30, softmax, at least 1e-8, logarithm: number by number."""
    row = [-100.0 if math.isnan(x) else x for x in row]
    row = [min(30.0, max(-30.0, x)) for x in row]
    powers = [math.exp(x - max(row)) for x in row]
    return [math.log(max(p / sum(powers), 1e-8)) for p in powers]


def test_the_documents_processor_does_what_the_document_says():
    inf, nan = math.inf, math.nan
    scores = torch.tensor(
        [
            [1.0, 2.0, 3.0, -40.0],
            [45.0, 40.0, 0.0, -1.0],
            [0.0, -inf, 1.0, 2.0],
            [nan, 1.0, 2.0, -inf],
            [nan] * 4,
            [inf, 1.0, 2.0, 3.0],
        ]
    )
    processor = DocumentProcessor()
    found = processor(torch.zeros(6, 1, dtype=torch.long), scores.clone())
    assert torch.allclose(found, torch.tensor([as_documented(row) for row in scores.tolist()]), atol=1e-5)
    chances = found.softmax(-1)
    assert chances[1, 0] == pytest.approx(0.5) and scores[1].softmax(-1)[0] > 0.99  # 45 and 40 are now alike
    assert chances[2, 1] > 0  # a banned token can be drawn
    assert chances[4].tolist() == pytest.approx([0.25] * 4)  # all NaN: any token
    assert (processor.calls, processor.nan_calls, processor.nan_rows) == (1, 1, 3)
    processor(torch.zeros(3, 1, dtype=torch.long), scores[:3])
    assert processor.notes() == ["its processor replaced NaN at 1 of 2 steps of sampling, in 3 rows"]


def test_the_documents_processor_lets_banned_tokens_into_replies(vlm):
    """Measured on the model: with a flat distribution before it, the ban of generate is lifted."""

    class Flat:
        def __call__(self, ids, scores):
            return torch.where(scores == -math.inf, scores, scores * 0 - 29.0)

    banned = never(vlm.warm)
    ids = reply(vlm.warm, prompts(vlm.warm, vlm.valid), processors=[Flat(), DocumentProcessor()], banned=banned).ids
    assert set(ids.flatten().tolist()) & set(banned)


def test_the_documents_callback_sees_no_gradient_under_a_real_trainer(tmp_path):
    """The gradients are NaN at every step, and it finds none to look at."""
    from transformers import Trainer, TrainingArguments

    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x, labels=None):
            return {"loss": (self.w * x).sum() * math.nan}

    seen, callback = [], document_callback()
    model = Broken()
    model.w.register_hook(lambda grad: seen.append(bool(grad.isnan().all())))
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", logging_steps=10
    )
    Trainer(model, arguments, train_dataset=[{"x": torch.ones(2)}] * 4, callbacks=[callback]).train()
    assert seen == [True, True] and (callback.seen, callback.bad) == (0, 0)
    assert callback.notes() == ["its callback found 0 gradients to look at in on_step_end"]
