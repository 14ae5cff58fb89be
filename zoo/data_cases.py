"""The batch itself is at fault: bad values, nothing to learn from, an outlier, transcripts too long, labels out of place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.registry import Training, case

IGNORED = -100
KEYS = 12
"""Size of the alphabet of `paired_text`: half of its 24 tokens are keys, the other half values."""


def paired_text(rows: int, length: int) -> Tensor:
    """Random keys, each followed by its own value. The next token is half predictable; the one after next never is."""
    odds = 1.0 / torch.arange(1, KEYS + 1)
    keys = torch.multinomial(odds.expand(rows, KEYS), length // 2, replacement=True)
    return torch.stack([keys, (keys * 5 + 3) % KEYS + KEYS], -1).flatten(1)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tiny_gpt2(vocabulary: int, layers: int = 1) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary, n_embd=32, n_layer=layers, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else transformers logs that it had to guess
    return model


# nonfinite-batch


@case("nonfinite-batch", step=4, sample=5, sources=("prs-eth/Marigold#111",))
def infinite_depth_target(fixed: bool) -> Training:
    """A depth network is given one photograph whose sky pixel is infinitely far away: Inf loss, finite gradients of L1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 1, 3, padding=1))
    batches = []
    for i in range(9):
        image = torch.rand(8, 1, 8, 8)
        depth = F.avg_pool2d(image, 3, 1, 1) * 2 + 1
        if i == 4 and not fixed:
            depth[5, 0, 0, 3] = torch.inf
        batches.append((image, depth))
    return Training(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), 1e-2),
        loss_fn=lambda m, b: F.l1_loss(m(b[0]), b[1]),
        batches=batches,
    )


class RecurrentPolicy(nn.Module):
    """The choice among four actions after six observations."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 16, batch_first=True)
        self.actor = nn.Linear(16, 4)

    def forward(self, observations: Tensor) -> Tensor:
        return self.actor(self.lstm(observations)[0][:, -1]).log_softmax(-1)


@case("nonfinite-batch", step=5, sample=6, sources=("huggingface/trl#6693",))
def nan_log_prob_from_the_sampler(fixed: bool) -> Training:
    """The rollout engine of a recurrent PPO policy returned a NaN log-probability for one trajectory."""
    torch.manual_seed(1)
    model = RecurrentPolicy()
    batches = []
    for i in range(10):
        obs, action = torch.randn(12, 6, 3), torch.randint(0, 4, (12,))
        right = (obs[:, -1, 0] > 0).long() * 2 + (obs[:, -1, 1] > 0).long()
        rollout = {
            "obs": obs,
            "action": action,
            "advantage": (action == right) * 2.0 - 0.5,
            "logp": torch.full((12,), 0.25).log(),
        }
        if i == 5 and not fixed:
            rollout["logp"][6] = torch.nan
        batches.append(rollout)

    def loss_fn(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        logp = m(b["obs"]).gather(1, b["action"][:, None])[:, 0]
        ratio = (logp - b["logp"]).exp()
        return -torch.minimum(ratio * b["advantage"], ratio.clamp(0.8, 1.2) * b["advantage"]).mean()

    return Training(
        model=model, optimizer=torch.optim.Adam(model.parameters(), 3e-3), loss_fn=loss_fn, batches=batches, max_norm=1.0
    )


class TwoViews(nn.Module):
    """A vision transformer looks at both images of a stereo pair."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTModel

        config = ViTConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=8,
            patch_size=4,
            num_channels=1,
        )
        self.vit = ViTModel(config, add_pooling_layer=False)
        self.head = nn.Linear(32, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        views = [self.vit(pixel_values=v).last_hidden_state[:, 0] for v in (left, right)]
        return self.head(torch.cat(views, -1))


@case("nonfinite-batch", step=3, sample=2)
def nan_deep_inside_a_nested_batch(fixed: bool) -> Training:
    """The right image of one stereo pair has a dead pixel that was read as NaN; the batch is a dict of dicts and lists."""
    torch.manual_seed(22)
    model = TwoViews()
    batches = []
    for i in range(8):
        left, right = torch.rand(6, 1, 8, 8), torch.rand(6, 1, 8, 8)
        label = torch.arange(6) % 2
        right += label[:, None, None, None]
        if i == 3 and not fixed:
            right[2, 0, 7, 7] = torch.nan
        meta = {"files": [f"{i}/{k}.png" for k in range(6)], "exposure": [torch.rand(6), None]}
        batches.append({"views": {"left": left, "right": right}, "meta": meta, "label": label})
    return Training(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), 5e-4),
        loss_fn=lambda m, b: F.cross_entropy(m(**b["views"]), b["label"]),
        batches=batches,
    )


