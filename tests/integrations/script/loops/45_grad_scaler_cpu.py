# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch, loss-scale-collapse
# sample: 1
# source: mixed precision recipe with scaler.scale(loss).backward()
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
device, amp_dtype = "cpu", torch.bfloat16

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device, enabled=True, init_scale=256.0)
loss_fn = nn.MSELoss()

for step in range(8):
    inputs = torch.randn(8, 6)
    targets = inputs.sum(1, keepdim=True)
    if BAD and step == 5:
        targets[1] = float("nan")
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device_type=device, dtype=amp_dtype):
        outputs = model(inputs)
        loss = loss_fn(outputs.float(), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
