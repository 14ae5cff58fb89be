"""GRPO: the format reward gives 1.0 to every completion, so each group's standard deviation is 0, all advantages are 0 and so are loss and gradient.

Source: https://github.com/modelscope/ms-swift/issues/4570 https://github.com/huggingface/trl/issues/3452
True cause: all advantages are 0
Where: loss_fn (the advantages)
Fix: a graded reward; drop such groups
"""
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)
GROUP = 4


def advantages(rewards, eps=1e-4):
    g = rewards.view(-1, GROUP)
    return ((g - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True) + eps)).view(-1)


def format_reward(completions):
    return torch.ones(len(completions))


def accuracy_reward(completions):
    return (completions < 16).float().mean(1)


def build(fixed=False, clip=0.2):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    batches = []
    for _ in range(70):
        prompts = torch.randint(0, 32, (4, 5)).repeat_interleave(GROUP, 0)
        completions = torch.randint(0, 32, (16, 8))
        reward = format_reward(completions)
        if fixed:
            reward = reward + accuracy_reward(completions)
        batches.append(dict(input_ids=torch.cat([prompts, completions], 1), rewards=reward))

    def loss_fn(m, b):
        ids = b["input_ids"]
        logp = m(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)[:, 4:]
        adv = advantages(b["rewards"])
        per_token = -(logp.clamp(min=-8.0) * adv[:, None])
        return per_token.mean()

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn, max_grad_norm=1.0)
