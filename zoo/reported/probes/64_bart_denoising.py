import torch
from transformers import BartConfig, BartForConditionalGeneration


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = BartForConditionalGeneration(BartConfig(
        vocab_size=110, d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=40, pad_token_id=1, bos_token_id=0, eos_token_id=2,
        decoder_start_token_id=2, forced_eos_token_id=None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    g = torch.Generator().manual_seed(64)
    mask = (torch.arange(16)[None] < torch.tensor([16, 10, 13, 8])[:, None]).long()
    target = torch.randint(5, 110, (4, 16), generator=g)
    noisy = target.masked_fill(torch.rand(target.shape, generator=g) < 0.25, 4)
    batch = dict(input_ids=noisy.masked_fill(mask == 0, 1), attention_mask=mask, labels=target.masked_fill(mask == 0, -100))

    def loss_fn(model, batch):
        return model(**batch, use_cache=False).loss

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
