"""Settings of latent-dlm: every key is read where it stands, nothing else is accepted, and what is wrong is named."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files

import pytest

from nanproof import UsageError
from nanproof_recipes.latent_dlm.arms import configured, setting
from nanproof_recipes.latent_dlm.config import KEYS, SECTIONS, SIZES, Config, Loss, Modes, Optimizer

yaml = pytest.importorskip("yaml")

OTHER = {
    "model.layers": 5,
    "model.width": 32,
    "model.heads": 8,
    "model.mlp_ratio": 2.5,
    "model.text_length": 96,
    "model.latent_length": 6,
    "model.latent_width": 12,
    "data.text": "some/folder",
    "data.packed": False,
    "data.valid_share": 0.25,
    "data.seed": 7,
    "data.damaged": False,
    "optimizer.lr": 5e-5,
    "optimizer.grad_clip_norm": 0.5,
    "optimizer.weight_decay": 0.1,
    "optimizer.beta1": 0.8,
    "optimizer.beta2": 0.95,
    "optimizer.eps": 1e-6,
    "training.steps": 12,
    "training.warmup_steps": 0,
    "training.dtype": "fp16",
    "training.gradient_accumulation_steps": 4,
    "training.train_batch_size": 24,
    "training.eval_every": 5,
    "training.checkpoint_every": 70,
    "training.log_every": 1,
    "training.keep_checkpoints": 9,
    "training.prove_steps": 0,
    "training.seed": 3,
    "training.parallel": "fsdp2",
    "loss.loss_scale": 1024.0,
    "loss.text_loss_weight": 0.5,
    "loss.latent_loss_weight": 0.0,
    "loss.prediction": "v",
    "loss.normalize_latents": True,
    "loss.diffusion_steps": 50,
}
"""A value for every key that is not the one of tiny. The shares of modes change together and have their own test."""

RECOMMENDED = """
optimizer:
  lr: 5e-5  # Reduced from 1e-4
  grad_clip_norm: 0.5  # Reduced from 1.0

training:
  warmup_steps: 2000  # Increased warmup
  dtype: bf16  # Keep bf16 but add safeguards
  gradient_accumulation_steps: 2  # Reduce effective batch size

loss:
  loss_scale: 1.0  # Keep at 1.0
  text_loss_weight: 1.0
  latent_loss_weight: 0.1  # Reduce latent loss weight
