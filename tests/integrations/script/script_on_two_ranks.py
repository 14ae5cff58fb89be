"""Two ranks in DistributedDataParallel or fully_shard, with loaders that have a worker: `two_ranks.py KIND OUT BAD_ROW`, under
torchrun. The model computes its loss itself."""

import math
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        if i == int(sys.argv[3]):
            x[0] = math.nan
        return x, x.nan_to_num().sum(0, keepdim=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 1)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.head(self.body(x)), y)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Model()
    if sys.argv[1] == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model.body, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for x, y in DataLoader(Rows(), batch_size=4, num_workers=1, sampler=list(range(rank, 64, 2))):
        optimizer.zero_grad()
        model(x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    whole = {name: p.full_tensor() if sys.argv[1] == "shard" else p for name, p in model.state_dict().items()}
    torch.save(whole, f"{sys.argv[2]}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
