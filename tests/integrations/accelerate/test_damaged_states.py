"""`load_state` under a guard: a partial or damaged folder is passed over, or refused before anything of it is loaded."""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import shutil
import signal
from collections.abc import Iterator

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate.accelerator", reason="accelerate is not installed")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file, save_file

import nanproof
from nanproof import UsageError

SAVES = 3
NEWEST, OLDER = SAVES - 1, SAVES - 2


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    """Accelerate keeps its settings in the process; every test begins without."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Payload:
    """What a pickle must not get to call."""

    def __reduce__(self):
        return os.system, ("touch owned",)


class Counter:
    """An object of the user's own in every checkpoint."""

    def __init__(self):
        self.steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Loop:
    """A loop that saves after every step, by automatic names or into folders of its own."""

    def __init__(self, folder, automatic=True, limit=None, checkpoints=None):
        torch.manual_seed(0)
        settings = ProjectConfiguration(str(folder), automatic_checkpoint_naming=automatic, total_limit=limit)
        self.accelerator = Accelerator(cpu=True, project_config=settings)
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.net, self.optimizer, self.schedule = self.accelerator.prepare(net, optimizer, schedule)
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        self.guard = nanproof.protect(self.accelerator, run_dir=None, checkpoints=checkpoints)
        self.folder = folder

    def step(self):
        x = torch.randn(4, 4)
        self.accelerator.backward((self.net(x).squeeze(-1) - x.sum(1)).square().mean())
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.counter.steps += 1

    def close(self):
        self.guard.close()


def save(folder, count=SAVES, **how):
    loop = Loop(folder, **how)
    for _ in range(count):
        loop.step()
        loop.accelerator.save_state()
    loop.close()
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("accelerate"))
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return folder


@pytest.fixture
def folder(saved, tmp_path, monkeypatch):
    shutil.copytree(saved, tmp_path / "project")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "project"


def newest(folder):
    return folder / "checkpoints" / f"checkpoint_{NEWEST}"


def resume(folder, *args, **kwargs):
    """The number of the checkpoint that was loaded."""
    loop = Loop(folder)
    loop.accelerator.load_state(*args, **kwargs)
    loop.close()
    return loop.counter.steps - 1


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "nanproof" and r.levelno >= logging.WARNING]


