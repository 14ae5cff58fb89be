# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 1
# source: language model training with an inner loop over micro-batches
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
accum = 3

model = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def micro_batches(step):
    for k in range(accum):
        x, y = torch.randn(4, 5), torch.randn(4, 2)
        if BAD and step == 5 and k == 0:
            x[1, 0] = float("nan")
        yield x, y


for step in range(7):
    train_iter = micro_batches(step)
    loss_accum = torch.zeros(())
    for micro in range(accum):
        x, y = next(train_iter)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
            loss = F.mse_loss(out.float(), y)
        loss_accum += loss.detach() / accum
        (loss / accum).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
