"""Healthy trainings on many architectures, written as a user would write them.

Each function returns dict(model, optimizer, loss_fn(model, batch), batches[, scheduler, max_grad_norm, scaler]).
`batches` yields exactly 500 batches, made lazily and deterministically. The intended loop is the plain one:
zero_grad, loss_fn, backward (scaled if there is a scaler), clip if max_grad_norm, step, scheduler.step once a step.
"""
import copy
import math
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import torch.nn as nn
import torch.nn.functional as F

STEPS = 500


class Lazy:
    def __init__(self, make, seed, n=STEPS):
        self.make, self.seed, self.n = make, seed, n

    def __len__(self):
        return self.n

    def __iter__(self):
        for i in range(self.n):
            yield self.make(torch.Generator().manual_seed(self.seed * 100003 + i))


def decay_groups(model, wd):
    dec = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    rest = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    return [{"params": dec, "weight_decay": wd}, {"params": rest, "weight_decay": 0.0}]


def warmup_cosine(opt, warm, total=STEPS, floor=0.1):
    def f(s):
        if s < warm:
            return (s + 1) / warm
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (s - warm) / max(1, total - warm)))
    return torch.optim.lr_scheduler.LambdaLR(opt, f)


def warmup_linear(opt, warm, total=STEPS):
    return torch.optim.lr_scheduler.LambdaLR(
        opt, lambda s: (s + 1) / warm if s < warm else max(0.0, (total - s) / (total - warm)))


def markov(vocab, b, t, g, table_seed=0, noise=0.1, changed=0):
    """a token follows from the one before by a fixed permutation, with some noise (the first `changed` rules rotated)"""
    perm = torch.randperm(vocab, generator=torch.Generator().manual_seed(table_seed))
    if changed:
        perm[:changed] = perm[:changed].roll(1)
    x = torch.empty(b, t, dtype=torch.long)
    x[:, 0] = torch.randint(0, vocab, (b,), generator=g)
    for i in range(1, t):
        jump = torch.rand(b, generator=g) < noise
        x[:, i] = torch.where(jump, torch.randint(0, vocab, (b,), generator=g), perm[x[:, i - 1]])
    return x


def shapes(b, g, size=16, ch=1, noise=0.5):
    """images of one of four patterns in noise, and their class"""
    y = torch.randint(0, 4, (b,), generator=g)
    i = torch.arange(size).float() / size
    base = torch.stack([torch.sin(6.28 * 2 * i)[None, :].expand(size, size), torch.sin(6.28 * 2 * i)[:, None].expand(size, size),
                        torch.sin(6.28 * (i[None, :] + i[:, None]) * 2), ((i[None] - .5) ** 2 + (i[:, None] - .5) ** 2 < .08).float() * 2 - 1])
    x = base[y][:, None].expand(b, ch, size, size) + noise * torch.randn(b, ch, size, size, generator=g)
    return x, y


def _pretrain(model, make, steps, lr):
    """a stand-in for a downloaded checkpoint"""
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    model.train()
    for i in range(steps):
        b = make(torch.Generator().manual_seed(900000 + i))
        loss = model(input_ids=b["input_ids"], labels=b["labels"]).loss
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
    model.zero_grad(set_to_none=True)


# ---------------------------------------------------------------- language models
def llama_pretraining():
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=160, num_hidden_layers=3,
                                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64))
    opt = torch.optim.AdamW(decay_groups(model, 0.1), lr=3e-3, betas=(0.9, 0.95))

    def make(g):
        ids = markov(96, 8, 32, g)
        return {"input_ids": ids, "labels": ids}
    return dict(model=model, optimizer=opt, scheduler=warmup_cosine(opt, 50), max_grad_norm=1.0, batches=Lazy(make, 1),
                loss_fn=lambda m, b: m(input_ids=b["input_ids"], labels=b["labels"]).loss)


