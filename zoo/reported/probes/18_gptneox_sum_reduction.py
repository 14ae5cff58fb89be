import torch
import torch.nn.functional as F
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                                             intermediate_size=128, max_position_embeddings=64,
                                             hidden_dropout=0.0, attention_dropout=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    ids = torch.randint(2, 100, (8, 16), generator=torch.Generator().manual_seed(18))
    batch = {"input_ids": ids, "labels": ids.clone()}
    reduction = "mean" if fixed else "sum"

    def loss_fn(model, batch):
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.reshape(-1, 100), batch["labels"][:, 1:].reshape(-1), reduction=reduction)

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn, accumulate=4)
