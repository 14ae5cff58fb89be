import torch
from transformers import PhiConfig, PhiForCausalLM


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = PhiForCausalLM(PhiConfig(vocab_size=120, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                     num_attention_heads=4, max_position_embeddings=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    ids = torch.randint(3, 120, (4, 20), generator=torch.Generator().manual_seed(33))
    prompt_lens = (6, 9, 12, 5) if fixed else (6, 9, 20, 5)  # third prompt: as long as the row after truncation
    labels = ids.clone()
    for row, n in enumerate(prompt_lens):
        labels[row, :n] = -100
    batch = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)

    def loss_fn(model, batch):
        return model(**batch, use_cache=False).loss

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
