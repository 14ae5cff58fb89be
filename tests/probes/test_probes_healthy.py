"""Models that nothing is wrong with: no probe reports anything, and those that apply run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers as T
from torch import nn

from probed import probed

WIDTH = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHORT = {"max_position_embeddings": 64}
BOTH = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
BOTH |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64}


def ids(rows=3, length=12):
    return torch.randint(5, 96, (rows, length))


def mask(length=12, lengths=(12, 7, 9)):
    return (torch.arange(length) < torch.tensor(lengths).unsqueeze(1)).long()


def text():
    tokens = torch.where(mask() == 1, ids(), 0)
    return {"input_ids": tokens, "attention_mask": mask(), "labels": torch.where(mask() == 1, tokens, -100)}


def plain():
    tokens = ids()
    return {"input_ids": tokens, "labels": tokens.clone()}


def masked():
    batch = text()
    hidden = (torch.rand(3, 12) < 0.4) & (mask() == 1)
    hidden[:, 0] = True
    return {
        **batch,
        "input_ids": torch.where(hidden, 4, batch["input_ids"]),
        "labels": torch.where(hidden, batch["input_ids"], -100),
    }


def classes():
    return {**text(), "labels": torch.tensor([0, 1, 1])}


def pair():
    return {**text(), "labels": torch.where(mask(8, (8, 5, 6)) == 1, ids(3, 8), -100)}


def picture():
    return {"pixel_values": torch.randn(3, 3, 32, 32), "labels": torch.tensor([0, 1, 1])}


def packed():
    return {**plain(), "position_ids": (torch.arange(12) % 5).repeat(3, 1)}


def both():
    return {**picture(), "input_ids": ids(), "attention_mask": mask(), "return_loss": True, "labels": None}


SEEN = ("causal-leak", "padding-changes-loss")
MODELS = {
    "llama": (lambda: T.LlamaForCausalLM(T.LlamaConfig(**TEXT, **WIDTH, num_key_value_heads=2)), text, SEEN),
    "llama packed": (
        lambda: T.LlamaForCausalLM(T.LlamaConfig(**TEXT, **WIDTH, use_cache=False)),
        packed,
        ("causal-leak", "packed-documents-mix"),
    ),
    "qwen2": (lambda: T.Qwen2ForCausalLM(T.Qwen2Config(**TEXT, **WIDTH, num_key_value_heads=2)), text, SEEN),
    "mixtral": (
        lambda: T.MixtralForCausalLM(
            T.MixtralConfig(**TEXT, **WIDTH, num_key_value_heads=2, num_local_experts=4, router_jitter_noise=0.1)
        ),
        text,
        SEEN,
    ),
    "gpt2": (lambda: T.GPT2LMHeadModel(T.GPT2Config(**TEXT, n_embd=32, n_layer=2, n_head=4, n_positions=64)), text, SEEN),
    "gptneox": (lambda: T.GPTNeoXForCausalLM(T.GPTNeoXConfig(**TEXT, **WIDTH)), text, SEEN),
    "opt": (
        lambda: T.OPTForCausalLM(
            T.OPTConfig(
                **TEXT, **SHORT, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32
            )
        ),
        text,
        SEEN,
    ),
    "bloom": (lambda: T.BloomForCausalLM(T.BloomConfig(**TEXT, hidden_size=32, n_layer=2, n_head=4)), text, SEEN),
    "mamba": (
        lambda: T.MambaForCausalLM(T.MambaConfig(**TEXT, hidden_size=32, num_hidden_layers=2, state_size=4)),
        plain,
        ("causal-leak",),
    ),
    "bert mlm": (lambda: T.BertForMaskedLM(T.BertConfig(**TEXT, **WIDTH, **SHORT)), masked, SEEN[1:]),
    "roberta": (lambda: T.RobertaForSequenceClassification(T.RobertaConfig(**TEXT, **WIDTH, **SHORT)), classes, SEEN[1:]),
    "deberta": (
        lambda: T.DebertaV2ForSequenceClassification(
            T.DebertaV2Config(**TEXT, **WIDTH, **SHORT, relative_attention=True, pos_att_type=["p2c", "c2p"])
        ),
        classes,
        SEEN[1:],
    ),
    "distilbert": (
        lambda: T.DistilBertForSequenceClassification(
            T.DistilBertConfig(vocab_size=96, dim=32, hidden_dim=64, n_layers=2, n_heads=4)
        ),
        classes,
        SEEN[1:],
    ),
    "llama classifier": (
        lambda: T.LlamaForSequenceClassification(T.LlamaConfig(**TEXT, **WIDTH)),
        classes,
        (*SEEN[1:], "samples-mixed"),
    ),
    "t5": (
        lambda: T.T5ForConditionalGeneration(
            T.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
        ),
        pair,
        SEEN,
    ),
    "bart": (
        lambda: T.BartForConditionalGeneration(T.BartConfig(**TEXT, **BOTH, **SHORT, decoder_start_token_id=2)),
        pair,
        SEEN,
    ),
    "vit": (lambda: T.ViTForImageClassification(T.ViTConfig(**WIDTH, image_size=32, patch_size=8)), picture, ("samples-mixed",)),
    "resnet": (
        lambda: T.ResNetForImageClassification(T.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])),
        picture,
        ("samples-mixed",),
    ),
    "clip": (
        lambda: T.CLIPModel(
            T.CLIPConfig(text_config={**TEXT, **WIDTH, **SHORT}, vision_config={**WIDTH, "image_size": 32, "patch_size": 8})
        ),
        both,
        (),
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_transformers(name):
    make, batch, applies = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    made = {key: value for key, value in batch().items() if value is not None}
    result = probed(model, made, lambda m, b: m(**b).loss)
    assert result.found == []
    assert {*applies, "input-ignored", "state-not-saved"} <= {p.name for p in result.probes}


def test_a_packed_llama_that_caches_mixes_documents():
    """A cache keeps transformers from reading documents out of position_ids: a real trap."""
    torch.manual_seed(0)
    model = T.LlamaForCausalLM(T.LlamaConfig(**TEXT, **WIDTH, use_cache=True)).train()
    (found,) = probed(model, packed(), lambda m, b: m(**b).loss).found
    assert found.cause == "packed-documents-mix" and found.where == "model.layers.0.self_attn"


class Sampled(nn.Module):
    """A variational autoencoder."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x):
        mean, log = self.encode(x).chunk(2, -1)
        return self.decode(mean + torch.randn_like(mean) * (log / 2).exp()), mean, log


