import torch
from transformers import BertConfig, BertLMHeadModel


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    cfg = BertConfig(vocab_size=120, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                     intermediate_size=128, max_position_embeddings=64, is_decoder=fixed)
    model = BertLMHeadModel(cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    ids = torch.randint(5, 120, (4, 20), generator=torch.Generator().manual_seed(7))
    batch = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids.clone())

    def loss_fn(model, batch):
        return model(**batch, use_cache=False).loss

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
