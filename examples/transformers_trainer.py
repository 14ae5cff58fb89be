"""The Trainer of transformers, with one more line. A layer of this model divides by 0 at one rare token.

python examples/transformers_trainer.py            # protected
python examples/transformers_trainer.py --bare     # what the Trainer does by itself
"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import nanproof

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
)
rare = 99
model.get_input_embeddings().register_forward_hook(lambda _, args, out: out / (args[0] != rare).to(out.dtype).unsqueeze(-1))
tokens = torch.randint(0, rare, (80, 16))
tokens[43, 7] = rare
rows = [{"input_ids": row, "labels": row.clone()} for row in tokens]

with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder, per_device_train_batch_size=8, num_train_epochs=1, logging_steps=1, learning_rate=1e-3, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=rows)
    guard = None if "--bare" in sys.argv else nanproof.protect(trainer)
    trainer.train()

finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
print("weights finite:", finite)
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"step {entry['step'] - 1}: loss {entry['loss']:.4g}, grad_norm {entry['grad_norm']:.4g}")
if guard is not None:
    for incident in guard.incidents:
        print(incident)
        print(incident.diagnosis)