def gpt2_finetune_small_rate():
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=80, n_positions=64, n_embd=64, n_layer=2, n_head=4,
                                       bos_token_id=0, eos_token_id=0))

    def make(g, changed=0):
        ids = markov(80, 8, 24, g, changed=changed)
        return {"input_ids": ids, "labels": ids}
    _pretrain(model, make, 120, 3e-3)
    opt = torch.optim.AdamW(decay_groups(model, 0.01), lr=1e-5)
    return dict(model=model, optimizer=opt, scheduler=warmup_linear(opt, 30), max_grad_norm=1.0,
                batches=Lazy(lambda g: make(g, 20), 2), loss_fn=lambda m, b: m(**b).loss)


def bert_mlm_bf16():
    from transformers import BertConfig, BertForMaskedLM
    torch.manual_seed(2)
    model = BertForMaskedLM(BertConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                                       intermediate_size=128, max_position_embeddings=64))
    opt = torch.optim.AdamW(decay_groups(model, 0.01), lr=2e-3, eps=1e-6)

    def make(g):
        x = markov(60, 16, 20, g, noise=0.02) + 4
        lens = torch.randint(12, 21, (16,), generator=g)
        mask = (torch.arange(20)[None] < lens[:, None]).long()
        hide = (torch.rand(x.shape, generator=g) < 0.15) & mask.bool()
        hide[:, 5] = True
        return {"input_ids": x.masked_fill(hide, 3) * mask, "attention_mask": mask, "labels": x.masked_fill(~hide, -100)}

    def loss_fn(m, b):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m(**b).loss
    return dict(model=model, optimizer=opt, loss_fn=loss_fn, scheduler=warmup_linear(opt, 50), max_grad_norm=1.0, batches=Lazy(make, 3))


def t5_seq2seq():
    from transformers import T5Config, T5ForConditionalGeneration
    torch.manual_seed(3)
    model = T5ForConditionalGeneration(T5Config(vocab_size=40, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4,
                                                decoder_start_token_id=0, pad_token_id=0))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)

    def make(g):                                     # a substitution cipher, with padding
        n = torch.randint(4, 9, (16,), generator=g)
        x = torch.randint(2, 40, (16, 8), generator=g)
        mask = (torch.arange(8)[None] < n[:, None]).long()
        y = (41 - x).masked_fill(mask == 0, -100)
        return dict(input_ids=x * mask, attention_mask=mask, labels=y)
    return dict(model=model, optimizer=opt, loss_fn=lambda m, b: m(**b).loss, batches=Lazy(make, 4))


def lstm_lm_big_sgd_rate():
    torch.manual_seed(4)

    class RNNModel(nn.Module):
        def __init__(self, v=60, d=64):
            super().__init__()
            self.drop, self.emb = nn.Dropout(0.2), nn.Embedding(v, d)
            self.rnn = nn.LSTM(d, d, 2, dropout=0.2, batch_first=True)
            self.out = nn.Linear(d, v)
            self.out.weight = self.emb.weight
            nn.init.uniform_(self.emb.weight, -0.1, 0.1)

        def forward(self, x):
            h, _ = self.rnn(self.drop(self.emb(x)))
            return self.out(self.drop(h))
    model = RNNModel()
    opt = torch.optim.SGD(model.parameters(), lr=20.0)

    def make(g):
        x = markov(60, 16, 26, g, 3)
        return x[:, :-1], x[:, 1:]

    def loss_fn(m, b):
        return F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten())
    return dict(model=model, optimizer=opt, loss_fn=loss_fn, max_grad_norm=0.25, batches=Lazy(make, 5),
                scheduler=torch.optim.lr_scheduler.StepLR(opt, 300, gamma=0.25))


def mamba_lm():
    from transformers import MambaConfig, MambaForCausalLM
    torch.manual_seed(5)
    model = MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=48, state_size=8, num_hidden_layers=2, expand=2,
                                         time_step_rank=4, use_cache=False))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)

    def make(g):
        ids = markov(50, 8, 16, g, 7)
        return {"input_ids": ids, "labels": ids}
    return dict(model=model, optimizer=opt, loss_fn=lambda m, b: m(**b).loss, max_grad_norm=1.0, batches=Lazy(make, 6),
                scheduler=warmup_cosine(opt, 25))


