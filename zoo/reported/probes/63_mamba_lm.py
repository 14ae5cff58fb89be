import torch
from transformers import MambaConfig, MambaForCausalLM


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = MambaForCausalLM(MambaConfig(vocab_size=100, hidden_size=48, state_size=8, num_hidden_layers=2, conv_kernel=4,
                                         expand=2, time_step_rank=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 100, (4, 16), generator=torch.Generator().manual_seed(63))
    batch = dict(input_ids=ids, labels=ids.clone())

    def loss_fn(model, batch):
        return model(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False).loss

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