"""


def flat(config):
    return {f"{name}.{key}": value for name in SECTIONS for key, value in config.to_json()[name].items()}


def written(tmp_path, text, name="own.yaml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(*args, **kwargs):
    with pytest.raises(UsageError) as caught:
        Config.load(*args, **kwargs)
    return str(caught.value)


def test_the_table_of_other_values_has_every_key():
    assert (
        {*OTHER, "modes.unconditional", "modes.text_to_latent", "modes.latent_to_text"}
        == set(KEYS)
        == set(flat(Config.load("tiny")))
    )
    assert len(KEYS) == sum(len(section.__struct_fields__) for section in SECTIONS.values())


def as_written(value):
    """As a person writes it: 5e-05 is text to YAML 1.1."""
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def test_every_key_is_read_from_a_file_and_from_a_change(tmp_path):
    """All at once, each in its type."""
    before = flat(Config.load("tiny"))
    lines = [f"  {key.partition('.')[2]}: {as_written(value)}" for key, value in OTHER.items()]
    sections = {name: [line for key, line in zip(OTHER, lines, strict=True) if key.startswith(f"{name}.")] for name in SECTIONS}
    text = "".join("\n".join([f"{name}:", *own, ""]) for name, own in sections.items())
    by_change = Config.load("tiny", [f"{key}={as_written(value)}" for key, value in OTHER.items()])
    for config in (Config.load(written(tmp_path, text)), by_change, Config.load("tiny").with_(**OTHER)):
        now = flat(config)
        assert {k for k in now if now[k] != before[k]} == set(OTHER)
        assert {key: (now[key], type(now[key])) for key in OTHER} == {key: (value, type(value)) for key, value in OTHER.items()}


@pytest.mark.slow
@pytest.mark.parametrize("key", OTHER)
def test_a_key_changes_nothing_but_itself(key, tmp_path):
    before, value = flat(Config.load("tiny")), OTHER[key]
    section, _, name = key.partition(".")
    plain = as_written(value)
    by_file = Config.load(written(tmp_path, f"{section}:\n  {name}: {plain}\n"))
    by_change = Config.load("tiny", [f"{key}={plain}"])
    for config in (by_file, by_change, Config.load("tiny").with_(**{key: value})):
        now = flat(config)
        assert {k for k in now if now[k] != before[k]} == {key}
        assert now[key] == value and type(now[key]) is type(value)


def test_shares_of_modes_are_read_and_add_up_to_one(tmp_path):
    three = {"unconditional": 0.5, "text_to_latent": 0.125, "latent_to_text": 0.375}
    by_file = Config.load(written(tmp_path, yaml.safe_dump({"modes": three})))
    by_change = Config.load("tiny", [f"modes.{key}={value}" for key, value in three.items()])
    assert by_file.modes == by_change.modes == Modes(**three)
    assert "add up to 0.9, not to 1" in refusal("tiny", ["modes.unconditional=0.5"])
    Modes(unconditional=1 / 3, text_to_latent=1 / 3, latent_to_text=1 / 3)
    with pytest.raises(UsageError, match=r"modes.text_to_latent=-0.5"):
        Modes(unconditional=1.0, text_to_latent=-0.5, latent_to_text=0.5)


@pytest.mark.parametrize("size", SIZES)
def test_a_size_holds_every_key_with_a_comment(size):
    """Nothing is left to a default that a reader of the file does not see."""
    text = (files("nanproof_recipes.latent_dlm") / "configs" / f"{size}.yaml").read_text(encoding="utf-8")
    made = yaml.safe_load(text)
    assert {f"{name}.{key}" for name in SECTIONS for key in made[name]} == set(KEYS) and made["size"] == size
    assert all("#" in line for line in text.splitlines() if line.startswith("  "))
    assert Config.load(size).to_json() == made


def test_the_recommended_settings_load_as_they_stand(tmp_path):
    """On tiny they change what they name; on base they are what is there."""
    now, before = flat(Config.load(written(tmp_path, RECOMMENDED))), flat(Config.load("tiny"))
    wanted = {
        "optimizer.lr": 5e-5,
        "optimizer.grad_clip_norm": 0.5,
        "training.warmup_steps": 2000,
        "training.gradient_accumulation_steps": 2,
        "loss.latent_loss_weight": 0.1,
    }
    assert {key: now[key] for key in now if now[key] != before[key]} == wanted
    assert Config.load(written(tmp_path, "size: base\n" + RECOMMENDED)) == Config.load("base")
    base = Config.load("base")
    assert (base.training.train_batch_size, base.training.eval_every, base.training.checkpoint_every) == (4, 1000, 1000)


def test_a_file_starts_from_its_size_and_changes_come_last(tmp_path):
    path = written(tmp_path, "size: base\noptimizer:\n  lr: 3e-5\n")
    config = Config.load(str(path), ["optimizer.lr=1e-5", "optimizer.lr=2e-5"])
    assert config.size == "base" and config.model == Config.load("base").model and config.optimizer.lr == 2e-5
    assert Config.load(written(tmp_path, "")) == Config.load(written(tmp_path, "optimizer:\n")) == Config.load("tiny")


def test_what_is_written_is_read_back(tmp_path):
    config = Config.load("base", ["optimizer.lr=1e-7", "optimizer.grad_clip_norm=null", "data.text=straße: a\\b"])
    assert Config.load(written(tmp_path, config.to_yaml())) == config
    assert Config.from_json(json.loads(json.dumps(config.to_json()))) == config
    made = config.to_json()
    del made["optimizer"]["beta1"]
    assert Config.from_json(made) == config
    del made["optimizer"]["lr"], made["loss"]["text_loss_weight"]
    with pytest.raises(UsageError, match=r"optimizer.lr, loss.text_loss_weight: not set"):
        Config.from_json(made)
    for wrong in ([], {}, {"size": "huge"}, {"size": ["tiny"]}):
        with pytest.raises(UsageError, match=r"size|mapping"):
            Config.from_json(wrong)


def test_numbers_are_read_as_people_write_them(tmp_path):
    """YAML 1.1 takes an exponent for a number only after a point and with a sign."""
    numbers = {"5e-5": 5e-5, "5E-5": 5e-5, "1e4": 1e4, "+1.e-3": 1e-3, ".5e-3": 5e-4, "3": 3.0, "1.0e-4": 1e-4, "'2e-4'": 2e-4}
    for text, value in numbers.items():
        assert Config.load("tiny", [f"optimizer.lr={text}"]).optimizer.lr == value
        lr = Config.load(written(tmp_path, f"optimizer: {{lr: {text}}}")).optimizer.lr
        assert lr == value and type(lr) is float


WRONG = [
    ("optimizer.lr=0", "above 0"),
    ("optimizer.lr=-1e-4", "above 0"),
    ("optimizer.lr=.nan", "above 0"),
    ("optimizer.lr=.inf", "above 0"),
    ("optimizer.lr=1e999", "above 0"),
    ("optimizer.lr=0x" + "f" * 5000, "above 0"),
    ("optimizer.lr=true", "true: must be a number"),
    ("optimizer.lr=", "null: must be a number"),
    ("optimizer.lr=fast", "'fast'"),
    ("optimizer.lr=[1e-4]", "a list"),
    ("optimizer.lr=&a [*a]", "a list"),
    ("optimizer.grad_clip_norm=-1", "or null"),
    ("optimizer.beta2=1", "below 1"),
    ("optimizer.eps=0", "above 0"),
    ("training.steps=0", "1 or more"),
    ("training.steps=1.5", "whole number"),
    ("training.steps=1e3", "whole number"),
    ("training.steps=true", "whole number"),
    ("training.warmup_steps=-1", "0 or more"),
    ("training.dtype=float16", "one of auto, bf16, fp16, fp32"),
    ("training.dtype=[bf16]", "one of auto"),
    ("training.parallel=fsdp", "one of ddp, fsdp2"),
    ("training.train_batch_size=0", "1 or more"),
    ("training.seed=-1", "2**63"),
    ("data.packed=1", "true or false"),
    ("data.packed='true'", "true or false"),
    ("data.valid_share=0", "below 1"),
    ("data.valid_share=1", "below 1"),
    ("data.text=''", "text, or null"),
    ("model.heads=7", "divide model.width=64"),
    ("model.mlp_ratio=0.001", "no hidden channel"),
    ("model.latent_length=65", "model.text_length=64"),
    ("loss.loss_scale=0", "above 0"),
    ("loss.prediction=noise", "one of epsilon, v, x0"),
    ("loss.normalize_latents=null", "true or false"),
]
"""A change, and a part of its error."""


def test_a_value_that_cannot_be_right_is_refused_by_its_key(tmp_path):
    for change, said in WRONG:
        message = refusal("tiny", [change])
        assert message.startswith(change.partition("=")[0]) and said in message and len(message) < 200
    path = written(tmp_path, "training:\n  steps: 0\n")
    assert refusal(path) == f"{path}: {refusal('tiny', ['training.steps=0'])}"


@pytest.mark.slow
@pytest.mark.parametrize("change", [change for change, _ in WRONG])
def test_a_file_is_refused_as_a_change_is(change, tmp_path):
    key, _, text = change.partition("=")
    section, _, name = key.partition(".")
    path = written(tmp_path, f"{section}:\n  {name}: {text}\n")
    assert refusal(path) == f"{path}: {refusal('tiny', [change])}"


def test_weights_of_the_loss_are_not_both_zero():
    with pytest.raises(UsageError, match="nothing is learned"):
        Loss(text_loss_weight=0, latent_loss_weight=0.0)


def test_no_clipping_is_null_or_zero():
    assert Config.load("tiny", ["optimizer.grad_clip_norm=null"]).optimizer.grad_clip_norm is None
    assert Config.load("tiny", ["optimizer.grad_clip_norm=0"]).optimizer.grad_clip_norm == 0.0


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("optimizer: {learning_rate: 1}", "optimizer.learning_rate", "optimizer."),
        pytest.param("optimizer: {grad_clip: 1}", "optimizer.grad_clip", "optimizer.grad_clip_norm", marks=pytest.mark.slow),
        ("optimiser: {lr: 1}", "optimiser", "optimizer"),
        ("training: {lr: 1}", "training.lr", "optimizer.lr"),
        pytest.param("training: {batch_size: 1}", "training.batch_size", "training.train_batch_size", marks=pytest.mark.slow),
        pytest.param("training: {wramup_steps: 1}", "training.wramup_steps", "training.warmup_steps", marks=pytest.mark.slow),
        pytest.param("loss: {latent_weight: 1}", "loss.latent_weight", "loss.latent_loss_weight", marks=pytest.mark.slow),
        ("lr: 1e-4", "lr", "optimizer.lr"),
        ("1: 2", "1", ""),
        ("optimizer: {true: 2}", "optimizer.true", "optimizer."),
        pytest.param("optimizer: {lr: 1e-4, 'Lr': 1e-4}", "optimizer.Lr", "optimizer.lr", marks=pytest.mark.slow),
        pytest.param("optimizer: {'lr.x': 1}", "optimizer.lr.x", "optimizer.", marks=pytest.mark.slow),
    ],
)
def test_an_unknown_key_is_named_with_the_file_and_the_nearest_known_one(text, key, nearest, tmp_path):
    path = written(tmp_path, text)
    message = refusal(path)
    assert message.startswith(f"{path}: '{key}' is not a key") and f"The nearest key: {nearest}" in message


def test_an_unknown_key_of_a_change_is_named():
    assert "'training.step' is not a key of this recipe. The nearest key: training.steps" in refusal("tiny", ["training.step=3"])
    assert "'size'" in refusal("tiny", ["size=base"])
    for change in ("optimizer.lr", "=3", ""):
        assert "section.key=value" in refusal("tiny", [change])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("training: {steps: 3}\ntraining: {seed: 1}\n", "line 2: 'training' is there twice"),
        ("loss:\n  loss_scale: 1.0\n  loss_scale: 2.0\n", "line 3: 'loss_scale' is there twice"),
        ("a: &a {lr: 1}\noptimizer:\n  <<: *a\n", "line 3: '<<' is a merge"),
        ("optimizer: 3\n", "a section holds keys and values"),
        ("optimizer: [lr]\n", "a section holds keys and values"),
        ("- 1\n", "not a mapping"),
        ("tiny\n", "not a mapping"),
        ("size: huge\n", "size: not one of tiny, base"),
        ("size: [tiny]\n", "size: not one of tiny, base"),
        ("optimizer: {lr: 1\n", "line 2: not YAML"),
        ("optimizer:\n\tlr: 1\n", "line 2: not YAML"),
        ("optimizer: !!python/object/apply:os.getcwd []\n", "line 1: not YAML"),
        ("optimizer: {lr: 2020-99-99}\n", "not YAML"),
        ("a: 1\n---\nb: 2\n", "not YAML"),
        ("[" * 5000, "not YAML"),
        ("optimizer: {lr: *a}\n", "line 1: not YAML"),
        ("? [a]\n: 1\n", "not YAML"),
        ('optimizer: {"\\e[31mlr": 1}\n', "'optimizer.\\x1b[31mlr' is not a key"),
        ('optimizer: {lr: "\\e[31m"}\n', "optimizer.lr='\\x1b[31m'"),
        ("#" * 1_000_001, "more than 1000000 bytes"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_with_its_place(text, said, tmp_path):
    """Nothing in it is run, and nothing of it steers a terminal."""
    path = written(tmp_path, text)
    message = refusal(path)
    assert message.startswith(str(path)) and said in message and message.isprintable() and len(message) < 400


def test_a_file_that_is_not_there_or_no_text(tmp_path):
    assert "nowhere.yaml: No such file" in refusal("nowhere.yaml") and "one of tiny, base" in refusal("nowhere.yaml")
    assert "irectory" in refusal(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refusal(tmp_path / "binary")
    assert "a\\x00b: not UTF-8" in refusal("a\0b")


def test_settings_do_not_change_and_are_checked_however_they_are_made():
    config = Config.load("tiny")
    with pytest.raises(AttributeError, match="immutable"):
        config.optimizer.lr = 1.0
    with pytest.raises(UsageError, match=r"optimizer.lr=-1"):
        Optimizer(lr=-1, grad_clip_norm=None)
    with pytest.raises(UsageError, match=r"model.heads=5"):
        config.with_(**{"model.heads": 5})
    assert config == Config.load("tiny") and hash(config) == hash(Config.load("tiny"))


def test_reading_settings_imports_no_torch():
    use = "from nanproof_recipes.latent_dlm.config import Config; Config.load('base')"
    code = f"import sys; {use}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_a_person_has_set_is_known(tmp_path):
    """In a file or by a change; a size that ships has chosen nothing. Arms leave such keys as they are."""
    path = written(tmp_path, "size: base\noptimizer:\n  lr: 2e-4\nloss:\n  loss_scale: 2.0\n")
    assert Config.chosen("base") == frozenset()
    assert Config.chosen("tiny", ["training.seed=3"]) == {"training.seed"}
    assert Config.chosen(path, ["optimizer.eps=1e-6"]) == {"optimizer.lr", "loss.loss_scale", "optimizer.eps"}
    config = Config.load(path)
    assert configured(config, setting("guarded"), Config.chosen(path)).optimizer.lr == 2e-4
    assert configured(config, setting("guarded")).optimizer.lr == 1e-4
    with pytest.raises(UsageError, match="not a key of this recipe"):
        Config.chosen(written(tmp_path, "optimizer:\n  rl: 1\n"))
