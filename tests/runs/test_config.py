"""Configuration: every mistake is an error that names the file, the key and the nearest valid one."""

import tomllib
from pathlib import Path

import pytest

from protofed import FPL, Adam, Asam, BadInput, Sgd
from protofed.methods import METHODS
from protofed.runs.config import config
from protofed.runs.config.toml import section_text

GOOD = """
[task]
name = "minidigits"

[method]
name = "fpl"
temperature = 0.05

[training]
rounds = 4
seed = 3

[training.optimizer]
name = "sgd"
lr = 0.1
nesterov = true
momentum = 0.9
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "experiment.toml"
    path.write_text(text)
    return path


def test_a_file_becomes_method_training_and_task(tmp_path: Path) -> None:
    loaded = config.load(written(tmp_path, GOOD))
    assert loaded.method == FPL(temperature=0.05)
    assert loaded.training.rounds == 4
    assert loaded.training.seed == 3
    assert loaded.training.optimizer == Sgd(lr=0.1, nesterov=True, momentum=0.9)
    assert len(loaded.experiment().federation.ids) == 12


@pytest.mark.parametrize(
    ("change", "line", "message"),
    [
        (("temperature", "temprature"), 7, "method.temprature: unknown key; did you mean 'temperature'?"),
        (('"fpl"', '"fpll"'), 6, "method.name: 'fpll' is unknown; did you mean 'fpl'?"),
        (('"minidigits"', '"minidigit"'), 3, "task.name: 'minidigit' is unknown; did you mean 'minidigits'?"),
        (('name = "sgd"', 'name = "sdg"'), 14, "training.optimizer.name: 'sdg' is unknown; did you mean 'sgd'?"),
        (('name = "fpl"', ""), None, "method.name: is missing; one of fpl, fedseproto,"),
        (("lr = 0.1", "lr = -0.1"), 15, "training.optimizer.lr: must be greater than 0, not -0.1"),
        (("lr = 0.1", "lr = nan"), 15, "training.optimizer.lr: must be a finite number"),
        (("lr = 0.1", 'lr = "0.1"'), 15, "training.optimizer.lr: must be a valid number, not '0.1'"),
        (("lr = 0.1", "learning_rate = 0.1"), 15, "training.optimizer.learning_rate: unknown key"),
        (("momentum = 0.9", ""), 13, "training.optimizer: nesterov = true needs a momentum above 0"),
        (("rounds = 4", "rounds = 0"), 10, "training.rounds: must be greater than or equal to 1, not 0"),
        (("rounds = 4", "rounds = 4.5"), 10, "training.rounds: must be a valid integer, not 4.5"),
        (("rounds = 4", "round = 4"), 10, "training.round: unknown key; did you mean 'rounds'?"),
        (("rounds = 4", "fraction = 1.5"), 10, "training.fraction: must be less than or equal to 1, not 1.5"),
        (("rounds = 4", "lr = 0.1"), 10, "training.lr: unknown key; it is a key of [training.optimizer]"),
        (("[training.optimizer]", "[runtime]"), 15, "runtime.lr: unknown key; it is a key of [training.optimizer]"),
        (("[training]", "[trainig]"), 9, "trainig: unknown section; did you mean 'training'?"),
        (("[training.optimizer]", "[optimizer]"), 13, "optimizer: unknown section; it is a key of [training]"),
        (("temperature = 0.05", "consistency = 1"), 7, "method.consistency: must be a valid boolean, not 1"),
        (
            ("temperature = 0.05", 'finch_level = "middle"'),
            7,
            "method.finch_level: must be 'last' or 'first', not 'middle'",
        ),
    ],
)
def test_a_mistake_names_file_line_and_key(
    tmp_path: Path, change: tuple[str, str], line: int | None, message: str
) -> None:
    path = written(tmp_path, GOOD.replace(*change, 1))
    with pytest.raises(BadInput) as caught:
        config.load(path)
    place = path if line is None else f"{path}:{line}"
    assert f"{place}: {message}" in str(caught.value)


def test_all_mistakes_are_said_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("rounds", "runds").replace("temperature", "temp").replace("lr = 0.1", "lr = 0")
    with pytest.raises(BadInput) as caught:
        config.load(written(tmp_path, text))
    for key in ("training.runds", "method.temp", "training.optimizer.lr"):
        assert f"{key}: " in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nowhere\.toml: there is no such file"):
        config.load(tmp_path / "nowhere.toml")


def test_a_folder_is_not_an_experiment(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        config.load(tmp_path)


@pytest.mark.parametrize("text", ["[task\n", "rounds = \n", "a = 1\na = 2\n[b]", "\x00"])
def test_unreadable_toml_is_named_with_its_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInput, match=r"experiment\.toml: not valid TOML: .*line [12]"):
        config.load(written(tmp_path, text))


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="cannot be read"):
        config.load(path)


def test_overrides_change_values_and_are_blamed_for_their_mistakes(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    changed = config.load(path, ["method.temperature=0.5", "method.finch_level=first", "evaluation.every=2"])
    assert changed.method == FPL(temperature=0.5, finch_level="first")
    assert changed.evaluation.every == 2
    with pytest.raises(BadInput, match=r"--set: method\.temperature: must be greater than 0, not -2"):
        config.load(path, ["method.temperature=-2"])
    with pytest.raises(BadInput, match=r"write it as section\.key=value"):
        config.load(path, ["method.temperature"])
    with pytest.raises(BadInput, match="'rounds' is a value, not a section"):
        config.load(path, ["training.rounds.x=1"])
    with pytest.raises(BadInput, match=r"^--set: runtim: unknown section; did you mean 'runtime'"):
        config.load(path, ["runtim.threads=1"])


def test_the_resolved_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    loaded = config.load(written(tmp_path, GOOD), ["training.optimizer.weight_decay=1e-5"])
    again = config.parse(tomllib.loads(loaded.toml()), "again")
    assert again == loaded
    assert again.identity == loaded.identity


@pytest.mark.parametrize("method", METHODS)
def test_every_method_resolves_to_all_its_settings(method: str) -> None:
    parsed = config.parse({"task": {"name": "minidigits"}, "method": {"name": method}}, "test")
    again = config.parse(tomllib.loads(parsed.toml()), "again")
    assert again == parsed
    assert parsed.resolved()["method"]["name"] == method


def test_nested_optimisers() -> None:
    table = {"name": "asam", "rho": 0.7, "base": {"name": "adam", "lr": 0.002}}
    parsed = config.parse(
        {"task": {"name": "minidigits"}, "method": {"name": "fedavg"}, "training": {"optimizer": table}}, "test"
    )
    assert parsed.training.optimizer == Asam(base=Adam(lr=0.002), rho=0.7)
    assert config.parse(tomllib.loads(parsed.toml()), "again") == parsed


def test_the_identity_changes_with_every_setting_that_changes_numbers_and_only_then() -> None:
    plain = {"task": {"name": "minidigits"}, "method": {"name": "fpl"}}
    reference = config.parse(plain, "test").identity
    harmless = ["evaluation.every=2", "evaluation.clients=1", "saving.on_error=warn", "runtime.workers=3"]
    assert {config.parse(plain, "test", [change]).identity for change in harmless} == {reference}
    assert (
        config.parse({"method": {"name": "fpl", "temperature": 0.02}, "task": plain["task"]}, "x").identity == reference
    )
    changes = ["method.temperature=0.03", "training.seed=1", "runtime.threads=2", "task.num_clients=5"]
    plain = {"task": {"name": "minidigits_skewed"}, "method": {"name": "fpl"}}
    reference = config.parse(plain, "test").identity
    identities = {config.parse(plain, "test", [change]).identity for change in changes}
    assert len(identities | {reference}) == 5


def identity(**runtime: object) -> str:
    table = {"task": {"name": "minidigits"}, "method": {"name": "fpl"}, "runtime": runtime}
    return config.parse(table, "test").identity


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


def test_runtimes_that_give_equal_bits_share_a_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    names = (
        {"name": "auto"},
        {"name": "sequential"},
        {"name": "workers", "workers": 3},
        {"name": "auto", "device": "cpu"},
    )
    assert len({identity(**one) for one in names}) == 1
    assert identity(name="sequential", deterministic=False) == identity(), "it is for GPUs"
    assert identity(name="cohort", device="cpu") == identity(name="cohort", executor="streams")


@pytest.mark.usefixtures("gpu")
def test_on_a_gpu_auto_is_the_cohort_and_not_the_cpu() -> None:
    assert identity() == identity(name="cohort") == identity(device="cuda:1")
    assert identity(device="cpu") == identity(name="sequential") == identity(name="workers")
    ways = (
        *({}, {"device": "cpu"}, {"precision": "bf16"}, {"precision": "tf32"}, {"deterministic": False}),
        *({"executor": "streams"}, {"executor": "stacked"}, {"name": "sequential", "device": "cuda"}),
        *({"name": "cohort", "device": "cpu"}, {"threads": 2}),
    )
    assert len({identity(**way) for way in ways}) == len(ways)


def test_auto_does_not_share_a_hash_between_cpu_and_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for has_gpu in (False, True):
        monkeypatch.setattr("torch.cuda.is_available", lambda has_gpu=has_gpu: has_gpu)
        found.add(identity())
    assert len(found) == 2


def test_one_setting_of_the_optimiser_changes_that_one_alone() -> None:
    plain = {"task": {"name": "minidigits"}, "method": {"name": "fedavg"}}
    changed = config.parse(plain, "test", ["training.optimizer.lr=0.05"])
    assert changed.training.optimizer == Sgd(lr=0.05, momentum=0.9, weight_decay=1e-5)
    named = config.parse(plain, "test", ["training.optimizer.name=sgd", "training.optimizer.lr=0.05"])
    assert named.training.optimizer == Sgd(lr=0.05)  # one that is named starts from its own defaults


def test_toml_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nested too deeply"):
        config.load(written(tmp_path, "a = " + "[" * 5000 + "]" * 5000))


def test_every_text_can_be_read_back() -> None:
    texts = ["a\x7fb", "\U0001f600", 'quote " and \\', "\u2028", "line\nend"]
    written = section_text("x", {**dict.fromkeys(texts, 1), "values": texts})
    assert tomllib.loads(written) == {"x": {**dict.fromkeys(texts, 1), "values": texts}}
