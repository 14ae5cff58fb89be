"""The folders of `accelerator.save_state`: marked while they are written, looked at before they are loaded.

`load_state()` takes the newest folder that is whole, readable and finite. A folder that the user names is loaded, with a warning
if it holds a NaN. It is refused if Accelerate would fail half way, with new weights in the model and old moments in the
optimizer, or if it may be a mixture of two saves.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from nanproof._errors import UsageError
from nanproof._text import printable
from nanproof.integrations._saved import (
    MARK,
    Fault,
    begin,
    contents_faults,
    delete,
    finish,
    marked_faults,
    newest_good,
    unfinished,
)

log = logging.getLogger("nanproof")

_RANDOM = "random_states_0.pkl"
"""What every save writes last, except for the user's own objects."""
_OWN_LAYOUT = ("FSDP", "DEEPSPEED", "MEGATRON_LM")


class StateFolders:
    """Stands between one accelerator and its folders."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    # -- saving ------------------------------------------------------------------------------------------------------------------

    def save(self, original: Callable[..., Any], output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Accelerate makes the folder, and nothing is in it before the hook is called; unless it is there already."""
        accelerator, settings = self._accelerator, self._accelerator.project_configuration
        writes, folders = accelerator.is_main_process, list[Path]()
        automatic, limit = settings.automatic_checkpoint_naming, settings.total_limit

        def started(models: Any, weights: Any, folder: Any) -> None:
            folders.append(Path(folder))
            if writes:
                begin(Path(folder))

        if writes and not automatic and output_dir is not None and (Path(output_dir) / MARK).exists():
            begin(Path(output_dir))
        hook = accelerator.register_save_state_pre_hook(started)
        accelerator._save_model_state_pre_hook.move_to_end(hook.id, last=False)
        settings.total_limit = None if automatic else limit  # it would delete before it saves
        try:
            result = original(output_dir, *args, **kwargs)
        finally:
            hook.remove()
            settings.total_limit = limit
        if writes and folders:
            finish(folders[0], "saved", _is_listed, ranks=accelerator.num_processes)
            if automatic and limit is not None:
                _rotate(folders[0], max(limit, 1))
        return result

    # -- loading -----------------------------------------------------------------------------------------------------------------

    def load(
        self, original: Callable[..., Any], input_dir: Any = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        from accelerate.utils import broadcast_object_list  # type: ignore[import-untyped]

        accelerator = self._accelerator
        refuses = (load_kwargs or {}).get("weights_only") is not False
        found: list[Any] = [input_dir, ""]
        if accelerator.is_main_process:
            found = list(self._chosen(input_dir, refuses))
        input_dir, error = broadcast_object_list(found)
        if error:
            raise UsageError(error)
        return original(input_dir, load_kwargs, **kwargs)

    def _chosen(self, asked: Any, refuses: bool) -> tuple[Any, str]:
        """The folder to load, or why there is none."""
        accelerator = self._accelerator
        if asked is None and accelerator.project_configuration.automatic_checkpoint_naming:
            there = _numbered(Path(accelerator.project_dir) / "checkpoints")
            one, passed = newest_good(reversed(there), lambda folder: self._faults(folder, refuses))
            if one is not None or not there:
                return None if one is None else str(one), ""
            why = f"{printable(passed[0][0].name)}: {passed[0][1].reason}"
            return None, (
                f"load_state(): none of the {len(there)} checkpoints in {there[0].parent} is whole and finite ({why})\n"
                f'hint: start anew, or name one to use it all the same: load_state("{there[-1]}")'
            )
        if asked is None or not Path(asked).expanduser().is_dir():
            return asked, ""
        folder = Path(asked).expanduser()
        faults = list(self._faults(folder, refuses))
        if unfinished(folder) or not all(fault.loads for fault in faults):
            beside = [path for path in _numbered(folder.parent) if path.resolve() != folder.resolve()]
            one = next((path for path in reversed(beside) if next(self._faults(path, refuses), None) is None), None)
            hint = "start anew" if one is None else f'this one is whole: load_state("{one}")'
            if unfinished(folder):
                hint += f". To load it all the same, delete {folder / MARK}"
            return asked, f"load_state: {printable(str(folder))} cannot be loaded: {faults[0].reason}\nhint: {printable(hint)}"
        if faults:
            log.warning("nanproof: loading %s, as asked: %s", printable(folder.name), faults[0].reason)
        return asked, ""

    def _faults(self, folder: Path, refuses: bool) -> Iterator[Fault]:
        """What is wrong with a folder, in view of what this accelerator has prepared."""
        yield from marked_faults(folder)
        loaded = []
        for names in self._needed(folder):
            there = next((folder / name for name in names if (folder / name).is_file()), None)
            if there is None:
                yield Fault(f"{names[0]} is missing")
            else:
                loaded.append(there)
        yield from contents_faults(loaded, _allowed, refuses)
        if self._own_layout:
            yield from contents_faults([folder])

    def _needed(self, folder: Path) -> Iterator[tuple[str, ...]]:
        """The files that `load_state` reads; of some there are two kinds."""
        accelerator = self._accelerator
        yield (_RANDOM,)
        if self._own_layout:
            return
        hooks = accelerator._load_model_state_pre_hook or accelerator._save_model_state_pre_hook
        for i in range(len(accelerator._models)):
            names = f"model{_end(i)}.safetensors", f"pytorch_model{_end(i)}.bin"
            if not hooks or any((folder / name).exists() for name in names):  # a hook may have saved the model in its own way
                yield names
        for kind, count in (("optimizer", len(accelerator._optimizers)), ("scheduler", len(accelerator._schedulers))):
            yield from ((f"{kind}{_end(i)}.bin",) for i in range(count))
        if accelerator.scaler is not None:
            yield ("scaler.pt",)
        yield from ((f"custom_checkpoint_{i}.pkl",) for i in range(len(accelerator._custom_objects)))

    @property
    def _own_layout(self) -> bool:
        kind = self._accelerator.distributed_type
        return str(getattr(kind, "value", kind)) in _OWN_LAYOUT


def _end(i: int) -> str:
    return f"_{i}" if i else ""


def _is_listed(name: str) -> bool:
    """Whether a file must be there later. The random states of the other ranks may still be under way."""
    return name == _RANDOM or (not name.startswith("random_states_") and name.endswith((".safetensors", ".bin", ".pkl", ".pt")))


def _numbered(folder: Path) -> list[Path]:
    """Folders by the first number in their name, as Accelerate orders them."""
    found = [(int(match[0]), path) for path in folder.glob("*/") if (match := re.search(r"\d+", path.name)) and path.is_dir()]
    return [path for _, path in sorted(found)]


def _rotate(saved: Path, limit: int) -> None:
    """Delete the oldest over the limit. What a kill left half saved goes, and counts for nothing."""
    there = [path for path in _numbered(saved.parent) if path != saved]
    partial = [path for path in there if unfinished(path) or not (path / _RANDOM).exists()]
    whole = [path for path in there if path not in partial]
    for folder in (*partial, *whole[: max(0, len(whole) + 1 - limit)]):
        delete(folder, _RANDOM)


def _allowed() -> AbstractContextManager[Any]:
    """The classes that Accelerate allows in what it loads: numpy's, for random states."""
    from accelerate.utils import other

    return torch.serialization.safe_globals(list(getattr(other, "TORCH_SAFE_GLOBALS", ())))
