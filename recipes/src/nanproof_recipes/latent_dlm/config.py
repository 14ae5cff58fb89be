"""Every setting of latent-dlm, read from YAML and checked. An unknown key is an error: a misspelt setting would be ignored."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import yaml  # type: ignore[import-untyped,unused-ignore]
from msgspec import Meta

from nanproof import UsageError
from nanproof_recipes.library import printable

SIZES = ("tiny", "base")
"""The sizes that ship, each a file in configs/."""
LARGEST = 1_000_000
"""The most bytes that a settings file may have."""

Count = Annotated[int, Meta(ge=1, description="a whole number of 1 or more")]
Whole = Annotated[int, Meta(ge=0, description="a whole number of 0 or more")]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1, description="a whole number from 0 to 2**63 - 1")]
Above = Annotated[float, Meta(gt=0, description="a number above 0")]
Least = Annotated[float, Meta(ge=0, description="a number of 0 or more")]
Part = Annotated[float, Meta(gt=0, lt=1, description="a number above 0 and below 1")]
Share = Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")]
Decay = Annotated[float, Meta(ge=0, lt=1, description="a number from 0 to below 1")]
Clip = Annotated[Annotated[float, Meta(ge=0)] | None, Meta(description="a number of 0 or more, or null")]
Text = Annotated[Annotated[str, Meta(min_length=1)] | None, Meta(description="text, or null")]
Flag = Annotated[bool, Meta(description="true or false")]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the configuration. It checks its values however it is made."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = _checked(f"{type(self).__name__.lower()}.{name}", getattr(self, name))
            msgspec.structs.force_setattr(self, name, value)
        self.check()

    def check(self) -> None:
        """Raise UsageError if values that are valid alone do not fit together."""


class Model(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
            head = f"a head of model.width={self.width} is {self.width // self.heads} wide"
            raise UsageError(f"model.heads={self.heads}: {head}, and positions rotate pairs of channels. Make that even")
        if self.width * self.mlp_ratio < 1:
            raise UsageError(f"model.mlp_ratio={self.mlp_ratio}: leaves no hidden channel at model.width={self.width}")
        if self.latent_length > self.text_length:
            tokens = f"every latent needs a token, and there are model.text_length={self.text_length}"
            raise UsageError(f"model.latent_length={self.latent_length}: {tokens}")


class Data(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is learned."""

    text: Text = None
    """A file, or a folder of text files, from where the command runs; null: the docstrings that ship."""
    packed: Flag
    """Whether documents are joined and cut into full windows; otherwise each starts its own, and the rest is padding."""
    valid_share: Part = 0.05
    """Share of the documents that is never trained on."""
    seed: Seed = 0
    """Which documents those are."""
    damaged: Flag = True
    """Whether the latent of one sample is damaged, as in the comparison; false for your own training."""


