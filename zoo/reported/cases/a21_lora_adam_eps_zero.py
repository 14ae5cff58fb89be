"""LoRA on a tiny Llama with Adam and eps = 0: lora_B starts at 0, so the gradient of lora_A is exactly 0 in the first step, and the update is 0 / 0.

Source: https://github.com/lessw2020/FAdam_PyTorch/issues/1 https://github.com/okoge-kaz/llm-recipes/pull/8
True cause: the optimizer divides 0 by 0
Where: optimizer.step (lora_A)
Fix: eps=1e-8
"""
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)


def build(fixed=False):
    torch.manual_seed(21)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2))
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM", modules_to_save=["lm_head"]))
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-3, eps=1e-8 if fixed else 0.0, weight_decay=0.0)
    batches = []
    for _ in range(40):
        ids = (torch.randint(0, 48, (4, 1)) + 5 * torch.arange(12)) % 48
        batches.append(dict(input_ids=ids, labels=ids.clone()))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: m(**b).loss, max_grad_norm=1.0)
