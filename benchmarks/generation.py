"""What the finite-logits processor costs a generated token: prints a table, and with `--save` writes results/generation.json.

python -m benchmarks.generation --save         # on CUDA: about 90 seconds
python -m benchmarks.generation --size tiny    # to try it, on anything

A Llama in bf16 samples with `generate` of transformers. Within one generation the variants take turns of a few tokens, in
shuffled order. A token of a small model is all host time, and hosts are disturbed: the figure is the tenth percentile of a
token's time with the processor over that without, with a bootstrap interval over rounds of turns; the medians are kept beside it.
Every variant must draw the same tokens. The model has no EOS, so that nothing ends early: what `generate` itself does for EOS
would only make the ratio smaller.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.variants import synchronize
from nanproof.core.support._environment import device_name
from nanproof.numerics.generation import NumericalStabilityLogitsProcessor
from tools.results import save

EOS = 2
TURN = 9
"""Tokens of a turn; the first is not counted."""
BODIES = {
    "50m": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 14, "num_attention_heads": 8},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2},
}


@dataclass(frozen=True)
class Setting:
    """One model and batch."""

    body: str
    vocabulary: int
    batch: int
    prompt: int
    tokens: int


SIZES = {
    "50m": [Setting("50m", vocabulary, batch, 32, 24 * TURN) for vocabulary in (32_000, 152_000) for batch in (8, 64)],
    "tiny": [Setting("tiny", 500, 4, 8, 8 * TURN)],
}


def make(setting: Setting, device: torch.device) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**BODIES[setting.body], vocab_size=setting.vocabulary, tie_word_embeddings=True, bos_token_id=1)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def variants(model: LlamaForCausalLM) -> dict[str, list[Any]]:
    """The logits processors. The first is what the others are compared with."""
    return {
        "none": [],
        "raise": [NumericalStabilityLogitsProcessor(eos_token_id=EOS, model=model)],
        "end": [NumericalStabilityLogitsProcessor(on_bad="end", eos_token_id=EOS, model=model)],
    }


def undisturbed(rounds: list[dict[str, list[float]]], name: str) -> float:
    """The tenth percentile of a token's time."""
    return statistics.quantiles((took for one in rounds for took in one[name]), n=10)[0]


def ratio(rounds: list[dict[str, list[float]]], name: str) -> float:
    """Of an undisturbed token with it to one without."""
    return undisturbed(rounds, name) / undisturbed(rounds, "none")


def interval(rounds: list[dict[str, list[float]]], name: str, draws: int = 1000) -> tuple[float, float]:
    """95 % of the ratios of resampled rounds."""
    generator = random.Random(0)
    found = sorted(ratio(generator.choices(rounds, k=len(rounds)), name) for _ in range(draws))
    return found[int(0.025 * draws)], found[int(0.975 * draws)]