def nan_weight(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["0.weight"][0, 0] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def unmarked(then):
    def damage(folder):
        (folder / "nanproof.json").unlink(missing_ok=True)
        then(folder)

    return damage


def first_files_only(folder):
    for path in folder.iterdir():
        if path.name not in ("model.safetensors", "nanproof.json"):
            path.unlink()


def saving(folder):
    (folder / "nanproof.json").write_text('{"version": 1, "state": "saving"}')


def emptied(folder):
    for path in folder.iterdir():
        path.unlink()


FILES = ("model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl")
DAMAGE = {
    **{f"no {name}": lambda folder, name=name: (folder / name).unlink() for name in FILES},
    **{f"unmarked, no {name}": unmarked(lambda folder, name=name: (folder / name).unlink()) for name in FILES},
    **{
        f"half of {name}": lambda folder, name=name: os.truncate(folder / name, (folder / name).stat().st_size // 2)
        for name in FILES
    },
    **{f"zeros in {name}": lambda folder, name=name: (folder / name).write_bytes(bytes(500)) for name in FILES},
    **{f"a payload in {name}": lambda folder, name=name: torch.save(Payload(), folder / name) for name in FILES[1:]},
    **{
        f"a pickle in {name}": lambda folder, name=name: (folder / name).write_bytes(pickle.dumps(Payload()))
        for name in FILES[1:]
    },
    "first file only": first_files_only,
    "unmarked, first file only": unmarked(first_files_only),
    "empty": emptied,
    "marked as being saved": saving,
    "NaN in the weights": nan_weight,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_is_passed_over(folder, caplog, name):
    """`load_state()` takes the newest good one; one warning names the folder, and nothing in it is executed."""
    DAMAGE[name](newest(folder))
    caplog.clear()
    assert resume(folder) == OLDER
    [line] = warnings_of(caplog)
    assert f"checkpoint_{NEWEST}" in line and not os.path.exists("owned")


@pytest.mark.parametrize("name", ["no optimizer.bin", "half of model.safetensors", "a payload in optimizer.bin"])
def test_a_damaged_folder_that_was_named_is_refused_before_anything_is_loaded(folder, name):
    """Accelerate would put new weights into the model, and then raise. The error names one that is whole."""
    DAMAGE[name](newest(folder))
    loop = Loop(folder)
    before = {key: value.clone() for key, value in loop.net.state_dict().items()}
    with pytest.raises(UsageError, match=rf"checkpoint_{NEWEST}.*\nhint: .*checkpoint_{OLDER}"):
        loop.accelerator.load_state(str(newest(folder)))
    loop.close()
    assert all(torch.equal(before[key], value) for key, value in loop.net.state_dict().items())


def test_a_folder_with_nan_that_was_named_is_loaded_with_a_warning(folder, caplog):
    nan_weight(newest(folder))
    caplog.clear()
    loop = Loop(folder)
    loop.accelerator.load_state(str(newest(folder)))
    assert any(f"checkpoint_{NEWEST}" in line for line in warnings_of(caplog))
    loop.guard.close()


def test_where_every_folder_is_damaged_one_error_says_so(folder):
    for path in (folder / "checkpoints").iterdir():
        (path / "optimizer.bin").unlink()
    loop = Loop(folder)
    with pytest.raises(UsageError, match=r"none of the 3.*\nhint: "):
        loop.accelerator.load_state()
    loop.close()


# -- what is whole -------------------------------------------------------------------------------------------------------------


def users_files(folder):
    (folder / "README.md").write_text("mine")
    torch.save(Payload(), folder / "mine.pt")
    (folder / "notes").mkdir()


WHOLE = {"as saved": lambda folder: None, "without nanproof": unmarked(lambda folder: None), "the user's own files": users_files}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("named", [False, True], ids=["newest", "named"])
def test_a_whole_folder_is_loaded_without_a_word(folder, caplog, name, named):
    WHOLE[name](newest(folder))
    caplog.clear()
    assert resume(folder, *([str(newest(folder))] if named else [])) == NEWEST
    assert warnings_of(caplog) == []


def test_weights_as_a_torch_file_are_loaded(tmp_path, caplog):
    loop = Loop(tmp_path, automatic=False)
    loop.step()
    loop.accelerator.save_state(str(tmp_path / "mine"), safe_serialization=False)
    loop.accelerator.load_state(str(tmp_path / "mine"))
    loop.close()
    assert warnings_of(caplog) == []


def test_models_that_hooks_save_elsewhere_are_not_missed(tmp_path, caplog):
    """As the scripts of diffusers do: a hook saves the model itself, and takes it out of the list."""
    loop = Loop(tmp_path, automatic=False)
    loop.accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.clear())
    loop.accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())
    loop.step()
    loop.accelerator.save_state(str(tmp_path / "mine"))
    (tmp_path / "mine" / "nanproof.json").unlink(missing_ok=True)
    loop.accelerator.load_state(str(tmp_path / "mine"))
    loop.close()
    assert warnings_of(caplog) == [] and not (tmp_path / "mine" / "model.safetensors").exists()


# -- saving --------------------------------------------------------------------------------------------------------------------


def test_a_save_that_fails_half_way_is_passed_over(folder, caplog, monkeypatch):
    loop = Loop(folder)
    loop.accelerator.load_state()
    loop.accelerator.project_configuration.iteration = SAVES
    loop.step()
    monkeypatch.setattr(loop.schedule, "state_dict", lambda: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        loop.accelerator.save_state()
    loop.close()
    caplog.clear()
    assert resume(folder) == NEWEST
    [line] = warnings_of(caplog)
    assert f"checkpoint_{SAVES}" in line and "not finished" in line


def test_a_folder_that_is_saved_to_again_is_marked_meanwhile(tmp_path, monkeypatch):
    """One folder for every save: while the new state overwrites the old one, it is neither. From the first moment on: FSDP
    writes before any hook is called."""
    loop = Loop(tmp_path, automatic=False)
    loop.step()
    loop.accelerator.save_state(str(tmp_path / "mine"))
    read, states = loop.accelerator.get_state_dict, []

    def get_state_dict(*args, **kwargs):
        states.append(json.loads((tmp_path / "mine" / "nanproof.json").read_text())["state"])
        return read(*args, **kwargs)

    monkeypatch.setattr(loop.accelerator, "get_state_dict", get_state_dict)
    loop.accelerator.save_state(str(tmp_path / "mine"))
    assert states == ["saving"]
    monkeypatch.setattr(loop.optimizer, "state_dict", lambda: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        loop.accelerator.save_state(str(tmp_path / "mine"))
    with pytest.raises(UsageError, match="not finished"):
        loop.accelerator.load_state(str(tmp_path / "mine"))
    loop.close()


def test_the_oldest_goes_only_once_the_newest_is_whole(tmp_path, monkeypatch):
    """Accelerate deletes first and saves then: with `total_limit=1` a kill in between would leave nothing."""
    loop = Loop(tmp_path, limit=1)
    loop.step()
    loop.accelerator.save_state()
    loop.step()
    monkeypatch.setattr(loop.schedule, "state_dict", lambda: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        loop.accelerator.save_state()
    assert (tmp_path / "checkpoints" / "checkpoint_0" / "random_states_0.pkl").exists()
    monkeypatch.undo()
    loop.accelerator.project_configuration.iteration = 2
    loop.accelerator.save_state()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_2"]
    assert loop.accelerator.project_configuration.total_limit == 1
    loop.close()


def test_a_loop_can_ask_whether_a_signal_came(tmp_path):
    """The loop is the user's: it saves where it saves, and nothing is lost."""
    where = nanproof.Checkpoints(tmp_path / "own", every=1000, on_signal=True)
    loop = Loop(tmp_path / "project", checkpoints=where)
    for _ in range(5):
        loop.step()
        if loop.counter.steps == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        if loop.guard.preempted:
            loop.accelerator.save_state()
            break
    loop.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert resume(tmp_path / "project") == 1
