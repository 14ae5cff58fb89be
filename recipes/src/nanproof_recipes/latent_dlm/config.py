"""Everything about a run of latent-dlm that can be set, read from YAML. A key that nothing reads is an error: a setting that was
misspelt is a setting that was not made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from nanproof import UsageError
from nanproof_recipes.latent_dlm.values import Limit, nearest, read_change, read_yaml, seen, typed, yaml
from nanproof_recipes.library import printable

SIZES = ("tiny", "base")
"""The sizes that ship, each a file in configs/."""

LARGEST = 1_000_000
"""Bytes of a file of settings; a larger one is something else."""

Count = Annotated[int, Limit("a whole number of 1 or more", lambda v: v >= 1)]
Whole = Annotated[int, Limit("a whole number of 0 or more", lambda v: v >= 0)]
Seed = Annotated[int, Limit("a whole number from 0 to 2**63 - 1", lambda v: 0 <= v < 2**63)]
Above = Annotated[float, Limit("a number above 0", lambda v: v > 0)]
Least = Annotated[float, Limit("a number of 0 or more", lambda v: v >= 0)]
Part = Annotated[float, Limit("a number above 0 and below 1", lambda v: 0 < v < 1)]
Share = Annotated[float, Limit("a number from 0 to 1", lambda v: 0 <= v <= 1)]
Decay = Annotated[float, Limit("a number from 0 to below 1", lambda v: 0 <= v < 1)]
Clip = Annotated[float | None, Limit("a number of 0 or more, or null", lambda v: v >= 0)]


class Section:
    """What the parts of a configuration share: each checks its own values, however it was made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        name = type(self).__name__.lower()
        for key, kind in hints(type(self)).items():
            object.__setattr__(self, key, typed(f"{name}.{key}", kind, getattr(self, key)))
        self.check()

    def check(self) -> None:
        """What no value shows alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model(Section):
    """The MMDiT: two streams, joint attention."""

    layers: Count
    """Blocks, each with both streams."""
    width: Count
    """Channels of each stream."""
    heads: Count
    """Heads of the joint attention; they divide the width."""
    mlp_ratio: Above = 4.0
    """Hidden channels of a block's MLP, as a multiple of the width."""
    text_length: Count
    """Tokens of a window of text."""
    latent_length: Count
    """Latents of a window: it is cut into so many stretches."""
    latent_width: Count
    """Channels of one latent."""

    def check(self) -> None:
        if self.width % self.heads:
            raise UsageError(f"model.heads={self.heads}: heads must divide model.width={self.width}")
        if self.width // self.heads % 2:
            raise UsageError(
                f"model.heads={self.heads}: a head of model.width={self.width} is {self.width // self.heads} wide, and positions "
                "turn pairs of numbers. Make that even"
            )
        if self.width * self.mlp_ratio < 1:
            raise UsageError(f"model.mlp_ratio={self.mlp_ratio}: leaves no hidden channel at model.width={self.width}")
        if self.latent_length > self.text_length:
            raise UsageError(
                f"model.latent_length={self.latent_length}: every latent needs a token, and there are "
                f"model.text_length={self.text_length}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Data(Section):
    """What is learned."""

    text: str | None = None
    """A file, or a folder of text files, from where the command runs; null: the docstrings that ship."""
    packed: bool
    """Whether documents are joined and cut into full windows; otherwise each starts its own, and the rest is padding."""
    valid_share: Part = 0.05
    """Share of the documents that is never trained on."""
    seed: Seed = 0
    """Which documents those are."""
    damaged: bool = True
    """Whether the latent of one sample is damaged, as in the comparison; false for a training of one's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer(Section):
    """AdamW and the clipping before it."""

    lr: Above
    """Learning rate after the warm-up."""
    grad_clip_norm: Clip
    """Norm that gradients are clipped to; null or 0: no clipping."""
    weight_decay: Least = 0.0
    """AdamW's decay of the weights."""
    beta1: Decay = 0.9
    """Decay of the mean of the gradients."""
    beta2: Decay = 0.999
    """Decay of the mean of their squares."""
    eps: Above = 1e-8
    """Added to the root of that mean before dividing by it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training(Section):
    """How long, in which numbers, and what is kept on the way."""

    steps: Count
    """Steps of the optimizer."""
    warmup_steps: Whole
    """Steps in which the learning rate rises from 0."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"]
    """Numbers of the forward pass; auto: the best that the device has."""
    gradient_accumulation_steps: Count
    """Micro-batches of a step."""
    train_batch_size: Count
    """Samples of a micro-batch, in each process."""
    eval_every: Count
    """Steps between two evaluations."""
    checkpoint_every: Count
    """Steps between two checkpoints."""
    log_every: Count
    """Steps between two lines of the log."""
    keep_checkpoints: Count = 3
    """The newest checkpoints that stay."""
    prove_steps: Whole = 20
    """Healthy steps after a checkpoint before it counts as good."""
    seed: Seed = 0
    """First weights, order of the samples, and noise."""
    parallel: Literal["ddp", "fsdp2"] = "ddp"
    """How several processes share the work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss(Section):
    """What is made small."""

    loss_scale: Above = 1.0
    """The loss is multiplied by this before backward."""
    text_loss_weight: Least
    """Weight of the cross entropy of masked tokens."""
    latent_loss_weight: Least
    """Weight of the squared error of latents."""
    prediction: Literal["epsilon", "v", "x0"] = "epsilon"
    """What is predicted of a noisy latent."""
    normalize_latents: bool = False
    """Whether prediction and target are brought to length 1 before they are compared."""
    diffusion_steps: Count = 1000
    """Steps of noise on latents."""

    def check(self) -> None:
        if self.text_loss_weight == self.latent_loss_weight == 0:
            raise UsageError("loss.text_loss_weight=0 and loss.latent_loss_weight=0: then nothing is learned. Set one of them")


@dataclass(frozen=True, kw_only=True, slots=True)
class Modes(Section):
    """Shares of the samples by what is noisy in them; together 1."""

    unconditional: Share
    """Both text and latents."""
    text_to_latent: Share
    """Latents; the text is given."""
    latent_to_text: Share
    """Text; the latents are given."""

    def check(self) -> None:
        whole = self.unconditional + self.text_to_latent + self.latent_to_text
        if abs(whole - 1) >= 1e-6:
            raise UsageError(
                f"modes: unconditional={self.unconditional}, text_to_latent={self.text_to_latent} and "
                f"latent_to_text={self.latent_to_text} add up to {whole:.6g}, not to 1. Set all three"
            )


SECTIONS: dict[str, type[Section]] = {part.__name__.lower(): part for part in (Model, Data, Optimizer, Training, Loss, Modes)}


def hints(section: type[Section]) -> dict[str, Any]:
    """Kind of every key of a section."""
    return get_type_hints(section, include_extras=True)


KEYS: dict[str, Any] = {f"{name}.{key}": kind for name, section in SECTIONS.items() for key, kind in hints(section).items()}
"""Every key that can be set, written section.key, and its kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings of a run."""

    size: str
    """The size that the settings started from."""
    model: Model
    data: Data
    optimizer: Optimizer
    training: Training
    loss: Loss
    modes: Modes

    @classmethod
    def load(cls, source: str | Path, changes: Sequence[str] = ()) -> Config:
        """A size by its name, or a YAML file on top of the size that its key `size` names (tiny, where it names none); then the
        changes, each written section.key=value."""
        config = _size(source) if isinstance(source, str) and source in SIZES else _file(Path(source))
        return config.with_(**dict(read_change(change, KEYS) for change in changes)) if changes else config

    @staticmethod
    def chosen(source: str | Path, changes: Sequence[str] = ()) -> frozenset[str]:
        """The keys that a person has set: in a file of theirs, or by a change. Those of a size that ships are nobody's choice."""
        own = {} if isinstance(source, str) and source in SIZES else _written(Path(source))[1]
        return frozenset((*own, *(read_change(change, KEYS)[0] for change in changes)))

    @classmethod
    def from_json(cls, made: Mapping[str, Any]) -> Config:
        """Back from `to_json`. What is missing has its default, where there is one."""
        if not isinstance(made, Mapping):
            raise UsageError("a configuration is a mapping of sections")
        size = made.get("size")
        if not isinstance(size, str) or size not in SIZES:
            raise UsageError(f"size: not one of {', '.join(SIZES)}")
        given = _flat({key: value for key, value in made.items() if key != "size"})
        parts: dict[str, Any] = {}
        for name, section in SECTIONS.items():
            own = {key.partition(".")[2]: value for key, value in given.items() if key.startswith(f"{name}.")}
            needed = [f.name for f in fields(section) if f.default is MISSING]  # type: ignore[arg-type]
            missing = [f"{name}.{key}" for key in needed if key not in own]
            if missing:
                raise UsageError(f"{', '.join(missing)}: not set")
            parts[name] = section(**own)
        return cls(size=size, **parts)

    def with_(self, **changes: Any) -> Config:
        """The same with other values, by their keys: `config.with_(**{"optimizer.lr": 1e-4})`."""
        made = self.to_json()
        for key, value in changes.items():
            if key not in KEYS:
                raise _unknown(key)
            section, _, name = key.partition(".")
            made[section][name] = value
        return Config.from_json(made)

    def to_json(self) -> dict[str, Any]:
        """Nested plain dicts."""
        return asdict(self)

    def to_yaml(self) -> str:
        """A file that `load` reads back."""
        return str(yaml().safe_dump(self.to_json(), sort_keys=False, allow_unicode=True))