def mixtral_moe():
    from transformers import MixtralConfig, MixtralForCausalLM
    torch.manual_seed(6)
    model = MixtralForCausalLM(MixtralConfig(vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
                                             num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
                                             num_experts_per_tok=2, max_position_embeddings=64, output_router_logits=True,
                                             router_aux_loss_coef=0.02, sliding_window=None))
    opt = torch.optim.AdamW(decay_groups(model, 0.05), lr=1e-3)

    def make(g):
        ids = markov(64, 8, 16, g, 8)
        return {"input_ids": ids, "labels": ids}
    return dict(model=model, optimizer=opt, loss_fn=lambda m, b: m(**b, use_cache=False).loss, max_grad_norm=1.0,
                batches=Lazy(make, 7), scheduler=warmup_linear(opt, 40))


def lora_finetune():
    from transformers import LlamaConfig, LlamaForCausalLM
    from peft import LoraConfig, get_peft_model
    torch.manual_seed(7)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64))

    def make(g, table=0):
        ids = markov(64, 8, 20, g, table)
        return {"input_ids": ids, "labels": ids}
    _pretrain(base, make, 120, 3e-3)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["q_proj", "v_proj", "down_proj", "up_proj"],
                                            task_type="CAUSAL_LM"))
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    return dict(model=model, optimizer=opt, loss_fn=lambda m, b: m(**b).loss, max_grad_norm=0.3,
                batches=Lazy(lambda g: make(g, 9), 8), scheduler=warmup_cosine(opt, 15))


def reward_model_pairs():
    from transformers import LlamaConfig, LlamaModel
    torch.manual_seed(8)

    class Reward(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = LlamaModel(LlamaConfig(vocab_size=50, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                                               num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=32))
            self.head = nn.Linear(48, 1, bias=False)

        def forward(self, ids):
            return self.head(self.body(input_ids=ids, use_cache=False).last_hidden_state[:, -1]).squeeze(-1)
    model = Reward()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.01)

    def make(g):                                     # the better answer has more small tokens
        a, b = torch.randint(0, 50, (16, 12), generator=g), torch.randint(0, 50, (16, 12), generator=g)
        better = ((a < 20).sum(1) >= (b < 20).sum(1))[:, None]
        return dict(chosen=torch.where(better, a, b), rejected=torch.where(better, b, a))

    def loss_fn(m, b):
        r = m(torch.cat([b["chosen"], b["rejected"]]))
        n = len(b["chosen"])
        return -F.logsigmoid(r[:n] - r[n:]).mean()
    return dict(model=model, optimizer=opt, loss_fn=loss_fn, batches=Lazy(make, 9), max_grad_norm=1.0,
                scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS))


