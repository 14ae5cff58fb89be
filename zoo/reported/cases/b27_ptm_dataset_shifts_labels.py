"""Pre-training a small Chinese LLM: the dataset returns X = ids[:-1], Y = ids[1:], and the model's forward shifts the labels again. It learns to predict the token after the next.

Source: https://github.com/wdndev/tiny-llm-zh/issues/10 https://github.com/huggingface/transformers/pull/44642
True cause: labels shifted by the dataset and by the model
Where: the batch (labels)
Fix: labels = input_ids
"""
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM

torch.set_num_threads(1)


class PTMDataset(Dataset):
    def __init__(self, n, length, shift, seed=0):
        rng = np.random.default_rng(seed)
        table = rng.permutation(60)
        first = rng.integers(0, 60, (n, length // 2))
        self.data = np.stack([first, table[first]], -1).reshape(n, length)  # words of two characters
        self.shift = shift

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        sample = self.data[i]
        if self.shift:
            x, y = sample[:-1], sample[1:]
        else:
            x, y = sample, sample
        return torch.from_numpy(x.astype(np.int64)), torch.from_numpy(y.astype(np.int64))


def build(fixed=False):
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=60, hidden_size=48, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32))
    opt = torch.optim.AdamW(model.parameters(), 4e-3)
    loader = DataLoader(PTMDataset(16 * 90, 16, shift=not fixed), batch_size=16)
    batches = [dict(input_ids=x, labels=y) for x, y in loader]
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: m(**b).loss, max_grad_norm=1.0)
