# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 2
# source: trainer class whose method holds the loop
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv


class Trainer:
    def __init__(self, model, criterion, optimizer, data_loader, device="cpu"):
        self.model = model
        self.criterion = criterion
        self.optimizer = optimizer
        self.data_loader = data_loader
        self.device = device
        self.history = []

    def _train_epoch(self, epoch):
        self.model.train()
        total = 0.0
        for batch_idx, (data, target) in enumerate(self.data_loader):
            data, target = data.to(self.device), target.to(self.device)

            self.optimizer.zero_grad()
            output = self.model(data)
            loss = self.criterion(output, target)
            loss.backward()
            self.optimizer.step()

            total += loss.item()
            self.history.append(loss.item())
        return {"loss": total / len(self.data_loader)}

    def train(self, epochs):
        for epoch in range(epochs):
            log = self._train_epoch(epoch)
            log.update(epoch=epoch)


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = [(torch.randn(8, 5), torch.randn(8, 2)) for _ in range(8)]
    if BAD:
        loader[5][0][2, 0] = float("nan")
    net = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 2))
    Trainer(net, nn.L1Loss(), torch.optim.Adam(net.parameters()), loader).train(1)