def dpo_with_reference():
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(9)
    policy = GPT2LMHeadModel(GPT2Config(vocab_size=48, n_positions=32, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.0,
                                        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))

    def sft(g):
        ids = markov(48, 8, 16, g, 2, noise=0.3)
        return {"input_ids": ids, "labels": ids}
    _pretrain(policy, sft, 100, 2e-3)
    ref = copy.deepcopy(policy).eval().requires_grad_(False)
    opt = torch.optim.RMSprop(policy.parameters(), lr=1e-5)

    def make(g):
        prompt = markov(48, 8, 6, g, 2)
        perm = torch.randperm(48, generator=torch.Generator().manual_seed(2))
        good, x = [], prompt[:, -1]
        for _ in range(6):
            x = perm[x]
            good.append(x)
        bad = torch.randint(0, 48, (8, 6), generator=g)
        return dict(chosen=torch.cat([prompt, torch.stack(good, 1)], 1), rejected=torch.cat([prompt, bad], 1))

    def logp(m, ids):
        lp = F.log_softmax(m(input_ids=ids).logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return lp[:, 5:].sum(1)

    def loss_fn(m, b):
        pc, pr = logp(m, b["chosen"]), logp(m, b["rejected"])
        with torch.no_grad():
            rc, rr = logp(ref, b["chosen"]), logp(ref, b["rejected"])
        return -F.logsigmoid(0.1 * ((pc - rc) - (pr - rr))).mean()
    return dict(model=policy, optimizer=opt, loss_fn=loss_fn, batches=Lazy(make, 10), scheduler=warmup_linear(opt, 50),
                max_grad_norm=10.0)


# ---------------------------------------------------------------- vision
def vit_label_smoothing():
    from transformers import ViTConfig, ViTForImageClassification
    torch.manual_seed(10)
    model = ViTForImageClassification(ViTConfig(hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96,
                                                image_size=16, patch_size=4, num_channels=1, num_labels=4))
    opt = torch.optim.AdamW(decay_groups(model, 0.05), lr=1e-3)

    def make(g):
        x, y = shapes(16, g)
        return {"pixel_values": x, "labels": y}
    ce = nn.CrossEntropyLoss(label_smoothing=0.1)
    return dict(model=model, optimizer=opt, loss_fn=lambda m, b: ce(m(pixel_values=b["pixel_values"]).logits, b["labels"]),
                scheduler=torch.optim.lr_scheduler.OneCycleLR(opt, 1e-3, total_steps=STEPS + 1), max_grad_norm=1.0, batches=Lazy(make, 11))


def resnet_sgd():
    torch.manual_seed(11)

    class Basic(nn.Module):
        def __init__(self, i, o, s):
            super().__init__()
            self.c1, self.b1 = nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o)
            self.c2, self.b2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
            self.short = nn.Sequential() if s == 1 and i == o else nn.Sequential(nn.Conv2d(i, o, 1, s, bias=False), nn.BatchNorm2d(o))

        def forward(self, x):
            return F.relu(self.b2(self.c2(F.relu(self.b1(self.c1(x))))) + self.short(x))
    model = nn.Sequential(nn.Conv2d(3, 12, 3, 1, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU(), Basic(12, 12, 1), Basic(12, 24, 2),
                          Basic(24, 48, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    return dict(model=model, optimizer=opt, loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
                scheduler=torch.optim.lr_scheduler.MultiStepLR(opt, [250, 400], 0.1), batches=Lazy(lambda g: shapes(16, g, 16, 3, noise=5.0), 12))


def unet_diffusion():
    from diffusers import UNet2DModel, DDPMScheduler
    torch.manual_seed(12)
    model = UNet2DModel(sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(16, 32),
                        norm_num_groups=8, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8)
    noise = DDPMScheduler(num_train_timesteps=1000)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.95, 0.999), weight_decay=1e-6)

    def make(g):
        x, _ = shapes(16, g, 8)
        return dict(x=x.clamp(-1, 1), noise=torch.randn(x.shape, generator=g), t=torch.randint(0, 1000, (16,), generator=g))

    def loss_fn(m, b):
        return F.mse_loss(m(noise.add_noise(b["x"], b["noise"], b["t"]), b["t"]).sample, b["noise"])
    return dict(model=model, optimizer=opt, loss_fn=loss_fn, scheduler=warmup_cosine(opt, 50, floor=0.0), max_grad_norm=1.0, batches=Lazy(make, 13))


def segmentation_poly():
    torch.manual_seed(13)

    class SegNet(nn.Module):
        def __init__(self):
            super().__init__()
            def blk(i, o):
                return nn.Sequential(nn.Conv2d(i, o, 3, 1, 1), nn.GroupNorm(4, o), nn.ReLU())
            self.d1, self.d2, self.mid = blk(1, 12), blk(12, 24), blk(24, 24)
            self.up = nn.ConvTranspose2d(24, 12, 2, 2)
            self.head = nn.Sequential(blk(24, 12), nn.Conv2d(12, 1, 1))

        def forward(self, x):
            a = self.d1(x)
            return self.head(torch.cat([a, self.up(self.mid(self.d2(F.max_pool2d(a, 2))))], 1))
    model = SegNet()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def make(g):
        cx, cy, r = (torch.rand(8, 1, 1, generator=g) * s + o for s, o in ((10, 3), (10, 3), (3, 2)))
        i = torch.arange(16.0)
        m = ((i[None, None, :] - cx) ** 2 + (i[None, :, None] - cy) ** 2 < r ** 2).float()[:, None]
        return m + 0.5 * torch.randn(m.shape, generator=g), m

    def loss_fn(m, b):
        logit = m(b[0])
        p = logit.sigmoid()
        dice = 1 - (2 * (p * b[1]).sum() + 1) / (p.sum() + b[1].sum() + 1)
        return F.binary_cross_entropy_with_logits(logit, b[1]) + dice
    return dict(model=model, optimizer=opt, loss_fn=loss_fn, batches=Lazy(make, 14), max_grad_norm=0.1,
                scheduler=torch.optim.lr_scheduler.PolynomialLR(opt, STEPS, 0.9))


def conv_autoencoder():
    torch.manual_seed(14)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ELU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ELU(), nn.Flatten(), nn.Linear(256, 12),
                          nn.Linear(12, 256), nn.Unflatten(1, (16, 4, 4)), nn.ELU(), nn.ConvTranspose2d(16, 16, 4, 2, 1), nn.ELU(),
                          nn.ConvTranspose2d(16, 1, 4, 2, 1))
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    return dict(model=model, optimizer=opt, loss_fn=lambda m, b: F.mse_loss(m(b), b), batches=Lazy(lambda g: shapes(16, g)[0], 15))


