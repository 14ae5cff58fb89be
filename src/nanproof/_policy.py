"""Policy: what the guard does when. Frozen, keyword-only, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nanproof._errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What to do with a bad step, a spike, and too many of either. The defaults suit an ordinary run."""

    max_consecutive_skips: int = 10
    """Refused steps in a row that are tolerated; one more is the cap."""

    max_skip_rate: float = 0.2
    """Share of the last `skip_window` steps that may be refused; above it is the cap."""

    skip_window: int = 100
    """Steps over which `max_skip_rate` is counted."""

    at_cap: Literal["rollback", "halt"] = "rollback"
    """At the cap, and as soon as weights or optimizer state are found non-finite: go back to a good state, or raise
    `TrainingHalted`. Going back takes `snapshot_every` or checkpoints; without either, the cap halts."""

    on_divergence: Literal["rollback", "record"] = "rollback"
    """When the loss grows without end: go back to a good state if there is one, or only record it."""

    max_rollbacks: int = 3
    """How often trouble may send the run back, each time to an older state, until 200 steps have passed without any; once more
    halts it. 0 never goes back."""

    rollback_margin: int = 2
    """Batches before and after the offending ones that are stepped over too. Needs a loader from `guard.wrap`."""

    rewarm_steps: int = 0
    """Steps after going back over which the learning rate climbs from near 0 to its schedule."""

    snapshot_every: int = 0
    """Steps from one copy of the run's state in memory to the next; 0 keeps none. Two good ones are kept."""

    snapshot_to: Literal["host", "device"] = "host"
    """Where those copies lie. On the device they are fastest and take its memory."""

    salvage: bool = False
    """Of a refused step, train on what is good: the other micro-batches, or the batch without the bad samples."""

    on_spike: Literal["clip", "skip", "record"] = "clip"
    """A finite loss or gradient norm far above what is usual: clip it to `max_norm`, refuse the step, or only record it.
    With `max_norm=None` nothing is ever clipped, so "clip" then records."""

    spike_sensitivity: float = 18.0
    """How many deviations above the running mean make a spike. Smaller fires more often; healthy runs reach 16 now and then."""

    warmup_steps: int = 20
    """Accepted steps before a spike is judged at all, and before `max_norm="auto"` begins to clip."""

    half_weights: Literal["auto", "restore", "look", "off"] = "auto"
    """Trainable fp16 or bf16 weights after the step. "restore" copies weights and moments first and puts them back
    if the step made any of them non-finite; "look" only reports. "auto" restores, except over bf16 weights under a
    fused optimizer, whose fp32 arithmetic cannot overflow on finite gradients: there it only looks, and saves the copy."""

    copy: Literal["auto"] | bool = "auto"
    """Copy weights and optimizer state before a step that cannot be vetoed (LBFGS, optimizers that step inside backward) or that
    may itself make numbers non-finite, and put them back if it was bad. "auto" does so up to 256 MiB of weights; True always,
    whatever the optimizer is; False never: the first kind is then an error, the second is only looked at."""

    switch_to_fused: bool = True
    """Switch Adam, AdamW, SGD or Adagrad with neither `fused` nor `foreach` set to the fused form, which refuses a step without a
    host read and differs from the others in the last digit. False keeps the form it has."""

    capture: bool = False
    """On CUDA, capture norms, verdict and optimizer as one CUDA graph once the addresses of the gradients repeat, and replay it:
    one launch instead of a dozen. `guard.path` says whether it is in use. Learning rates are then read in fp32."""

    lag: int | None = None
    """Steps between a verdict on the device and its record on the host. None: 0 on CPU, 2 on CUDA."""

    history: int = 1000
    """How many step records `guard.history` keeps in memory; `run_dir` keeps their lines."""

    diagnose: Literal["new", "always", "never"] = "new"
    """Which incidents are diagnosed: those unlike any that was diagnosed before, all, or none. A diagnosis runs the bad step
    again a few times; with "never" silent failures are not looked for either."""

    diagnose_share: float = 0.05
    """Share of the run's time that diagnoses may take together; the first few are always made. Not with diagnose="always"."""

    diagnose_seconds: float = 30.0
    """How long one diagnosis may take; what is known by then is reported."""

    heal: bool = False
    """Apply the fix that was verified on the bad step to the run: the batch is trained on again under it, and it stays while it
    holds. Every refused step is diagnosed then. Needs `train_step` and a single rank; data, labels and loss are never changed."""

    bundles: int = 5
    """Bundles kept in `run_dir/incidents`: what a bad step needs to be run again elsewhere. 0 writes none."""

    bundle_bytes: int = 2 << 30
    """Size of one bundle at the most: optimizer state is left out first, then weights."""

    def __post_init__(self) -> None:
        self._choice("at_cap", ("rollback", "halt"))
        self._choice("on_divergence", ("rollback", "record"))
        self._choice("snapshot_to", ("host", "device"))
        self._choice("on_spike", ("clip", "skip", "record"))
        self._choice("diagnose", ("new", "always", "never"))
        self._choice("half_weights", ("auto", "restore", "look", "off"))
        self._choice("copy", ("auto", True, False))
        for name, least in (
            ("max_consecutive_skips", 0),
            ("skip_window", 1),
            ("warmup_steps", 2),
            ("history", 1),
            ("bundles", 0),
            ("max_rollbacks", 0),
            ("rollback_margin", 0),
            ("rewarm_steps", 0),
            ("snapshot_every", 0),
            ("bundle_bytes", 1),
        ):
            self._whole(name, least)
        if self.lag is not None:
            self._whole("lag", 0)
        if not 0 <= self.max_skip_rate <= 1:
            raise UsageError(f"Policy(max_skip_rate={self.max_skip_rate!r}): a share from 0 to 1 is needed")
        if not 0 <= self.diagnose_share <= 1:
            raise UsageError(f"Policy(diagnose_share={self.diagnose_share!r}): it must be between 0 and 1")
        if not self.spike_sensitivity > 0:
            raise UsageError(f"Policy(spike_sensitivity={self.spike_sensitivity!r}): a number above 0 is needed")
        if not self.diagnose_seconds > 0:
            raise UsageError(f"Policy(diagnose_seconds={self.diagnose_seconds!r}): a number above 0 is needed")
        for name in ("heal", "salvage", "switch_to_fused", "capture"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"Policy({name}={getattr(self, name)!r}): True or False is needed")
        if self.heal and self.diagnose == "never":
            raise UsageError('Policy(heal=True, diagnose="never"): only what was diagnosed can be healed; use "new" or "always"')

    def _choice(self, name: str, allowed: tuple[str | bool, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise UsageError(f"Policy({name}={value!r}): choose one of {', '.join(map(repr, allowed))}")

    def _whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"Policy({name}={value!r}): a whole number of at least {least} is needed")
