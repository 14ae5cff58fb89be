import torch
import torch.nn as nn
import torch.nn.functional as F


class CRNN(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten())
        self.fc = nn.Linear(16 * 3 * 3, 32)
        self.lstm = nn.LSTM(32, 48, num_layers=2, batch_first=batch_first)
        self.out = nn.Linear(48, 5)

    def forward(self, video):
        b, t = video.shape[:2]
        f = self.fc(self.cnn(video.flatten(0, 1))).view(b, t, -1)
        h, _ = self.lstm(f)
        return self.out(h[:, -1])


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = CRNN(batch_first=fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(30)
    batch = dict(video=torch.randn(6, 8, 1, 12, 12, generator=g), labels=torch.randint(0, 5, (6,), generator=g))

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["video"]), batch["labels"])

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
