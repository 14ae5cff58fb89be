"""GRPOTrainer of TRL with generation, protected: signals of the policy join its logs.

python examples/trl_grpo.py
"""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import nanproof

words = ["<pad>", "<eos>", *(f"w{i}" for i in range(30))]
made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                pad_token_id=0, bos_token_id=1, eos_token_id=1)
)  # fmt: skip
prompts = Dataset.from_dict({"prompt": [f"w{i % 30} w{(i * 7) % 30}" for i in range(64)]})


def says_w5(completions, **_):
    """The reward: how often a word was said."""
    return [float(text.split().count("w5")) for text in completions]


with tempfile.TemporaryDirectory() as folder:
    args = GRPOConfig(
        folder, per_device_train_batch_size=16, num_generations=8, max_completion_length=8, max_steps=20, learning_rate=2e-2,
        logging_steps=5, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, bf16=False,
        gradient_checkpointing=False,
    )  # fmt: skip
    trainer = GRPOTrainer(model, reward_funcs=says_w5, args=args, train_dataset=prompts, processing_class=tokenizer)
    guard = nanproof.protect(trainer)
    trainer.train()

for entry in trainer.state.log_history:
    if "reward" in entry:
        told = {
            key.removeprefix("nanproof/rl/"): round(value, 3) for key, value in entry.items() if key.startswith("nanproof/rl/")
        }
        print(f"step {entry['step']}: reward {entry['reward']:.2f}", told)
print("incidents:", len(guard.incidents))
