# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 4
# source: accelerator.backward(loss) from a small launcher class
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)


class Accelerator:
    def __init__(self, gradient_accumulation_steps=1):
        self.gradient_accumulation_steps = gradient_accumulation_steps

    def prepare(self, *objects):
        return objects

    def backward(self, loss, **kwargs):
        loss = loss / self.gradient_accumulation_steps
        loss.backward(**kwargs)


def main():
    accelerator = Accelerator()
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(8):
        source, targets = torch.randn(8, 4), torch.softmax(torch.randn(8, 3), 1)
        if BAD and step == 5:
            source[4, 1] = float("nan")
        optimizer.zero_grad()
        output = model(source)
        loss = F.cross_entropy(output, targets)
        accelerator.backward(loss)
        optimizer.step()


main()
