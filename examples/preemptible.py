"""A run that a scheduler may stop at any time: it saves at the next step, and the next process goes on from there.

    python examples/preemptible.py                                    # then: kill -TERM its process, and start it again
    torchrun --nproc-per-node 2 --max-restarts 3 examples/preemptible.py   # SIGUSR1 to a worker: all save, and are restarted
    sbatch examples/slurm_requeue.sh                                  # Slurm sends SIGUSR1 two minutes before the time limit

`exit_status` is what your scheduler reads. torchrun restarts its workers if it is not 0; a batch script can requeue the job.
"""

import os
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import nanproof

folder, epochs = (*sys.argv[1:], *("preemptible-run", "3")[len(sys.argv) - 1 :])[:2]
several = int(os.environ.get("WORLD_SIZE", "1")) > 1
if several:
    torch.distributed.init_process_group("gloo")
rank = int(os.environ.get("RANK", "0"))

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
model = torch.nn.parallel.DistributedDataParallel(model) if several else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(512, 8, generator=torch.Generator().manual_seed(rank))
data = TensorDataset(x, x.sum(-1, keepdim=True))

guard = nanproof.Guard(
    model,
    optimizer,
    loss_fn=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    checkpoints=nanproof.Checkpoints(folder, every=100, on_signal=True, exit_status=75),
)
with guard:
    loader = guard.wrap(DataLoader(data, 16, shuffle=True))
    start = guard.resume()
    print(f"rank {rank} starts at step {start}", flush=True)
    for _ in range(loader.epoch, int(epochs)):
        for batch in loader:
            guard.train_step(batch)
print(f"rank {rank} ends after {guard.next_step} steps", flush=True)
