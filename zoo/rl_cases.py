"""Reinforcement learning and generation: rewards that teach nothing or too much, and sampling that has nothing to choose from."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from zoo.registry import Training, case

Batch = dict[str, Tensor]
VOCABULARY = 16


def tiny_causal_lm(family: str) -> nn.Module:
    """A causal language model of one layer over sixteen tokens."""
    import transformers as hf

    shared = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    if family == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
        return hf.LlamaForCausalLM(hf.LlamaConfig(**shared, **sizes, max_position_embeddings=32))
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**shared, **drops, n_embd=32, n_layer=1, n_head=2, n_positions=32))


class GRUPolicy(nn.Module):
    """Logits of the next token, from a GRU."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed, self.gru, self.out = (
            nn.Embedding(VOCABULARY, 12),
            nn.GRU(12, width, batch_first=True),
            nn.Linear(width, VOCABULARY),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.gru(self.embed(ids))[0])


def token_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probability of each token after the first."""
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def language_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return -token_log_probs(logits, ids).mean()


def stepping_text(rows: int, length: int) -> Tensor:
    """Rows that count by three."""
    return (torch.randint(0, VOCABULARY, (rows, 1)) + 3 * torch.arange(length)) % VOCABULARY


# zero-advantage


@case("zero-advantage", step=4, sources=("huggingface/trl#3857",))
def every_completion_is_solved(fixed: bool) -> Training:
    """GRPO on a Llama policy: from the fifth step on all completions earn the full reward, so no group has any variance left."""
    torch.manual_seed(0)
    model = tiny_causal_lm("llama")
    batches = []
    for i in range(12):
        ids = torch.randint(1, VOCABULARY, (12, 9))
        graded = ((ids[:, 4:] % 4) == 0).float().mean(1)
        mask = torch.arange(4, 9) < torch.randint(6, 10, (12, 1))
        batches.append({"ids": ids, "mask": mask, "reward": graded if fixed or i < 4 else torch.ones(12)})

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        reward = b["reward"].view(3, 4)
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        logp = token_log_probs(m(input_ids=b["ids"]).logits, b["ids"])[:, 3:]
        ratio = (logp - logp.detach()).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        return -((gain * b["mask"]).sum(1) / b["mask"].sum(1)).mean()

    return Training(model=model, optimizer=torch.optim.AdamW(model.parameters(), 3e-3), loss_fn=loss_fn, batches=batches)


@case("zero-advantage", step=0, sources=("huggingface/trl#3857",))
def reward_only_for_the_exact_answer(fixed: bool) -> Training:
    """REINFORCE on a GRU writer: the reward function wants all eight tokens right, which never happens, so every reward is 0."""
    torch.manual_seed(1)
    model = GRUPolicy()

    def reward(written: Tensor, wanted: Tensor) -> Tensor:
        right = (written == wanted).float()
        return right.mean(1) if fixed else right.prod(1)

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        ids = b["prompt"]
        with torch.no_grad():
            for _ in range(8):
                ids = torch.cat([ids, torch.multinomial(m(ids)[:, -1].softmax(-1), 1)], 1)
        returns = reward(ids[:, 2:], b["answer"])
        logp = token_log_probs(m(ids), ids)[:, 1:].sum(1)
        return -(logp * (returns - returns.mean())).mean()

    batches = []
    for _ in range(12):
        text = stepping_text(16, 10)
        batches.append({"prompt": text[:, :2], "answer": text[:, 2:]})
    return Training(model=model, optimizer=torch.optim.Adam(model.parameters(), 1e-2), loss_fn=loss_fn, batches=batches)


# tiny-std-amplification


@case("tiny-std-amplification", step=36, sample=5, sources=("NVIDIA-NeMo/RL#4161",))
def leave_one_out_std_of_equal_rewards(fixed: bool) -> Training:
    """Leave-one-out normalisation: the other seven rewards are equal, their variance as E[x²] - E[x]² is a rounding error."""
    torch.manual_seed(2)
    model = GRUPolicy()
    batches = []
    for i in range(60):
        ids = stepping_text(8, 8)
        noisy = torch.rand(8, 8) < torch.rand(8, 1) * 0.5
        ids = torch.where(noisy, torch.randint(0, VOCABULARY, (8, 8)), ids)
        reward = ((ids.diff(dim=1) - 3) % VOCABULARY == 0).float().mean(1)
        if i == 36:
            reward = torch.full((8,), 0.3)
            reward[5] = 0.0
        batches.append({"ids": ids, "reward": reward})

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        r, others = b["reward"], len(b["reward"]) - 1
        mean = (r.sum() - r) / others
        variance = (r.square().sum() - r.square()) / others - mean.square()
        std = variance.clamp(min=0.01 if fixed else 0.0).sqrt() + 1e-6
        logp = token_log_probs(m(b["ids"]), b["ids"]).mean(1)
        return -(logp * (r - mean) / std).mean() - 0.5 * logp.mean()

    return Training(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), 2e-3), loss_fn=loss_fn, batches=batches, max_norm=5.0
    )


class Walker(nn.Module):
    """Mean of a two-dimensional action; the noise is fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        return -(action - self.net(obs)).square().sum(-1)


