"""A raw loop over Hugging Face Accelerate, guarded by one line: accumulation, clipping, a schedule, and one bad batch."""

import torch
from accelerate import Accelerator
from torch import nn

import nanproof


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def forward(self, x, labels):
        out = self.layers(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(out, labels), "out": out}


torch.manual_seed(0)
x, weights = torch.randn(2400, 16), torch.randn(16)
labels = x @ weights
x[1234, 3] = float("nan")
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, labels), batch_size=20)

accelerator = Accelerator(gradient_accumulation_steps=2)
model = Regressor()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
guard = nanproof.protect(accelerator, run_dir="run")  # the one line
print(guard.path)

for batch, target in loader:
    with accelerator.accumulate(model):
        loss = model(batch, labels=target)["loss"]
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
accelerator.end_training()

for incident in guard.incidents:
    print(incident)
    print(incident.diagnosis)
print(f"loss {guard.history[0].loss:.3f} -> {guard.history[-1].loss:.3f}; records in run/steps.jsonl")
assert [(i.step, i.micro_batch, i.diagnosis.samples) for i in guard.incidents] == [(30, 1, (14,))]
