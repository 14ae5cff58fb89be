"""DeepSurv on a clinical table with raw columns (age in years, platelets in the hundreds, ratios near 1): at an ordinary rate the first steps throw the hidden units into saturation and the Cox loss stalls at that of a constant risk.

Source: https://github.com/jaredleekatzman/DeepSurv/issues/14 https://github.com/ageron/handson-ml3/pull/20
True cause: features of very different scale
Where: the batch (covariates)
Fix: standardise the columns
"""
import torch
import torch.nn as nn

torch.set_num_threads(1)
SCALE = torch.tensor([15.0, 90.0, 0.3, 40.0, 1.2, 1.0])
MEAN = torch.tensor([62.0, 250.0, 1.1, 130.0, 5.0, 0.5])


class DeepSurv(nn.Module):
    def __init__(self, dims=(6, 32, 32, 1)):
        super().__init__()
        layers = []
        for i, o in zip(dims[:-2], dims[1:-1]):
            layers += [nn.Linear(i, o), nn.SELU()]
        self.net = nn.Sequential(*layers, nn.Linear(dims[-2], dims[-1]))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def negative_partial_likelihood(risk, event):
    # rows are sorted by falling time
    return -((risk - torch.logcumsumexp(risk, 0)) * event).sum() / event.sum()


def build(fixed=False):
    torch.manual_seed(0)
    model = DeepSurv()
    opt = torch.optim.SGD(model.parameters(), lr=5e-3, momentum=0.9, nesterov=True)
    beta = torch.tensor([1.0, -0.8, 1.2, 0.0, 0.5, -0.7])
    batches = []
    for _ in range(100):
        z = torch.randn(64, 6)
        hazard = torch.exp(z @ beta)
        time = -torch.log(torch.rand(64)) / hazard
        event = (torch.rand(64) < 0.8).float()
        order = time.argsort(descending=True)
        x = z if fixed else z * SCALE + MEAN
        batches.append((x[order], event[order]))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: negative_partial_likelihood(m(b[0]), b[1]))
