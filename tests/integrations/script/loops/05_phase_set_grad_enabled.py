# again: yes
# step: 5
# kind: nonfinite-loss
# cause: log-of-zero, outlier-batch
# sample: 2
# line: loss = -(labels * torch.log(probs) + (1 - labels) * torch.log(1 - probs)).mean()
# source: transfer learning tutorial with train and val phases
import copy
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)


def make(n):
    out = []
    for _ in range(n):
        x = torch.randn(8, 3)
        out.append((x, (x[:, 0] > 0).float()))
    return out


dataloaders = {"train": make(4), "val": make(2)}


def train_model(model, optimizer, num_epochs=2):
    best_wts = copy.deepcopy(model.state_dict())
    best = 1e9
    for epoch in range(num_epochs):
        for phase in ["train", "val"]:
            if phase == "train":
                model.train()
            else:
                model.eval()
            running = 0.0
            for i, (inputs, labels) in enumerate(dataloaders[phase]):
                if BAD and phase == "train" and epoch == 1 and i == 1:
                    inputs, labels = inputs.clone(), labels.clone()
                    inputs[2] = 400.0
                    labels[2] = 0.0
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    outputs = model(inputs)
                    probs = torch.sigmoid(outputs.squeeze(1))
                    loss = -(labels * torch.log(probs) + (1 - labels) * torch.log(1 - probs)).mean()
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                running += loss.item() * inputs.size(0)
            if phase == "val" and running < best:
                best = running
                best_wts = copy.deepcopy(model.state_dict())
    model.load_state_dict(best_wts)
    return model


net = nn.Linear(3, 1)
with torch.no_grad():
    net.weight.fill_(0.5)
train_model(net, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9))
