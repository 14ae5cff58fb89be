# again: no
# stops: if decoder_input.item() == EOS:
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# source: translation tutorial, one sentence at a time, stops at EOS
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
SOS, EOS, V = 0, 1, 9


class DecoderRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, 6)
        self.gru = nn.GRUCell(6, 6)
        self.out = nn.Linear(6, V)

    def forward(self, token, hidden):
        hidden = self.gru(self.emb(token), hidden)
        return self.out(hidden), hidden


encoder = nn.Linear(3, 6)
decoder = DecoderRNN()
optimizer = torch.optim.SGD(list(encoder.parameters()) + list(decoder.parameters()), lr=0.01)
criterion = nn.CrossEntropyLoss()
for it in range(8):
    source = torch.randn(1, 3)
    target = torch.randint(2, V, (4, 1))
    if BAD and it == 5:
        source[0, 1] = float("nan")
    optimizer.zero_grad()
    hidden = torch.tanh(encoder(source))
    decoder_input = torch.tensor([SOS])
    loss = 0
    for di in range(target.size(0)):
        output, hidden = decoder(decoder_input, hidden)
        topv, topi = output.topk(1)
        decoder_input = topi.view(-1).detach()
        loss = loss + criterion(output, target[di])
        if decoder_input.item() == EOS:
            break
    loss.backward()
    optimizer.step()
