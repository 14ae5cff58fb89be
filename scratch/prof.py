import cProfile
import io
import pstats
import sys
import time

import torch

from model import Llama
from observe import VARIANTS, autocast_loss, llama, observed
import nanproof

torch.backends.cuda.matmul.allow_tf32 = True
V = dict(list(VARIANTS.items())[:4])
V["every=1, default sites"] = observed(nanproof.Observe(every=1))
V["outputs only, full"] = observed(nanproof.Observe(modules="*", every=1, gradients=False, weights=False, attention=False))
V["+gradients"] = observed(nanproof.Observe(modules="*", every=1, gradients=True, weights=False, attention=False))
V["+weights"] = observed(nanproof.Observe(modules="*", every=1, gradients=False, weights=True, attention=False))
V["+attention"] = observed(nanproof.Observe(modules="*", every=1, gradients=False, weights=False, attention=True))


def tiny():
    torch.manual_seed(0)
    return Llama(hidden=64, layers=16, heads=4, kv_heads=4, intermediate=128, vocab=1000, length=16).cuda()


small = torch.randint(0, 1000, (1, 16), device="cuda")
big = torch.randint(0, 32000, (8, 1024), device="cuda")
for size, build, batch, n in (("host only", tiny, small, 20), ("big", lambda: llama("cuda")[0], big, 4)):
    opened = {}
    for name, v in V.items():
        if size == "big" and name[0] == "+":
            continue
        m = v(build(), autocast_loss)
        opened[name] = (m, m.__enter__())
    times = {name: [] for name in opened}
    for r in range(10):
        for name, (m, step) in opened.items():
            torch.cuda.synchronize()
            s = time.perf_counter()
            for _ in range(n):
                step(batch)
            torch.cuda.synchronize()
            if r:
                times[name].append((time.perf_counter() - s) / n * 1e3)
    for name, t in times.items():
        t.sort()
        print(f"{size:10s} {name:28s} median {t[len(t)//2]:7.2f} min {t[0]:7.2f} ms")
    from torch.profiler import ProfilerActivity, profile

    for name, (m, step) in opened.items():
        if size == "big":
            with profile(activities=[ProfilerActivity.CUDA]) as prof:
                for _ in range(3):
                    step(batch)
                torch.cuda.synchronize()
            ev = prof.key_averages()
            print("  GPU busy ms a step", name, round(sum(e.self_device_time_total for e in ev) / 3e3, 2),
                  [(e.key[:30], e.count, round(e.self_device_time_total / 3e3, 3)) for e in ev if e.key.startswith(("_look", "_gather"))])
    for m, _ in opened.values():
        m.__exit__(None, None, None)
    del opened, step
