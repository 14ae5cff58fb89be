import torch
from transformers import BertConfig, BertForMaskedLM


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = BertForMaskedLM(BertConfig(vocab_size=150, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                                       intermediate_size=128, max_position_embeddings=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    g = torch.Generator().manual_seed(51)
    mask = (torch.arange(24)[None] < torch.tensor([24, 15, 20, 11, 18])[:, None]).long()
    ids = torch.randint(5, 150, (5, 24), generator=g) * mask
    chosen = (torch.rand(ids.shape, generator=g) < 0.2) & (mask == 1)
    chosen[:, 3] = True
    labels = ids.masked_fill(~chosen, -100)
    batch = dict(input_ids=ids.masked_fill(chosen, 4), attention_mask=mask, labels=labels)

    def loss_fn(model, batch):
        return model(**batch).loss

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