def vae_with_kl_warmup():
    torch.manual_seed(15)

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Sequential(nn.Flatten(), nn.Linear(256, 96), nn.ReLU())
            self.mu, self.lv = nn.Linear(96, 8), nn.Linear(96, 8)
            self.dec = nn.Sequential(nn.Linear(8, 96), nn.ReLU(), nn.Linear(96, 256))
            self.register_buffer("step", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            h = self.enc(x)
            mu, lv = self.mu(h), self.lv(h)
            return self.dec(mu + (0.5 * lv).exp() * torch.randn_like(mu)), mu, lv
    model = VAE()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)

    def make(g):
        return (shapes(32, g)[0] > 0).float()

    def loss_fn(m, x):
        out, mu, lv = m(x)
        beta = min(1.0, 0.2 + float(m.step) / 200)
        m.step += 1
        rec = F.binary_cross_entropy_with_logits(out, x.flatten(1), reduction="none").sum(1).mean()
        return rec + beta * (-0.5 * (1 + lv - mu ** 2 - lv.exp()).sum(1).mean())
    return dict(model=model, optimizer=opt, loss_fn=loss_fn, batches=Lazy(make, 16))


def simclr_contrastive():
    torch.manual_seed(16)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1, bias=False),
                          nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 32))
    opt = torch.optim.SGD(model.parameters(), lr=0.06, momentum=0.9, weight_decay=1e-4)

    def make(g):
        code = torch.randn(24, 6, generator=g)
        basis = torch.randn(6, 256, generator=torch.Generator().manual_seed(1))
        x = (code @ basis / 2.4).view(24, 1, 16, 16)
        return tuple(x * (0.8 + 0.4 * torch.rand(24, 1, 1, 1, generator=g)) + 0.7 * torch.randn(x.shape, generator=g) for _ in range(2))

    def loss_fn(m, b):
        z = F.normalize(m(torch.cat(b)), dim=1)
        n = len(z) // 2
        sim = (z @ z.T / 0.2).masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
        return F.cross_entropy(sim, torch.arange(2 * n).roll(n))
    return dict(model=model, optimizer=opt, loss_fn=loss_fn, batches=Lazy(make, 17), scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS))