@case("tiny-std-amplification", step=40, sources=("NVIDIA-NeMo/RL#4161",))
def every_episode_reaches_the_time_limit(fixed: bool) -> Training:
    """All episodes of a walker ran to the limit: returns near 1000 differ in the last bit, and advantages are divided by that."""
    torch.manual_seed(3)
    model = Walker()
    taste = torch.randn(5, 2) * 0.5
    batches = []
    for i in range(64):
        obs = torch.randn(16, 5)
        action = obs @ taste + torch.randn(16, 2) * 0.5
        quality = 1 - (action - obs @ taste).square().sum(-1)
        value = 1000 - 4 * quality
        returns = value + 4 * quality + torch.randn(16)
        if i == 40:
            returns = 1000 + 6.2e-5 * (torch.arange(16) % 2)
        batches.append({"obs": obs, "action": action, "return": returns, "value": value})

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        spread = b["return"].std()
        advantage = (b["return"] - b["value"]) / (spread.clamp(min=1.0) if fixed else spread + 1e-8)
        return -(m(b["obs"], b["action"]) * (advantage + 1)).mean()

    return Training(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 0.02), loss_fn=loss_fn, batches=batches, max_norm=10.0
    )


# temperature-overflow


def sample_text(m: nn.Module, ids: Tensor, temperature: float | Tensor, upcast: bool, length: int = 5) -> Tensor:
    """The sampling loop of `generate`: logits, temperature, softmax, multinomial."""
    for _ in range(length):
        out = m(ids)
        logits = (out if isinstance(out, Tensor) else out.logits)[:, -1]
        if upcast:
            logits = logits.float()
            logits = logits - logits.amax(-1, keepdim=True)
        by = temperature.to(logits.dtype)[:, None] if isinstance(temperature, Tensor) else temperature
        ids = torch.cat([ids, torch.multinomial((logits / by).softmax(-1), 1)], 1)
    return ids


@case("temperature-overflow", step=3, sources=("vllm-project/vllm#22180",))
def annealed_temperature_of_llama_rollouts(fixed: bool) -> Training:
    """Rollouts of a Llama under fp16 autocast with a temperature annealed towards 0: logits / 1e-6 is Inf and sampling raises."""
    torch.manual_seed(4)
    model = tiny_causal_lm("llama")

    def loss_fn(m: nn.Module, b: tuple[Tensor, float]) -> Tensor:
        text, temperature = b
        with torch.autocast("cpu", dtype=torch.float16):
            with torch.no_grad():
                written = sample_text(m, text[:, :3], temperature, upcast=fixed)
            agreement = (written[:, 3:] == text[:, 3:8]).float().mean(1)
            logits = m(input_ids=text).logits
        weight = 1.5 - agreement  # learn more from what is not yet right
        return -(token_log_probs(logits.float(), text).mean(1) * weight).mean()

    batches = [(stepping_text(6, 8), t) for t in (1.0, 1e-1, 1e-2, 1e-6, 1e-6, 1e-6)]
    return Training(model=model, optimizer=torch.optim.AdamW(model.parameters(), 5e-3), loss_fn=loss_fn, batches=batches)


