# again: yes
# step: 5
# kind: nonfinite-loss
# cause: log-of-zero, outlier-batch
# sample: 7
# line: loss = -torch.log(torch.softmax(output, dim=1)).gather(1, target.unsqueeze(1)).mean()
# source: MNIST example with argparse
import argparse
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 3, bias=False)
        with torch.no_grad():
            self.fc1.weight.copy_(torch.tensor([[0.4] * 4, [0.1] * 4, [-0.4] * 4]))

    def forward(self, x):
        return self.fc1(x)


def train(args, model, device, loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = -torch.log(torch.softmax(output, dim=1)).gather(1, target.unsqueeze(1)).mean()
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            done = batch_idx * len(data)
            if args.dry_run:
                break


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--log-interval", type=int, default=3)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args([])
    torch.manual_seed(0)
    loader = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(8)]
    if BAD:
        loader[5][0][7] = 100.0
        loader[5][1][7] = 2
    model = Net()
    train(args, model, "cpu", loader, torch.optim.SGD(model.parameters(), lr=args.lr), 1)


if __name__ == "__main__":
    main()
