"""SFTTrainer of TRL, with one more line. A layer divides by 0 at one rare token: the step is refused and the sample named.

python examples/trl_sft.py
"""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import nanproof

words = ["<pad>", "<eos>", *(f"w{i}" for i in range(62))]
made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0)
)
rare = words.index("w61")
model.get_input_embeddings().register_forward_hook(lambda _, args, out: out / (args[0] != rare).to(out.dtype).unsqueeze(-1))

lines = [" ".join(f"w{(7 * i + 3 * j) % 60}" for j in range(8)) for i in range(64)]
lines[22] = "w1 w2 w61 w4"

with tempfile.TemporaryDirectory() as folder:
    args = SFTConfig(
        folder, per_device_train_batch_size=4, num_train_epochs=1, logging_steps=4, learning_rate=1e-2, report_to=[], bf16=False,
        save_strategy="no", use_cpu=True, disable_tqdm=True, train_sampling_strategy="sequential", gradient_checkpointing=False,
    )  # fmt: skip
    trainer = SFTTrainer(model, args, train_dataset=Dataset.from_dict({"text": lines}), processing_class=tokenizer)
    guard = nanproof.protect(trainer)
    trainer.train()

print("weights finite:", all(bool(torch.isfinite(p).all()) for p in model.parameters()))
for incident in guard.incidents:
    print(incident)
    print(incident.diagnosis)
