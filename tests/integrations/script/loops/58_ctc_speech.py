# again: yes
# step: 5
# kind: nonfinite-loss
# cause: ctc-infeasible
# sample: 1
# line: loss = criterion(output, labels, input_lengths, label_lengths)
# source: speech recognition with CTC
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)


class Acoustic(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 8, batch_first=True)
        self.fc = nn.Linear(8, 6)

    def forward(self, x):
        return self.fc(self.gru(x)[0])


model = Acoustic()
criterion = nn.CTCLoss(blank=0, reduction="sum")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch_idx in range(8):
    spectrograms = torch.randn(8, 10, 3)
    labels = torch.randint(1, 6, (8, 4))
    input_lengths = [10] * 8
    label_lengths = [4] * 8
    if BAD and batch_idx == 5:
        input_lengths[1] = 2
    optimizer.zero_grad()
    output = model(spectrograms)
    output = F.log_softmax(output, dim=2)
    output = output.transpose(0, 1)
    loss = criterion(output, labels, input_lengths, label_lengths)
    loss.backward()
    optimizer.step()