class Turns:
    """Stands in for the variants, which take turns of a few tokens within one generation: the machine is never the same for long,
    so what is compared lies next to each other. The time from one call to the next is the token's: `generate` waits for the
    device at each."""

    def __init__(self, made: dict[str, list[Any]], order: list[str]) -> None:
        self.made, self.order = made, order
        self.times: list[tuple[int, str, float]] = []
        """Turn, variant and seconds of each token, but for the first of a turn, which a processor takes for a new generation."""
        self._calls, self._last = 0, 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        now = time.perf_counter()
        before, self._calls = self._calls, self._calls + 1
        if before > 1 and (before - 1) % TURN:
            turn = (before - 1) // TURN
            self.times.append((turn, self.order[turn], now - self._last))
        self._last = now
        for processor in self.made[self.order[before // TURN]]:
            scores = processor(input_ids, scores)
        return scores


def measure(setting: Setting, device: torch.device, seconds: float) -> dict[str, Any]:
    model = make(setting, device)
    ids = torch.randint(3, setting.vocabulary, (setting.batch, setting.prompt), device=device)
    mask = torch.ones_like(ids)
    made = variants(model)

    def generate(processors: list[Any], tokens: int) -> Tensor:
        torch.manual_seed(0)
        out: Tensor = model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=tokens, logits_processor=processors
        )
        synchronize(device.type)
        return out

    for _ in range(2):  # the first time kernels are chosen, and may be others
        first = {name: generate(processors, 4 * TURN) for name, processors in made.items()}
    for name in ("raise", "end"):
        assert torch.equal(first[name], first["none"]), f"{name} draws other tokens"
    rounds: list[dict[str, list[float]]] = []
    shuffled = random.Random(0)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rounds) < 4:
        order = [name for _ in range(setting.tokens // TURN // len(made)) for name in shuffled.sample(list(made), len(made))]
        turns = Turns(made, order)
        generate([turns], TURN * len(order))
        for turn, name, took in turns.times:
            if turn % len(made) == 0 and (not rounds or rounds[-1].get("turn") != [turn]):
                rounds.append({"turn": [turn]})
            rounds[-1].setdefault(name, []).append(took)
    rounds = [{name: one[name] for name in made} for one in rounds if all(name in one for name in made)]
    rows = {}
    for name in made:
        values = [took for one in rounds for took in one[name]]
        low, high = interval(rounds, name)
        rows[name] = {
            "ms": 1e3 * undisturbed(rounds, name),
            "median_ms": 1e3 * statistics.median(values),
            "ratio": ratio(rounds, name),
            "low": low,
            "high": high,
        }
    for processors in made.values():
        for processor in processors:
            if isinstance(processor, NumericalStabilityLogitsProcessor):
                processor.check()
                assert not processor.read()
                processor.close()
    parameters = sum(p.numel() for p in model.parameters())
    found = {**asdict(setting), "parameters": parameters, "rounds": len(rounds), "turn": TURN, "rows": rows}
    found["alone"] = alone(setting, device)
    show(found)
    return found


def alone(setting: Setting, device: torch.device, calls: int = 200) -> dict[str, float]:
    """Microseconds of one call of the processor by itself: until the host can go on, and until the device is done."""
    processor = NumericalStabilityLogitsProcessor(eos_token_id=EOS)
    scores = torch.randn(setting.batch, setting.vocabulary, device=device)
    ids = torch.ones(setting.batch, setting.prompt + 2 * calls, dtype=torch.long, device=device)

    def run(begin: int) -> tuple[float, float]:
        synchronize(device.type)
        begun = time.perf_counter()
        for step in range(begin, begin + calls):
            processor(ids[:, : setting.prompt + step], scores)
        host = time.perf_counter() - begun
        synchronize(device.type)
        return 1e6 * host / calls, 1e6 * (time.perf_counter() - begun) / calls

    run(0)
    host, whole = run(calls)
    return {"host_us": host, "whole_us": whole}


def show(found: dict[str, Any]) -> None:
    print(
        f"Llama of {found['parameters'] / 1e6:.0f} M in bf16, vocabulary {found['vocabulary']}, batch {found['batch']}, "
        f"{found['rounds']} rounds of {found['turn'] - 1} tokens; one call alone: {found['alone']['host_us']:.0f} us of the "
        f"host, {found['alone']['whole_us']:.0f} us until done"
    )
    for name, row in found["rows"].items():
        times = f"{row['ms']:8.3f} ms a token (median {row['median_ms']:.3f})"
        print(f"  {name:26s} {times}   {row['ratio']:.4f}   (95 %: {row['low']:.4f} to {row['high']:.4f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[*SIZES], default="50m")
    parser.add_argument("--seconds", type=float, default=None, help="for each setting; 18 by default, 1 for tiny")
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seconds = asked.seconds if asked.seconds is not None else 1.0 if asked.size == "tiny" else 18.0
    transformers.logging.set_verbosity_error()
    with contextlib.suppress(OSError):
        os.nice(-20)  # where that is allowed
    settings = [measure(setting, device, seconds) for setting in SIZES[asked.size]]
    if asked.save:
        results = {"transformers": transformers.__version__, "dtype": "bfloat16", "settings": settings}
        print(f"written to {save('generation', device_name(device), results).name}")


if __name__ == "__main__":
    main()
