# again: no
# stops: exec(compile(program, "<string>", "exec"), {"BAD": "bad" in sys.argv})
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 2
# source: program held in a string, no source for the frame
import sys

program = "\n".join([
    "import torch, torch.nn as nn",
    "torch.manual_seed(0)",
    "net = nn.Linear(4, 1)",
    "opt = torch.optim.SGD(net.parameters(), lr=0.01)",
    "for i in range(8):",
    "    x = torch.randn(8, 4); y = x.sum(1)",
    "    if BAD and i == 5:",
    "        y[2] = float('nan')",
    "    opt.zero_grad()",
    "    out = net(x).squeeze(1)",
    "    loss = ((out - y) ** 2).mean()",
    "    loss.backward()",
    "    opt.step()",
])
exec(compile(program, "<string>", "exec"), {"BAD": "bad" in sys.argv})