# ---------------------------------------------------------------- sequences, speech, tables, graphs
def gru_regression():
    torch.manual_seed(17)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.fc = nn.GRU(3, 32, batch_first=True), nn.Linear(32, 1)

        def forward(self, x):
            return self.fc(self.gru(x)[0][:, -1])
    model = Net()
    opt = torch.optim.RMSprop(model.parameters(), lr=2e-3, alpha=0.9)

    def make(g):
        x = torch.randn(32, 15, 3, generator=g)
        return x, (x[..., 0].mean(1) + 0.5 * x[:, -1, 1] * x[:, -1, 2]).unsqueeze(1)       # (N, 1) targets
    return dict(model=model, optimizer=opt, loss_fn=lambda m, b: F.mse_loss(m(b[0]), b[1]), max_grad_norm=1.0, batches=Lazy(make, 18))


def ctc_speech():
    torch.manual_seed(18)

    class ASR(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(nn.Conv1d(8, 32, 3, 1, 1), nn.BatchNorm1d(32), nn.Hardtanh(0, 20))
            self.rnn, self.out = nn.LSTM(32, 32, batch_first=True, bidirectional=True), nn.Linear(64, 11)

        def forward(self, x):
            return F.log_softmax(self.out(self.rnn(self.conv(x.transpose(1, 2)).transpose(1, 2))[0]), -1)
    model = ASR()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    proto = torch.randn(11, 8, generator=torch.Generator().manual_seed(0)) * 1.5

    def make(g):
        n = torch.randint(3, 7, (8,), generator=g)
        y = torch.randint(1, 11, (8, 6), generator=g)
        frames = y.repeat_interleave(4, 1)
        x = proto[frames] + 0.3 * torch.randn(8, 24, 8, generator=g)
        return dict(x=x, y=y, in_len=n * 4, out_len=n)
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)

    def loss_fn(m, b):
        return ctc(m(b["x"]).transpose(0, 1), b["y"], b["in_len"], b["out_len"])
    return dict(model=model, optimizer=opt, loss_fn=loss_fn, max_grad_norm=5.0, batches=Lazy(make, 19))


def gcn_nodes():
    torch.manual_seed(19)
    g0 = torch.Generator().manual_seed(7)
    n, k = 150, 4
    y = torch.randint(0, k, (n,), generator=g0)
    adj = ((torch.rand(n, n, generator=g0) < torch.where(y[:, None] == y[None], 0.12, 0.01)).float()).triu(1)
    adj = adj + adj.T + torch.eye(n)
    d = adj.sum(1).rsqrt()
    x = F.one_hot(y, k).float() * 0.6 + torch.randn(n, k, generator=g0)
    feats = torch.cat([x, torch.randn(n, 12, generator=g0)], 1)

    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", d[:, None] * adj * d[None])
            self.register_buffer("x", feats)
            self.w1, self.w2, self.drop = nn.Linear(16, 32), nn.Linear(32, k), nn.Dropout(0.5)

        def forward(self):
            h = F.relu(self.a @ self.w1(self.drop(self.x)))
            return self.a @ self.w2(self.drop(h))
    model = GCN()
    opt = torch.optim.Adam([{"params": model.w1.parameters(), "weight_decay": 5e-4}, {"params": model.w2.parameters()}], lr=0.01)

    def make(g):
        idx = torch.randperm(n, generator=g)[:60]
        return idx, y[idx]
    return dict(model=model, optimizer=opt, loss_fn=lambda m, b: F.cross_entropy(m()[b[0]], b[1]), batches=Lazy(make, 20))


def mixture_density():
    torch.manual_seed(20)

    class MDN(nn.Module):
        def __init__(self, k=5):
            super().__init__()
            self.h, self.out = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh()), nn.Linear(40, 3 * k)

        def forward(self, x):
            pi, mu, ls = self.out(self.h(x)).chunk(3, -1)
            return F.log_softmax(pi, -1), mu, ls.clamp(-4, 3)
    model = MDN()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)

    def make(g):
        t = torch.rand(64, 1, generator=g) * 2 - 1
        return t + 0.3 * torch.sin(6.28 * t) + 0.05 * torch.randn(64, 1, generator=g), t

    def loss_fn(m, b):
        lp, mu, ls = m(b[0])
        comp = -0.5 * ((b[1] - mu) / ls.exp()) ** 2 - ls - 0.919
        return -torch.logsumexp(lp + comp, -1).mean()
    return dict(model=model, optimizer=opt, loss_fn=loss_fn, batches=Lazy(make, 21), max_grad_norm=10.0)


