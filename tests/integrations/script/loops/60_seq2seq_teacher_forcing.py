# again: yes
# step: 6
# iteration: 3
# kind: nonfinite-loss
# cause: no-supervised-targets
# line: loss += criterion(output, trg[:, t])
# source: seq2seq with a coin per time step, encoder and decoder in the loop
import random
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
random.seed(0)
torch.manual_seed(0)
PAD, V = 0, 12


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, 6)
        self.rnn = nn.GRU(6, 8, batch_first=True)

    def forward(self, src):
        return self.rnn(self.emb(src))[1][0]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, 6)
        self.cell = nn.GRUCell(6, 8)
        self.out = nn.Linear(8, V)

    def forward(self, token, hidden):
        hidden = self.cell(self.emb(token), hidden)
        return self.out(hidden), hidden


def train_batch(src, trg, encoder, decoder, enc_opt, dec_opt, criterion, ratio=0.5):
    enc_opt.zero_grad()
    dec_opt.zero_grad()
    loss = 0
    hidden = encoder(src)
    token = trg[:, 0]
    for t in range(1, trg.size(1)):
        output, hidden = decoder(token, hidden)
        loss += criterion(output, trg[:, t])
        teacher_force = random.random() < ratio
        top1 = output.argmax(1)
        token = trg[:, t] if teacher_force else top1
    loss = loss / (trg.size(1) - 1)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
    enc_opt.step()
    dec_opt.step()
    return loss.item()


encoder, decoder = Encoder(), Decoder()
enc_opt = torch.optim.SGD(encoder.parameters(), lr=0.05)
dec_opt = torch.optim.SGD(decoder.parameters(), lr=0.05)
criterion = nn.CrossEntropyLoss(ignore_index=PAD)
for it in range(5):
    src = torch.randint(1, V, (8, 5))
    trg = torch.randint(1, V, (8, 5))
    if BAD and it == 3:
        trg[:, 4] = PAD
    train_batch(src, trg, encoder, decoder, enc_opt, dec_opt, criterion)