def _size(name: str) -> Config:
    text = (files("nanproof_recipes.latent_dlm") / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
    return Config.from_json(read_yaml(text, f"{name}.yaml"))


def _file(path: Path) -> Config:
    """A file may hold a few keys only."""
    size, own = _written(path)
    try:
        return _size(size).with_(**own)
    except UsageError as error:
        raise UsageError(f"{printable(str(path))}: {error}") from None


def _written(path: Path) -> tuple[str, dict[str, Any]]:
    """The size that a file starts from, and the values that it sets, by their full keys."""
    name = printable(str(path))
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
        text = raw.decode("utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "not UTF-8"
        raise UsageError(f"{name}: {why}. Give the path of a YAML file, or one of {', '.join(SIZES)}") from None
    if len(raw) > LARGEST:
        raise UsageError(f"{name}: more than {LARGEST} bytes. Give a YAML file of settings")
    made = read_yaml(text, name)
    try:
        size = made.pop("size", SIZES[0])
        if not isinstance(size, str) or size not in SIZES:
            raise UsageError(f"size: not one of {', '.join(SIZES)}")
        return size, _flat(made)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def _flat(made: Mapping[Any, Any]) -> dict[str, Any]:
    """Values by their full keys, all of them known."""
    flat: dict[str, Any] = {}
    for name, section in made.items():
        if not isinstance(name, str) or name not in SECTIONS:
            raise _unknown(name)
        if section is not None and not isinstance(section, Mapping):
            raise UsageError(f"{name}: a section holds keys and values, such as {nearest(f'{name}.', KEYS)}")
        for key, value in (section or {}).items():
            if not isinstance(key, str) or f"{name}.{key}" not in KEYS:
                raise _unknown(key, f"{name}.")
            flat[f"{name}.{key}"] = value
    return flat


def _unknown(key: object, section: str = "") -> UsageError:
    name = section + (key if isinstance(key, str) else seen(key))
    known = nearest(name, KEYS if "." in name else [*SECTIONS, *KEYS])
    return UsageError(f"{name[:80]!a} is no key of this recipe. The nearest that is: {known}")