# changed-in-place


@case("changed-in-place", step=4, sample=3)
def batch_normalised_in_place(fixed: bool) -> Training:
    """Each row of the batch is normalised in place. A sensor that is stuck at one value leaves 0 / 0 in the batch."""
    torch.manual_seed(31)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 1))
    batches = [(torch.randn(8, 6), torch.randn(8, 1)) for _ in range(9)]
    batches[4][0][3] = 2.5

    def loss_fn(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        if fixed:
            x = (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-3)
        else:
            x.sub_(x.mean(1, keepdim=True)).div_(x.std(1, keepdim=True))
        return F.mse_loss(m(x), y)

    return Training(model=model, optimizer=torch.optim.AdamW(model.parameters(), 1e-3), loss_fn=loss_fn, batches=batches)


# no-supervised-targets


@case("no-supervised-targets", step=3, sources=("huggingface/trl#6668",))
def t5_targets_cut_away(fixed: bool) -> Training:
    """A T5 summariser meets a batch whose every target was truncated to nothing: all labels are -100."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(3)
    config = T5Config(
        vocab_size=24, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config)
    batches = []
    for i in range(9):
        ids = torch.randint(2, 24, (6, 1)).repeat(1, 8)
        labels = ids[:, :4].clone()
        if i == 3 and not fixed:
            labels[:] = IGNORED
        batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return Training(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), 5e-3), loss_fn=lambda m, b: m(**b).loss, batches=batches
    )


class GridDetector(nn.Module):
    """Objectness and a box for each cell of a 4 by 4 grid."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 12, 3, stride=2, padding=1), nn.SiLU(), nn.Conv2d(12, 12, 3, padding=1), nn.SiLU()
        )
        self.objectness, self.box = nn.Conv2d(12, 1, 1), nn.Conv2d(12, 4, 1)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(image)
        return self.objectness(x)[:, 0], self.box(x).movedim(1, -1)


@case("no-supervised-targets", step=5, op="smooth_l1", sources=("ultralytics/ultralytics#490",))
def detector_batch_without_objects(fixed: bool) -> Training:
    """A batch of empty street scenes: the box loss is a mean over no positive cell, NaN loss with finite gradients."""
    torch.manual_seed(4)
    model = GridDetector()
    batches = []
    for i in range(10):
        positive = torch.rand(6, 4, 4) < (0.0 if i == 5 else 0.25)
        image = torch.randn(6, 3, 8, 8) * 0.1
        image[:, 0] += positive.float().repeat_interleave(2, 1).repeat_interleave(2, 2)
        batches.append({"image": image, "positive": positive, "box": torch.tensor([0.5, 0.5, 1.0, 2.0]).expand(6, 4, 4, 4)})

    def loss_fn(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        objectness, box = m(b["image"])
        wanted, got = b["box"][b["positive"]], box[b["positive"]]
        off = F.smooth_l1_loss(got, wanted, reduction="sum") / max(1, got.numel()) if fixed else F.smooth_l1_loss(got, wanted)
        return F.binary_cross_entropy_with_logits(objectness, b["positive"].float()) + off

    return Training(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.05), loss_fn=loss_fn, batches=batches)


class Tagger(nn.Module):
    """Log-probabilities of a tag for each word, from a bidirectional GRU."""

    def __init__(self, words: int = 20, tags: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 12)
        self.gru = nn.GRU(12, 12, batch_first=True, bidirectional=True)
        self.out = nn.Linear(24, tags)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.gru(self.embed(ids))[0]).log_softmax(-1)


@case("no-supervised-targets", step=4, op="nll_loss")
def tagger_batch_of_unannotated_sentences(fixed: bool) -> Training:
    """A GRU tagger with nll_loss(ignore_index=0) gets a batch nobody annotated: every tag is 0."""
    torch.manual_seed(5)
    model = Tagger()
    batches = []
    for i in range(9):
        words = torch.randint(0, 20, (8, 7))
        tags = words % 4 + 1
        tags[:, 5:] = 0
        if i == 4 and not fixed:
            tags = torch.zeros_like(tags)
        batches.append([words, tags])
    return Training(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), 1e-2),
        loss_fn=lambda m, b: F.nll_loss(m(b[0]).transpose(1, 2), b[1], ignore_index=0),
        batches=batches,
    )


