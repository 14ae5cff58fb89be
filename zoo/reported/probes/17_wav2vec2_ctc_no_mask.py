import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    cfg = Wav2Vec2Config(vocab_size=20, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
                         intermediate_size=96, feat_extract_norm="layer", conv_dim=(24, 24, 24), conv_stride=(5, 4, 2),
                         conv_kernel=(10, 8, 4), conv_bias=True, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
                         do_stable_layer_norm=True, apply_spec_augment=False, mask_time_prob=0.0, layerdrop=0.0,
                         ctc_loss_reduction="mean", pad_token_id=0)
    model = Wav2Vec2ForCTC(cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    g = torch.Generator().manual_seed(17)
    lengths = torch.tensor([2400, 1300, 1800])
    mask = (torch.arange(2400)[None] < lengths[:, None]).long()
    wav = torch.randn(3, 2400, generator=g) * mask
    labels = torch.randint(1, 20, (3, 9), generator=g)
    labels[1, 5:] = -100
    labels[2, 7:] = -100
    batch = {"input_values": wav, "attention_mask": mask, "labels": labels}

    def loss_fn(model, batch):
        if fixed:
            return model(input_values=batch["input_values"], attention_mask=batch["attention_mask"],
                         labels=batch["labels"]).loss
        return model(batch["input_values"], labels=batch["labels"]).loss

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
