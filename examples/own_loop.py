"""A loop of one's own, guarded: accumulation, mixed precision with a GradScaler, a schedule, and one bad batch."""

import torch
from torch import nn

import nanproof

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
scaler = torch.amp.GradScaler(device)
guard = nanproof.Guard(model, optimizer, scaler=scaler, run_dir="run")
print(guard.path)

weights = torch.randn(16, 1, device=device)
for step in range(60):
    optimizer.zero_grad()
    for micro in range(2):
        x = torch.randn(32, 16, device=device)
        if (step, micro) == (30, 1):
            x[5, 3] = float("inf")
        with torch.autocast(device, dtype=torch.float16):
            out = model(x)
        loss = nn.functional.mse_loss(out.float(), x @ weights) / 2
        guard.backward(loss)
    guard.step()
    scheduler.step()
guard.close()

for incident in guard.incidents:
    print(incident)
print(f"loss {guard.history[0].loss:.3f} -> {guard.history[-1].loss:.3f}; records in run/steps.jsonl")
assert [(i.step, i.micro_batch) for i in guard.incidents] == [(30, 1)]
