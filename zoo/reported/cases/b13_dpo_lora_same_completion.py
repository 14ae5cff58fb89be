"""DPO with LoRA: the collator reads the chosen column for both sides. Every reward margin is exactly 0, loss 0.6931, gradient 0.

Source: https://github.com/CrazyBoyM/llama3-Chinese-chat/issues/43 https://github.com/huggingface/trl/issues/800
True cause: chosen and rejected are identical
Where: the batch (input_ids: both halves the same)
Fix: read the rejected column
"""
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

torch.set_num_threads(1)


def collate(rows, fixed):
    chosen = torch.stack([torch.cat([r["prompt"], r["chosen"]]) for r in rows])
    other = "rejected" if fixed else "chosen"
    rejected = torch.stack([torch.cat([r["prompt"], r[other]]) for r in rows])
    return dict(input_ids=torch.cat([chosen, rejected]), prompt_len=len(rows[0]["prompt"]))


def logps(model, b):
    ids = b["input_ids"]
    lp = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    lp = lp.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return lp[:, b["prompt_len"] - 1 :].sum(-1).chunk(2)


def build(fixed=False, beta=0.5):
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=48, n_layer=2, n_head=4, n_positions=24, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=32, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM"))
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    batches = []
    for _ in range(60):
        rows = [dict(prompt=torch.randint(0, 64, (6,)), chosen=torch.randint(0, 32, (8,)), rejected=torch.randint(32, 64, (8,))) for _ in range(8)]
        batches.append(collate(rows, fixed))

    def loss_fn(m, b):
        pc, pr = logps(m, b)
        with torch.no_grad(), m.disable_adapter():
            rc, rr = logps(m, b)
        return -F.logsigmoid(beta * ((pc - rc) - (pr - rr))).mean()

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn, max_grad_norm=1.0)