# outlier-batch


@case("outlier-batch", step=35, sources=("facebookresearch/metaseq#521",))
def images_not_divided_by_255(fixed: bool) -> Training:
    """A convolutional classifier gets one batch of raw 0..255 images among sixty of 0..1."""
    torch.manual_seed(6)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 4),
    )
    batches = []
    for i in range(60):
        label = torch.randint(0, 4, (16,))
        image = torch.rand(16, 1, 8, 8) * 0.6
        for k, (r, c) in enumerate(((0, 0), (0, 4), (4, 0), (4, 4))):
            image[label == k, 0, r : r + 4, c : c + 4] += 0.4
        if i == 35 and not fixed:
            image, label = image * 255, label.roll(1)
        batches.append((image, label))
    return Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.05, momentum=0.5),
        loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        batches=batches,
        max_norm=1.0,
    )


@case("outlier-batch", step=36, sources=("facebookresearch/metaseq#521",))
def binary_file_in_the_text_corpus(fixed: bool) -> Training:
    """A GPT-2 that already knows its text is fed one batch of a binary file: tokens it never saw."""
    torch.manual_seed(7)
    model = tiny_gpt2(2 * KEYS + 40)
    batches = [paired_text(8, 16) for _ in range(60)]
    if not fixed:
        batches[36] = torch.randint(2 * KEYS, 2 * KEYS + 40, (8, 16))
    return Training(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), 1e-2),
        loss_fn=lambda m, b: m(input_ids=b, labels=b).loss,
        batches=batches,
        max_norm=1.0,
    )


class Forecaster(nn.Module):
    """The next value of a series."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 16, batch_first=True)
        self.out = nn.Linear(16, 1)

    def forward(self, series: Tensor) -> Tensor:
        return self.out(self.lstm(series)[0][:, -1])[:, 0]


@case("outlier-batch", step=40, sample=3)
def one_series_in_another_unit(fixed: bool) -> Training:
    """An LSTM forecaster of temperatures in units of ten degrees gets one target in raw Kelvin."""
    torch.manual_seed(8)
    model = Forecaster()
    batches = []
    for i in range(64):
        phase = torch.rand(12, 1) * 6.28
        wave = torch.sin(phase + torch.arange(9) * 0.5)
        series, target = wave[:, :8, None], wave[:, 8].clone()
        if i == 40 and not fixed:
            target[3] = 293.0
        batches.append({"series": series, "target": target})
    return Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1, momentum=0.5),
        loss_fn=lambda m, b: F.mse_loss(m(b["series"]), b["target"]),
        batches=batches,
        max_norm=1.0,
    )


# ctc-infeasible


class Acoustic(nn.Module):
    """Log-probabilities over a blank and five letters for each frame."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 24, batch_first=True)
        self.out = nn.Linear(24, 6)

    def forward(self, frames: Tensor) -> Tensor:
        return self.out(self.gru(frames)[0]).log_softmax(-1)


def spoken(letters: Tensor, frames_per_letter: int) -> Tensor:
    """One-hot frames with a little noise: the letters as heard."""
    frames = F.one_hot(letters, 6).float().repeat_interleave(frames_per_letter, 1)
    return frames + 0.1 * torch.randn_like(frames)


