import torch
from transformers import OPTConfig, OPTForCausalLM


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = OPTForCausalLM(OPTConfig(vocab_size=110, hidden_size=64, word_embed_proj_dim=64, ffn_dim=128,
                                     num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
                                     pad_token_id=1, bos_token_id=2, eos_token_id=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(4, 110, (4, 20), generator=torch.Generator().manual_seed(11))
    mask = torch.ones_like(ids)
    for row, n in enumerate((0, 5, 8, 3)):
        mask[row, :n] = 0
    ids[mask == 0] = 1
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def loss_fn(model, batch):
        labels = batch["labels"].clone()
        # a row's first real token is predicted from nothing that was seen
        first = batch["attention_mask"].argmax(1)
        labels[torch.arange(labels.size(0)), first] = -100
        if fixed:
            return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels,
                         use_cache=False).loss
        return model(input_ids=batch["input_ids"], labels=labels, use_cache=False).loss

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