def word2vec_negative_sampling():
    torch.manual_seed(21)

    class SGNS(nn.Module):
        def __init__(self, v=120, d=24):
            super().__init__()
            self.u, self.v = nn.Embedding(v, d, sparse=False), nn.Embedding(v, d, sparse=False)
            nn.init.uniform_(self.u.weight, -0.5 / d, 0.5 / d)
            nn.init.zeros_(self.v.weight)

        def forward(self, c, o, neg):
            u = self.u(c)
            pos = (u * self.v(o)).sum(-1)
            return -(F.logsigmoid(pos) + F.logsigmoid(-(self.v(neg) @ u.unsqueeze(-1)).squeeze(-1)).sum(-1)).mean()
    model = SGNS()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)

    def make(g):
        c = torch.randint(0, 120, (128,), generator=g)
        o = c // 10 * 10 + torch.randint(0, 10, (128,), generator=g)
        return c, o, torch.randint(0, 120, (128, 5), generator=g)
    return dict(model=model, optimizer=opt, loss_fn=lambda m, b: m(*b), batches=Lazy(make, 22))


def siamese_triplet_frozen_stem():
    torch.manual_seed(22)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 32))
    model[0].requires_grad_(False)
    opt = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=3e-4)

    faces = torch.randn(40, 1, 16, 16, generator=torch.Generator().manual_seed(4))

    def make(g):
        who = torch.randint(0, 40, (24,), generator=g)                 # forty identities, many views of each
        other = (who + torch.randint(1, 40, (24,), generator=g)) % 40
        view = lambda ids: faces[ids] + 2.0 * torch.randn(len(ids), 1, 16, 16, generator=g)
        return view(who), view(who), view(other)
    crit = nn.TripletMarginLoss(margin=1.0)
    return dict(model=model, optimizer=opt, loss_fn=lambda m, b: crit(*(m(z) for z in b)), batches=Lazy(make, 23))


def multilabel_fp16_scaler():
    torch.manual_seed(23)
    model = nn.Sequential(nn.Linear(40, 96), nn.LayerNorm(96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 10))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    w = torch.randn(40, 10, generator=torch.Generator().manual_seed(3))

    def make(g):
        x = torch.randn(64, 40, generator=g)
        return x, (x @ w > 3).float()

    def loss_fn(m, b):
        with torch.autocast("cpu", dtype=torch.float16):
            out = m(b[0])
        return F.binary_cross_entropy_with_logits(out.float(), b[1])
    return dict(model=model, optimizer=opt, loss_fn=loss_fn, batches=Lazy(make, 24), max_grad_norm=1.0,
                scaler=torch.amp.GradScaler("cpu", init_scale=2.0 ** 12), scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS))


# ---------------------------------------------------------------- reinforcement learning
class Corridor:
    """Nine cells in a row; +1 at the right end, small cost a step."""
    n = 9

    def __init__(self, g, b):
        self.s = torch.randint(0, 5, (b,), generator=g)

    def obs(self):
        return F.one_hot(self.s, self.n).float()

    def step(self, a):
        self.s = (self.s + a * 2 - 1).clamp(0, self.n - 1)
        done = (self.s == self.n - 1)
        return done.float() - 0.02, done


