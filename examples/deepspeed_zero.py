"""DeepSpeed ZeRO 1 in bf16, guarded by one line. DeepSpeed's own overflow check is switched off for once.

    torchrun --nproc-per-node 2 examples/deepspeed_zero.py

or `python examples/deepspeed_zero.py` for a single rank.
"""

import os
import socket
import sys

import torch
from torch import nn

import nanproof

try:
    import deepspeed
    import deepspeed.ops
except ImportError:
    print("deepspeed is not installed: pip install deepspeed")
    raise SystemExit(0) from None

if "RANK" not in os.environ:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
# Without a GPU DeepSpeed would first compile a kernel for talking through shared memory, which takes half a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, x, labels):
        return nn.functional.mse_loss(self.layers(x).squeeze(-1), labels)


torch.manual_seed(0)
model = Regressor()
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
    config={
        "train_micro_batch_size_per_gpu": 32,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    },
)
guard = nanproof.protect(engine, run_dir="run")  # the one line

rank, weights = engine.global_rank, torch.randn(16)
torch.manual_seed(1 + rank)
for step in range(60):
    x = torch.randn(32, 16)
    if step == 30 and rank == engine.world_size - 1:
        x[5, 3] = float("inf")
    x, labels = x.to(engine.device, torch.bfloat16), (x @ weights).to(engine.device, torch.bfloat16)
    engine.backward(engine(x, labels))
    engine.step()
guard.close()

if rank == 0:
    print(guard.path)
    for incident in guard.incidents:
        print(incident)
        print(incident.diagnosis)
    print(f"loss {guard.history[0].loss:.3f} -> {guard.history[-1].loss:.3f}; records in run/steps.jsonl")
assert [i.step for i in guard.incidents] == [30]
assert all(p.isfinite().all() for p in model.parameters())
torch.distributed.barrier()
sys.stdout.flush()
os._exit(0)  # taking gloo down can abort