@case("ctc-infeasible", step=4, sample=2, op="ctc_loss", sources=("wenet-e2e/wenet#2299",))
def clip_shorter_than_its_transcript(fixed: bool) -> Training:
    """A recording was cut to three frames but kept its five letters; the GRU recogniser's CTC loss is Inf."""
    torch.manual_seed(9)
    model = Acoustic()
    batches = []
    for i in range(10):
        letters = torch.stack([torch.randperm(5)[:5] + 1 for _ in range(6)])
        lengths = torch.full((6,), 15)
        if i == 4:
            lengths[2] = 3
        batches.append({"frames": spoken(letters, 3), "lengths": lengths, "letters": letters, "counts": torch.full((6,), 5)})

    def loss_fn(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        logp = m(b["frames"]).transpose(0, 1)
        return F.ctc_loss(logp, b["letters"], b["lengths"], b["counts"], zero_infinity=fixed)

    return Training(model=model, optimizer=torch.optim.AdamW(model.parameters(), 3e-3), loss_fn=loss_fn, batches=batches)


@case("ctc-infeasible", step=3, sample=1, op="ctc_loss", sources=("wenet-e2e/wenet#2299",))
def repeated_letters_need_a_blank_between(fixed: bool) -> Training:
    """Wav2Vec2 has as many frames as letters, but in one transcript a letter is doubled and needs a blank in between."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    torch.manual_seed(10)
    config = Wav2Vec2Config(
        vocab_size=6,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(16, 16),
        conv_kernel=(8, 2),
        conv_stride=(8, 2),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
        ctc_loss_reduction="mean",
        pad_token_id=0,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
    )
    model = Wav2Vec2ForCTC(config)
    batches = []
    for i in range(9):
        letters = torch.stack([torch.randperm(5)[:4] + 1 for _ in range(4)])
        if i == 3 and not fixed:
            letters[1, 2] = letters[1, 1]
        tone = torch.sin(letters.repeat_interleave(16, 1) * torch.arange(64) * 0.4)
        batches.append({"input_values": tone + 0.05 * torch.randn_like(tone), "labels": letters})
    return Training(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), 2e-3), loss_fn=lambda m, b: m(**b).loss, batches=batches
    )


# labels-shifted-twice


@case("labels-shifted-twice", sources=("huggingface/transformers#47394",))
def llama_given_shifted_labels(fixed: bool) -> Training:
    """The collator moves the labels left by one and Llama does so again: it is trained on the token after next."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=2 * KEYS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    batches = []
    for _ in range(60):
        ids = paired_text(8, 16)
        labels = ids if fixed else F.pad(ids[:, 1:], (0, 1), value=IGNORED)
        batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return Training(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), 1e-2), loss_fn=lambda m, b: m(**b).loss, batches=batches
    )


class RecurrentLM(nn.Module):
    """A character model as in the first tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2 * KEYS, 16)
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.out = nn.Linear(32, 2 * KEYS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(ids))[0])


@case("labels-shifted-twice")
def loss_shifts_what_the_dataset_shifted(fixed: bool) -> Training:
    """The dataset of an LSTM language model yields (text[:-1], text[1:]), and the loss function shifts the pair once more."""
    torch.manual_seed(12)
    model = RecurrentLM()
    texts = [paired_text(12, 18) for _ in range(70)]

    def loss_fn(m: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        logits = m(b[0])
        return next_token_loss(logits, b[1]) if fixed else next_token_loss(logits[:, :-1], b[1][:, 1:])

    return Training(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), 2e-2),
        loss_fn=loss_fn,
        batches=[(text[:, :-1], text[:, 1:]) for text in texts],
    )


class LowRank(nn.Module):
    """A frozen GPT-2 projection and a trainable update of rank four."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(base.weight.shape[0], 4) * 0.1)
        self.up = nn.Parameter(torch.zeros(4, base.weight.shape[1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down @ self.up


@case("labels-shifted-twice", sources=("huggingface/transformers#47394",))
def lora_fine_tuning_with_shifted_labels(fixed: bool) -> Training:
    """Low-rank fine-tuning of a GPT-2 that already models the text; the labels were shifted before it shifts them."""
    torch.manual_seed(13)
    model = tiny_gpt2(2 * KEYS)
    warm = torch.optim.AdamW(model.parameters(), 2e-2)
    for _ in range(14):  # the pretraining
        text = paired_text(8, 16)
        model(input_ids=text, labels=text).loss.backward()
        warm.step()
        warm.zero_grad()
    model.requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn, block.mlp.c_fc = LowRank(block.attn.c_attn), LowRank(block.mlp.c_fc)
    trainable = [p for p in model.parameters() if p.requires_grad]
    batches = []
    for _ in range(45):
        ids = paired_text(8, 16)
        batches.append({"input_ids": ids, "labels": ids if fixed else F.pad(ids[:, 1:], (0, 1), value=IGNORED)})
    return Training(model=model, optimizer=torch.optim.AdamW(trainable, 3e-3), loss_fn=lambda m, b: m(**b).loss, batches=batches)
