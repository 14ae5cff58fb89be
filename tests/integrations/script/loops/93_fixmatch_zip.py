# again: yes
# step: 5
# kind: nonfinite-loss
# cause: zero-denominator, no-supervised-targets
# line: Lu = (F.cross_entropy(logits_u_s, targets_u, reduction="none") * mask).sum() / mask.sum()
# source: FixMatch, labelled and unlabelled loaders zipped
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
threshold = 0.6

model = nn.Linear(4, 3)
with torch.no_grad():
    model.weight.copy_(torch.tensor([[2.0, 0, 0, 0], [0, 2.0, 0, 0], [0, 0, 2.0, 0]]))
    model.bias.zero_()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
labeled = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(8)]
unlabeled = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(8)]
if BAD:
    unlabeled[5][0].mul_(0.01)
for batch_idx, ((inputs_x, targets_x), (inputs_u_w, inputs_u_s)) in enumerate(zip(labeled, unlabeled)):
    batch_size = inputs_x.shape[0]
    inputs = torch.cat((inputs_x, inputs_u_w, inputs_u_s))
    logits = model(inputs)
    logits_x = logits[:batch_size]
    logits_u_w, logits_u_s = logits[batch_size:].chunk(2)
    del logits

    Lx = F.cross_entropy(logits_x, targets_x, reduction="mean")
    pseudo_label = torch.softmax(logits_u_w.detach(), dim=-1)
    max_probs, targets_u = torch.max(pseudo_label, dim=-1)
    mask = max_probs.ge(threshold).float()
    Lu = (F.cross_entropy(logits_u_s, targets_u, reduction="none") * mask).sum() / mask.sum()
    loss = Lx + 1.0 * Lu
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