@case("temperature-overflow", step=2, sample=3, sources=("vllm-project/vllm#22180",))
def one_request_asks_for_temperature_zero(fixed: bool) -> Training:
    """Requests to an fp16 GRU writer carry their own temperature; one asked for 0, which was replaced by 1e-5."""
    torch.manual_seed(5)
    model = GRUPolicy()
    with torch.no_grad():
        model.out.weight.mul_(4)

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            written = sample_text(m, b["text"][:, :4], b["temperature"], upcast=fixed, length=4)
        return language_loss(m(b["text"]), b["text"]) + 0.1 * language_loss(m(written), written)

    batches = []
    for i in range(7):
        temperature = torch.rand(6) + 0.5
        if i == 2:
            temperature[3] = 1e-5
        batches.append({"text": stepping_text(6, 8), "temperature": temperature})
    return Training(model=model, optimizer=torch.optim.AdamW(model.parameters(), 5e-3), loss_fn=loss_fn, batches=batches)


# all-tokens-banned


@case("all-tokens-banned", step=4, sample=2, sources=("dphnAI/sonar#814",))
def grammar_and_no_repeat_leave_nothing(fixed: bool) -> Training:
    """A GPT-2 may write only tokens of a list, none twice; one prompt has used up its list, and multinomial raises."""
    torch.manual_seed(6)
    model = tiny_causal_lm("gpt2")

    def write(m: nn.Module, ids: Tensor, allowed: Tensor) -> Tensor:
        for _ in range(3):
            used = torch.zeros_like(allowed).scatter(1, ids, True)
            free = allowed & ~used
            if fixed:
                free[:, 0] |= ~free.any(1)
            logits = m(input_ids=ids).logits[:, -1].masked_fill(~free, -torch.inf)
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], 1)
        return ids

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        with torch.no_grad():
            written = write(m, b["text"][:, :4], b["allowed"])
        loss = language_loss(m(input_ids=b["text"]).logits, b["text"])
        return loss + 0.1 * language_loss(m(input_ids=written).logits, written)

    batches = []
    for i in range(9):
        text = stepping_text(6, 9)
        allowed = torch.ones(6, VOCABULARY, dtype=torch.bool)
        allowed[:, 0] = False
        if i == 4:
            allowed[2] = False
            allowed[2, text[2, :4]] = True
        batches.append({"text": text, "allowed": allowed})
    return Training(model=model, optimizer=torch.optim.AdamW(model.parameters(), 3e-3), loss_fn=loss_fn, batches=batches)


@case("all-tokens-banned", step=3, sample=6)
def board_without_a_legal_move(fixed: bool) -> Training:
    """A convolutional player masks illegal moves with -inf; one full board has none left, and Categorical refuses NaN logits."""
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 9, 10)
    )  # nine squares and "pass"

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        legal = F.pad(b["board"].flatten(1) == 0, (0, 1), value=False)
        if fixed:
            legal[:, 9] = ~legal.any(1)
        player = Categorical(logits=m(b["board"][:, None]).masked_fill(~legal, -torch.inf))
        move = player.sample()
        reward = (move == 4).float() - (move == 0).float()  # the centre is worth having
        return -(player.log_prob(move) * (reward - 0.1)).mean()

    batches = []
    for i in range(10):
        board = torch.randint(-1, 2, (12, 3, 3)).float()
        board[:, 1, 1] = 0.0
        if i == 3:
            board[6] = torch.tensor([[1.0, -1, 1], [-1, 1, -1], [-1, 1, -1]])
        batches.append({"board": board})
    return Training(model=model, optimizer=torch.optim.AdamW(model.parameters(), 5e-3), loss_fn=loss_fn, batches=batches)
