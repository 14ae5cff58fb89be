# again: yes
# step: 8
# iteration: 4
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 2
# source: backbone and head with an optimizer each
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)

backbone = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
classifier = nn.Linear(8, 4)
optimizer_b = torch.optim.SGD(backbone.parameters(), lr=0.01)
optimizer_c = torch.optim.Adam(classifier.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()

for it in range(6):
    img = torch.randn(8, 6)
    lab = torch.randint(0, 4, (8,))
    if BAD and it == 4:
        img[2, 5] = float("nan")
    feat = backbone(img)
    score = classifier(feat)
    loss = criterion(score, lab)
    optimizer_b.zero_grad()
    optimizer_c.zero_grad()
    loss.backward()
    if it % 2 == 0:
        nn.utils.clip_grad_value_(classifier.parameters(), 1.0)
    optimizer_b.step()
    optimizer_c.step()
