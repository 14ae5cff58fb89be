import torch
import torch.nn as nn
import torch.nn.functional as F


class Seq2Seq(nn.Module):
    def __init__(self, vocab=80, d=48, causal=True):
        super().__init__()
        self.src, self.tgt = nn.Embedding(vocab, d), nn.Embedding(vocab, d)
        self.pos = nn.Parameter(torch.randn(64, d) * 0.02)
        enc = nn.TransformerEncoderLayer(d, 4, 96, dropout=0.1, batch_first=True)
        dec = nn.TransformerDecoderLayer(d, 4, 96, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(enc, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(dec, 2)
        self.out = nn.Linear(d, vocab)
        self.causal = causal

    def forward(self, input_ids, decoder_input_ids):
        memory = self.encoder(self.src(input_ids) + self.pos[: input_ids.size(1)])
        t = decoder_input_ids.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(t) if self.causal else None
        y = self.decoder(self.tgt(decoder_input_ids) + self.pos[:t], memory, tgt_mask=mask)
        return self.out(y)


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = Seq2Seq(causal=fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(6)
    src = torch.randint(2, 80, (4, 14), generator=g)
    tgt = torch.randint(2, 80, (4, 17), generator=g)
    tgt[:, 0] = 1
    batch = dict(input_ids=src, decoder_input_ids=tgt[:, :-1].clone(), labels=tgt[:, 1:].clone())

    def loss_fn(model, batch):
        logits = model(batch["input_ids"], batch["decoder_input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