class Optimizer(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


class Training(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


class Loss(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is minimised."""

    loss_scale: Above = 1.0
    """The loss is multiplied by this before backward."""
    text_loss_weight: Least
    """Weight of the cross entropy of masked tokens."""
    latent_loss_weight: Least
    """Weight of the squared error of latents."""
    prediction: Literal["epsilon", "v", "x0"] = "epsilon"
    """What is predicted of a noisy latent."""
    normalize_latents: Flag = False
    """Whether prediction and target are normalised to length 1 before they are compared."""
    diffusion_steps: Count = 1000
    """Steps of noise on latents."""

    def check(self) -> None:
        if self.text_loss_weight == self.latent_loss_weight == 0:
            raise UsageError("loss.text_loss_weight=0 and loss.latent_loss_weight=0: then nothing is learned. Set one of them")


class Modes(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
            three = f"unconditional={self.unconditional}, text_to_latent={self.text_to_latent}"
            raise UsageError(
                f"modes: {three} and latent_to_text={self.latent_to_text} add up to {whole:.6g}, not to 1. Set all three"
            )


SECTIONS: dict[str, type[Section]] = {part.__name__.lower(): part for part in (Model, Data, Optimizer, Training, Loss, Modes)}
FIELDS = {f"{name}.{field.name}": field for name, part in SECTIONS.items() for field in msgspec.structs.fields(part)}
KEYS: dict[str, Any] = {key: field.type for key, field in FIELDS.items()}
"""The type of every key that can be set, by section.key."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
        """Load a size by its name, or a YAML file on top of the size that its key `size` names (default: tiny). Then apply the
        changes, each written section.key=value."""
        size, own = _read(source)
        shipped = (files("nanproof_recipes.latent_dlm") / "configs" / f"{size}.yaml").read_text(encoding="utf-8")
        with _errors_name(source):
            config = Config.from_json(_parse(shipped)).with_(**own)
        return config.with_(**dict(map(_change, changes)))

    @staticmethod
    def chosen(source: str | Path, changes: Sequence[str] = ()) -> frozenset[str]:
        """Return the keys that a person has set, in their own file or by a change. A size that ships sets none."""
        return frozenset((*_read(source)[1], *(_change(change)[0] for change in changes)))

    @classmethod
    def from_json(cls, made: Mapping[str, Any]) -> Config:
        """Read what `to_json` returned. A missing key gets its default, if it has one."""
        size, own = _flat(made)
        if missing := [key for key, field in FIELDS.items() if field.required and key not in own]:
            raise UsageError(f"{', '.join(missing)}: not set")
        parts: dict[str, Any] = {name: section(**(made.get(name) or {})) for name, section in SECTIONS.items()}
        return cls(size=size, **parts)

    def with_(self, **changes: Any) -> Config:
        """Return a copy with other values, by their keys: `config.with_(**{"optimizer.lr": 1e-4})`."""
        made = self.to_json()
        for key, value in changes.items():
            section, _, name = key.partition(".")
            if key not in KEYS:
                raise _unknown(key)
            made[section][name] = value
        return Config.from_json(made)

    def to_json(self) -> dict[str, Any]:
        """Return nested plain dicts."""
        return dict(msgspec.to_builtins(self))

    def to_yaml(self) -> str:
        """Return the text of a file that `load` reads back."""
        return str(yaml.safe_dump(self.to_json(), sort_keys=False, allow_unicode=True))


def _checked(key: str, value: Any) -> Any:
    """Return the value in the type of its key. Text such as 5e-5, which YAML 1.1 does not read as a number, is a float."""
    kind, made = KEYS[key], value
    try:
        if isinstance(value, str) and kind in (Above, Least, Part, Share, Decay, Clip):
            made = float(value)
        made = msgspec.convert(made, kind)
        if isinstance(made, float) and not math.isfinite(made):
            raise ValueError("not finite")
    except ValueError:
        wanted = f"one of {', '.join(get_args(kind))}" if get_origin(kind) is Literal else get_args(kind)[1].description
        raise UsageError(f"{key}={_seen(value)}: must be {wanted}") from None
    return made


def _seen(value: Any) -> str:
    """Return a short form of a value that is safe to print, whatever a file holds."""
    if isinstance(value, dict | list | set | tuple):
        return f"a {type(value).__name__}"
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of that size"
    return json.dumps(value) if value is None or isinstance(value, bool) else ascii(value)[:80]


def _flat(made: Any) -> tuple[str, dict[str, Any]]:
    """Return the size, and the values by section.key. Raise UsageError for an unknown key."""
    if not isinstance(made, Mapping) or made.get("size") not in [*SIZES]:
        raise UsageError(f"size: not one of {', '.join(SIZES)}")
    flat: dict[str, Any] = {}
    for name, section in made.items():
        if name == "size":
            continue
        if name not in SECTIONS:
            raise _unknown(name)
        if not isinstance(section, Mapping | None):
            raise UsageError(f"{name}: a section holds keys and values, such as {_nearest(f'{name}.', KEYS)}")
        for key, value in (section or {}).items():
            if not isinstance(key, str) or f"{name}.{key}" not in KEYS:
                raise _unknown(key, f"{name}.")
            flat[f"{name}.{key}"] = value
    return made["size"], flat


def _unknown(key: object, section: str = "") -> UsageError:
    name = (section + (key if isinstance(key, str) else _seen(key)))[:80]
    nearest = _nearest(name, KEYS if "." in name else [*SECTIONS, *KEYS])
    return UsageError(f"{name!a} is not a key of this recipe. The nearest key: {nearest}")


def _nearest(key: str, known: Iterable[str]) -> str:
    """Return the known key most like this one, by its whole or by its last part."""

    def like(other: str) -> tuple[float, float]:
        pairs = (key, other), (key.rpartition(".")[2], other.rpartition(".")[2])
        whole, last = (SequenceMatcher(None, *pair).ratio() for pair in pairs)
        return max(whole, last), whole

    return max(known, key=like)


class _StrictLoader(yaml.SafeLoader):  # type: ignore[misc,unused-ignore]
    """Refuses a repeated key, of which YAML keeps the last, and a merge, which can make a short file fill the memory."""

    def flatten_mapping(self, node: Any) -> None:
        known: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key.value, str)):
            if key.value in known or key.value == "<<":
                what = "is a merge. Write the keys out" if key.value == "<<" else "is there twice. Put both into one"
                raise UsageError(f"line {key.start_mark.line + 1}: {key.value[:80]!a} {what}")
            known.add(key.value)


def _parse(text: str) -> dict[Any, Any]:
    """Return the mapping in a YAML text."""
    try:
        made = yaml.load(text, Loader=_StrictLoader)
    except UsageError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or type(error).__name__
        line = f"line {mark.line + 1}: " if mark is not None else ""
        raise UsageError(f"{line}not YAML ({printable(str(problem)[:200])})") from None
    if not isinstance(made, dict | None):
        raise UsageError("not a mapping of sections, each with its keys")
    return made or {}


def _read(source: str | Path) -> tuple[str, dict[str, Any]]:
    """Return the size that a source starts from, and the values that it sets itself, by section.key."""
    if source in SIZES:
        return str(source), {}
    with _errors_name(source):
        try:
            with Path(source).open("rb") as file:
                raw = file.read(LARGEST + 1)
            text = raw.decode("utf-8") if len(raw) <= LARGEST else None
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "not UTF-8"
            raise UsageError(f"{why}. Give the path of a YAML file, or one of {', '.join(SIZES)}") from None
        if text is None:
            raise UsageError(f"more than {LARGEST} bytes. Give a YAML file of settings")
        return _flat({"size": SIZES[0], **_parse(text)})


@contextmanager
def _errors_name(source: str | Path) -> Iterator[None]:
    """Start the errors inside with the name of the file."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{printable(str(source))}: {error}") from None


def _change(change: str) -> tuple[str, Any]:
    """Return key and value of a change such as optimizer.lr=5e-5. The value is YAML, or plain text for a key that is text."""
    key, sign, text = change.partition("=")
    key = key.strip()
    if not sign or not key:
        raise UsageError(f"{change[:80]!r}: a change is written section.key=value, such as optimizer.lr=5e-5")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        value = text
    return key, text.strip() if KEYS.get(key) == Text and not isinstance(value, str | None) else value
