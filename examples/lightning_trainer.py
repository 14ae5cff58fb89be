"""Lightning's Trainer, protected: one bad batch, a schedule, mixed precision; and what the guard says about it."""

import lightning.pytorch as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nanproof


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x).float(), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


torch.manual_seed(0)
x = torch.randn(60 * 32, 16)
y = x @ torch.randn(16, 1)
x[30 * 32 + 5, 3] = float("inf")  # sample 5 of batch 30

trainer = L.Trainer(
    max_epochs=1,
    accelerator="cpu",
    precision="bf16-mixed",
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
guard = nanproof.protect(trainer, run_dir="run")
model = Regressor()
trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=32))

print(guard.path)
for incident in guard.incidents:
    print(incident)
    print(incident.diagnosis)
print(f"loss {guard.history[0].loss:.3f} -> {guard.history[-1].loss:.3f}; records in run/steps.jsonl")
assert [(i.step, i.diagnosis.samples) for i in guard.incidents] == [(30, (5,))]
assert all(torch.isfinite(p).all() for p in model.parameters())