def vae(model, x):
    out, mean, log = model(x)
    return F.mse_loss(out, x) - 0.5 * (1 + log - mean.square() - log.exp()).mean()


def critic(model, real):
    fake, share = torch.randn_like(real), torch.rand(len(real), 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return model(fake).mean() - model(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(96, 16, padding_idx=0), nn.Linear(32, 5)
        self.lstm = nn.LSTM(16, 16, bidirectional=True, batch_first=True)

    def forward(self, ids, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        out = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=ids.shape[1])[0]
        return self.head(out)


def tags(model, batch):
    return F.cross_entropy(model(batch["ids"], batch["lengths"]).flatten(0, 1), batch["tags"].flatten())


def spectral():
    norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(8, 16)), nn.LeakyReLU(0.2), norm(nn.Linear(16, 1)))


def tagged():
    batch = text()
    return {"ids": batch["input_ids"], "lengths": torch.tensor([12, 7, 9]), "tags": torch.where(mask() == 1, ids() % 5, -100)}


PLAIN = {
    "vae": (Sampled, lambda: torch.randn(6, 8), vae),
    "critic": (spectral, lambda: torch.randn(6, 8), critic),
    "autoencoder": (
        lambda: nn.Sequential(nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 8)),
        lambda: torch.randn(6, 8),
        lambda m, x: F.mse_loss(m(x), x),
    ),
    "packed tagger": (Tagger, tagged, tags),
    "sequences first": (
        lambda: nn.LSTM(8, 3, 2, dropout=0.2),
        lambda: (torch.randn(7, 4, 8), torch.randint(0, 3, (7, 4))),
        lambda m, b: F.cross_entropy(m(b[0])[0].flatten(0, 1), b[1].flatten()),
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_models(name):
    make, batch, loss_fn = PLAIN[name]
    torch.manual_seed(0)
    result = probed(make(), batch(), loss_fn)
    assert result.found == [] and result.probes
