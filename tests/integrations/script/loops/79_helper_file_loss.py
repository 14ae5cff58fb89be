# again: yes
# step: 5
# kind: nonfinite-loss
# cause: zero-denominator
# sample: 4
# line: return 1.0 - 2.0 * inter / total
# source: loss imported from a module next to the script
import sys
import torch
import torch.nn as nn
from _helper_losses import compute_loss

BAD = "bad" in sys.argv
torch.manual_seed(0)

model = nn.Linear(6, 6, bias=False)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(8):
    image = torch.randn(8, 6)
    mask = (torch.rand(8, 6) > 0.5).float()
    mask[:, 0] = 1.0
    if BAD and step == 5:
        image[4] = 0.0
        mask[4] = 0.0
    pred = model(image)
    loss, parts = compute_loss(pred, mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
