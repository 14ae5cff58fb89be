import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(WhisperConfig(
        vocab_size=100, num_mel_bins=20, d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_source_positions=40, max_target_positions=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, begin_suppress_tokens=None,
        suppress_tokens=None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    g = torch.Generator().manual_seed(58)
    labels = torch.randint(4, 100, (3, 12), generator=g)
    labels[1, 8:] = -100
    batch = dict(input_features=torch.randn(3, 20, 80, generator=g), labels=labels)

    def loss_fn(model, batch):
        return model(**batch, use_cache=False).loss

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
