import torch
from transformers import MixtralConfig, MixtralForCausalLM


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = MixtralForCausalLM(MixtralConfig(
        vocab_size=110, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        output_router_logits=True, router_aux_loss_coef=0.01, sliding_window=None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    ids = torch.randint(3, 110, (4, 18), generator=torch.Generator().manual_seed(57))
    mask = torch.ones_like(ids)
    mask[2, 13:] = 0
    ids[mask == 0] = 0
    batch = dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))

    def loss_fn(model, batch):
        return model(**batch, use_cache=False).loss

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
