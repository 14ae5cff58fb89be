"""Two ranks in DistributedDataParallel, with loaders that have a worker: `two_ranks.py OUT BAD_ROW`, under torchrun."""

import math
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        if i == int(sys.argv[2]):
            x[0] = math.nan
        return x, x.nan_to_num().sum(0, keepdim=True)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for x, y in DataLoader(Rows(), batch_size=4, num_workers=1, sampler=list(range(rank, 64, 2))):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    torch.save(model.module.state_dict(), f"{sys.argv[1]}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