def actor_critic():
    torch.manual_seed(24)

    class AC(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(9, 48), nn.Tanh())
            self.pi, self.v = nn.Linear(48, 2), nn.Linear(48, 1)

        def forward(self, x):
            h = self.body(x)
            return torch.distributions.Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)
    model = AC()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)

    def loss_fn(m, seed):
        g = torch.Generator().manual_seed(int(seed))
        env, alive = Corridor(g, 16), torch.ones(16)
        lp, val, rew, ent, mask = [], [], [], [], []
        for _ in range(14):
            dist, v = m(env.obs())
            a = torch.multinomial(dist.probs.detach(), 1, generator=g).squeeze(1)
            r, done = env.step(a)
            lp.append(dist.log_prob(a)); val.append(v); rew.append(r * alive); ent.append(dist.entropy()); mask.append(alive.clone())
            alive = alive * (1 - done.float())
        ret, out = torch.zeros(16), []
        for r in reversed(rew):
            ret = r + 0.97 * ret
            out.append(ret)
        ret, val, lp, mask, ent = torch.stack(out[::-1]), torch.stack(val), torch.stack(lp), torch.stack(mask), torch.stack(ent)
        adv = (ret - val).detach()
        n = mask.sum()
        return (-(lp * adv * mask).sum() + 0.5 * (((ret - val) ** 2) * mask).sum() - 0.01 * (ent * mask).sum()) / n

    def metric(m):                                   # steps needed from cell 0, greedily
        env = Corridor(torch.Generator().manual_seed(0), 1); env.s[:] = 0
        for t in range(1, 40):
            if env.step(m(env.obs())[0].probs.argmax(1))[1].all():
                return t
        return 40
    return dict(model=model, optimizer=opt, loss_fn=loss_fn, max_grad_norm=0.5, metric=metric,
                batches=Lazy(lambda g: torch.randint(0, 2 ** 31, (), generator=g), 25))


def dqn_target_network():
    torch.manual_seed(25)

    class DQN(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Sequential(nn.Linear(9, 64), nn.ReLU(), nn.Linear(64, 2))
            self.target = copy.deepcopy(self.q).requires_grad_(False)
            self.register_buffer("updates", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            return self.q(x)
    model = DQN()
    opt = torch.optim.RMSprop(model.q.parameters(), lr=1e-3, alpha=0.95, eps=0.01)

    def make(g):
        env = Corridor(g, 32)
        env.s = torch.randint(0, 8, (32,), generator=g)
        o, a = env.obs(), torch.randint(0, 2, (32,), generator=g)
        r, d = env.step(a)
        return dict(obs=o, action=a, reward=r, done=d.float(), next_obs=env.obs())

    def loss_fn(m, b):
        if m.updates % 25 == 0:
            m.target.load_state_dict(m.q.state_dict())
        m.updates += 1
        with torch.no_grad():
            t = b["reward"] + 0.9 * (1 - b["done"]) * m.target(b["next_obs"]).max(1).values
        return F.smooth_l1_loss(m(b["obs"]).gather(1, b["action"][:, None]).squeeze(1), t)

    def metric(m):                                   # error against the true values
        v = [0.0] * 9
        for _ in range(200):
            v = [max((1 - .02 if min(max(s + d, 0), 8) == 8 else -.02 + .9 * v[min(max(s + d, 0), 8)]) for d in (-1, 1)) for s in range(8)] + [0.0]
        return float((m(torch.eye(9)).max(1).values[:8] - torch.tensor(v[:8])).abs().mean())
    return dict(model=model, optimizer=opt, loss_fn=loss_fn, batches=Lazy(make, 26), max_grad_norm=10.0, metric=metric)


RUNS = [llama_pretraining, gpt2_finetune_small_rate, bert_mlm_bf16, t5_seq2seq, lstm_lm_big_sgd_rate, mamba_lm, mixtral_moe,
        lora_finetune, reward_model_pairs, dpo_with_reference, vit_label_smoothing, resnet_sgd, unet_diffusion, segmentation_poly,
        conv_autoencoder, vae_with_kl_warmup, simclr_contrastive, gru_regression, ctc_speech, gcn_nodes, mixture_density,
        word2vec_negative_sampling, siamese_triplet_frozen_stem, multilabel_fp16_scaler, actor_critic, dqn_target_network]
