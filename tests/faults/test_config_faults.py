"""Configurations that are mistaken, misleading, hostile or contradictory (rows C1 to C4)."""

import json
import os
import random
import string
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clocks import PATIENCE
from protofed import BadInput, Data
from protofed.cli.app import main
from protofed.engine.training import Training
from protofed.methods import METHODS, bases_of
from protofed.optim.optimizers import OPTIMIZERS
from protofed.runs import compare
from protofed.runs.config import config
from protofed.runs.config.config import Config
from protofed.runs.config.schema import field_names
from protofed.runs.config.sections import EvaluationSettings
from protofed.runs.config.toml import MAX_BYTES, document
from protofed.runs.config.toml_locations import Key, Lines
from protofed.runs.runtime_choice import RuntimeSettings
from protofed.tasks import TASKS
from run_doubles import small_task

PLAIN = '[task]\nname = "minidigits"\n[method]\nname = "fedavg"\n'


def written(text: str) -> Path:
    path = Path("experiment.toml")
    path.write_bytes(text.encode())
    return path


def refusal(text: str, overrides: Sequence[str] = ()) -> str:
    """What is said of a file with this text."""
    with pytest.raises(BadInput) as caught:
        config.load(written(text), overrides)
    return str(caught.value)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# ---- C1: keys that are not known


@dataclass(frozen=True)
class Place:
    """A key of a section, and the section with room for another line."""

    header: str
    before: str
    key: str
    known: tuple[str, ...]

    def text(self, line: str) -> str:
        """A file with one line more, which is its last."""
        others = "" if self.header == "task" else '[task]\nname = "minidigits"\n'
        others += "" if self.header == "method" else '[method]\nname = "fedavg"\n'
        return f"{others}[{self.header}]\n{self.before}{line}\n"


def places() -> Iterator[Place]:
    """Every key of every section, with every task, method and optimiser."""
    for header, registry in (("task", TASKS), ("method", METHODS), ("training.optimizer", OPTIMIZERS)):
        for name, cls in registry.items():
            known = ("name", *field_names(cls))
            yield from (Place(header, f'name = "{name}"\n', key, known) for key in known if key != "name")
        if header != "training.optimizer":  # where no name is asked for
            yield Place(header, "", "name", ("name",))
    for header, plain in (("training", Training), ("runtime", RuntimeSettings), ("evaluation", EvaluationSettings)):
        known = field_names(plain)
        yield from (Place(header, "", key, known) for key in known)


PLACES = tuple(places())


def typo(word: str, draw: random.Random) -> str:
    """A letter more, less or other, or two that changed places."""
    at, letter = draw.randrange(len(word)), draw.choice(string.ascii_lowercase + "_")
    match draw.choice(("insert", "delete", "replace", "swap")):
        case "insert":
            return word[:at] + letter + word[at:]
        case "delete":
            return word[:at] + word[at + 1 :]
        case "replace":
            return word[:at] + letter + word[at + 1 :]
    return word[: at - 1] + word[at] + word[at - 1] + word[at + 1 :] if at else word


def test_there_are_at_least_sixty_different_keys() -> None:
    assert len({place.key for place in PLACES}) >= 60


def test_of_five_thousand_typos_the_right_key_is_named_for_98_in_100() -> None:
    """C1. Typos are spread evenly over the different keys; each is also refused, with its line."""
    draw = random.Random(0)
    of_key = {key: [place for place in PLACES if place.key == key] for key in {p.key: None for p in PLACES}}
    right = tried = 0
    while tried < 5000:
        place = draw.choice(of_key[draw.choice([*of_key])])
        word = typo(place.key, draw)
        if not word or word in place.known:
            continue
        tried += 1
        right += f"; did you mean {place.key!r}?" in said_of_the_last_line(place.text(f"{word} = 1"))
    assert right / tried >= 0.98, right / tried


def said_of_the_last_line(text: str) -> str:
    table = tomllib.loads(text)
    lines = Lines(text, table)
    with pytest.raises(BadInput) as caught:
        config.parse(table, lambda key: f"line {lines.of(key)}")
    (said,) = [said for said in str(caught.value).splitlines() if said.startswith(f"line {len(text.splitlines())}: ")]
    assert ": unknown key; " in said
    return said


def camel(word: str) -> str:
    return "".join(part.capitalize() for part in word.split("_"))


def test_dashes_capitals_and_spaces_are_always_understood() -> None:
    """C1: at least 210 spellings."""
    tried = 0
    for place in PLACES:
        spellings = {place.key.replace("_", "-"), camel(place.key), place.key.upper(), place.key.replace("_", " ")}
        for word in spellings - {place.key}:
            tried += 1
            said = refusal(place.text(f'"{word}" = 1'))
            assert f"unknown key; did you mean {place.key!r}?" in said, (place, word, said)
    assert tried >= 210


def test_an_unknown_key_is_never_ignored() -> None:
    for place in PLACES:
        if place.key != "name":
            assert f"{place.header}.zzz: unknown key" in refusal(place.text("zzz = 1"))
    assert "zzz: unknown section" in refusal("zzz = 1\n" + PLAIN)
    assert "task.nmae: unknown key; did you mean 'name'?" in refusal('[task]\nnmae = "minidigits"\n')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[training]\nthreads = 2", "training.threads: unknown key; it is a key of [runtime]"),
        ("[training]\nlr = 0.1", "training.lr: unknown key; it is a key of [training.optimizer]"),
        ("[runtime]\nseed = 2", "runtime.seed: unknown key; it is a key of [training]"),
        ("[evaluation]\nrounds = 2", "evaluation.rounds: unknown key; it is a key of [training]"),
        ("[training.optimizer]\nevery = 2", "training.optimizer.every: unknown key; it is a key of [evaluation]"),
        ("[runtime]\nprojected = true", "runtime.projected: unknown key; it is a key of [task]"),
    ],
)
def test_a_key_of_another_section_is_sent_there(text: str, said: str) -> None:
    assert f"experiment.toml:6: {said}" in refusal(PLAIN + text)


# ---- C1: the lines of keys

WORDS = ("a", "b", "c-1", '"a"', "'b'", '"a.b"', r'"\u0061"', "'#'", '"x = 1"', "'[t]'", '"é"')
VALUES = (
    "1",
    "1.5",
    "'it'",
    '"a # b"',
    '"\\"#["',
    "2020-01-01T10:00:00.5",
    "[1, 2] # ]",
    "[\n  1, # ] a = 2\n  [2],\n]",
    "['''\n]''', 3]",
    '"""\n[t]\na = 1\n"""',
    '"""a""b\\"""c"""',
    '"""x"""""',
    '["""x"""", 1]',
    "['''x'''', 1]",
    "'''\n[a]\nb = 2'''''",
    "{a = 1, b = {a = 2}}",
    '{a = """\n\n""", b = [\n1\n]}',
    "{}",
)


@st.composite
def documents(draw: st.DrawFn) -> str:
    """Valid TOML of every kind of statement, among blank lines and comments."""
    keys = st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(" . ".join)
    statements = st.one_of(
        keys.map(lambda key: f"[ {key}]"),
        keys.map(lambda key: f"[[{key} ]] # [a]"),
        st.tuples(keys, st.sampled_from(VALUES)).map(lambda pair: f"  {pair[0]} = {pair[1]}"),
        st.sampled_from(["", "# a = 1", "\t", "# '''"]),
    )
    text = ""
    for statement in draw(st.lists(statements, max_size=12)):
        if is_valid(text + statement):
            text += statement + draw(st.sampled_from(["\n", "\r\n"]))
    return text


def is_valid(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


def keys_in(table: dict[str, Any], above: Key = ()) -> Iterator[Key]:
    for word, value in table.items():
        yield (*above, word)
        if isinstance(value, dict):
            yield from keys_in(value, (*above, word))


@given(documents())
def test_the_line_of_a_key_is_where_the_text_first_has_it(text: str) -> None:
    """C1: up to the line before, the text is whole and lacks the key; the first whole text from there on has it."""
    rows = text.splitlines(keepends=True)
    table = tomllib.loads(text)
    for key in keys_in(table):
        line = Lines(text, table).of(key)
        assert line is not None
        before = tomllib.loads("".join(rows[: line - 1]))
        after = next("".join(rows[:n]) for n in range(line, len(rows) + 1) if is_valid("".join(rows[:n])))
        assert key not in keys_in(before)
        assert key in keys_in(tomllib.loads(after))


def test_what_is_not_in_the_text_has_no_line() -> None:
    text = "[[a]]\nb = 1\n[a.c]\nd = 2\n[e]\nf = {g = 1}\n"
    table = tomllib.loads(text)
    assert Lines(text, table).of(("a",)) == 1
    for absent in (("a", "b"), ("a", "c", "d"), ("e", "h"), ("e", "f", "h"), ("z",), ("e.f",)):
        assert Lines(text, table).of(absent) is None, absent
    assert Lines(text, table).of(("e", "f", "g")) == 6


# ---- C2: values that are easily taken for others

FOLDER = '[task]\nname = "custom"\npath = "x"\n'
TRAINING, OPTIMIZER = PLAIN + "[training]\n", PLAIN + "[training.optimizer]\n"


@pytest.mark.parametrize(
    ("text", "keys", "value"),
    [
        (OPTIMIZER + "lr = 1e-3", "training.optimizer.lr", 0.001),
        (OPTIMIZER + "lr = 1", "training.optimizer.lr", 1.0),
        (OPTIMIZER + "lr = 1E+2", "training.optimizer.lr", 100.0),
        (OPTIMIZER + "weight_decay = 0e-500", "training.optimizer.weight_decay", 0.0),
        (TRAINING + "rounds = 1_000", "training.rounds", 1000),
        (TRAINING + "rounds = 0x10", "training.rounds", 16),
        (TRAINING + "rounds = 0o10", "training.rounds", 8),
        (TRAINING + "rounds = 0b10", "training.rounds", 2),
        (TRAINING + "rounds = +7", "training.rounds", 7),
        (TRAINING + "seed = 9223372036854775807", "training.seed", 2**63 - 1),
        ("\ufeff" + TRAINING + "rounds = 3", "training.rounds", 3),
        ((TRAINING + "rounds = 3\nseed = 4\n").replace("\n", "\r\n"), "training.seed", 4),
        (TRAINING + '"rounds" = 3', "training.rounds", 3),
        (TRAINING + '"\\u0072ounds" = 3', "training.rounds", 3),
        ('task = {name = "minidigits"}\nmethod.name = "fedavg"\ntraining.rounds = 3', "training.rounds", 3),
        (PLAIN + '[runtime]\ndevice = """\\\n  cpu"""', "runtime.device", "cpu"),
        (
            '[task]\nname = "custom"\npath = "${HOME}/$(id)/~"\n[method]\nname = "fedavg"',
            "task.path",
            "${HOME}/$(id)/~",
        ),
        ('[task]\nname = "custom"\npath = \'C:\\new\'\n[method]\nname = "fedavg"', "task.path", "C:\\new"),
        (
            FOLDER + 'leave_out = ["no", "1.10", "010"]\n[method]\nname = "fedavg"',
            "task.leave_out",
            ["no", "1.10", "010"],
        ),
    ],
)
def test_what_looks_odd_and_is_right_has_its_value(text: str, keys: str, value: object) -> None:
    found: Any = config.load(written(text))
    for word in keys.split("."):
        found = getattr(found, word)
    assert (type(found), found) == (type(value), value)


TRAPS = [
    # the kind of a value
    (OPTIMIZER + 'lr = "1e-3"', ":6: training.optimizer.lr: must be a valid number, not '1e-3'"),
    (OPTIMIZER + "lr = true", ":6: training.optimizer.lr: must be a valid number, not True"),
    (OPTIMIZER + "lr = []", ":6: training.optimizer.lr: must be a valid number, not []"),
    (OPTIMIZER + "nesterov = 0", ":6: training.optimizer.nesterov: must be a valid boolean, not 0"),
    (OPTIMIZER + 'nesterov = "no"', ":6: training.optimizer.nesterov: must be a valid boolean, not 'no'"),
    (TRAINING + "rounds = 3.0", ":6: training.rounds: must be a valid integer, not 3.0"),
    (TRAINING + "rounds = 1e3", ":6: training.rounds: must be a valid integer, not 1000.0"),
    (TRAINING + "rounds = true", ":6: training.rounds: must be a valid integer, not True"),
    (TRAINING + 'rounds = "3"', ":6: training.rounds: must be a valid integer, not '3'"),
    (TRAINING + "rounds = 2020-01-01", ":6: training.rounds: must be a valid integer, not datetime.date"),
    (TRAINING + "rounds = 12:30:45", ":6: training.rounds: must be a valid integer, not datetime.time"),
    (TRAINING + "rounds = [3]", ":6: training.rounds: must be a valid integer, not [3]"),
    (TRAINING + 'optimizer = "sgd"', ":6: training.optimizer: must be a section, [training.optimizer], not 'sgd'"),
    ("training = 3\n" + PLAIN, ":1: training: must be a section, [training], not 3"),
    (PLAIN + "[[training]]\nrounds = 3", ":5: training: must be a section, [training], not [{'rounds': 3}]"),
    (FOLDER + "channels = true", ":4: task.channels: must be a whole number, not True"),
    (FOLDER + "channels = 1.0", ":4: task.channels: must be a whole number, not 1.0"),
    (FOLDER + 'leave_out = "id"', ":4: task.leave_out: 'str' instances are not allowed"),
    (FOLDER + 'leave_out = ["id", 1]', ":4: task.leave_out: must be a valid string, not 1"),
    (FOLDER + "label = 2020-01-01", ":4: task.label: must be a valid string"),
    ('[task]\nname = "digits"\nclients = {mnist = 1, usps = true}', ":3: task.clients.usps: must be a valid integer"),
    # its range
    (OPTIMIZER + "lr = nan", ":6: training.optimizer.lr: must be a finite number, not nan"),
    (OPTIMIZER + "lr = -inf", ":6: training.optimizer.lr: must be a finite number, not -inf"),
    (OPTIMIZER + "lr = 0", ":6: training.optimizer.lr: must be greater than 0, not 0"),
    (OPTIMIZER + "lr = 1e400", "experiment.toml: not valid TOML: 1e400 is too large for a number"),
    (OPTIMIZER + "weight_decay = 1e-400", "experiment.toml: not valid TOML: 1e-400 is too close to 0 for a number"),
    (TRAINING + "rounds = -1", ":6: training.rounds: must be greater than or equal to 1, not -1"),
    (TRAINING + f"rounds = {10**400}", ":6: training.rounds: a whole number must fit into 64 bits"),
    (TRAINING + "seed = 9223372036854775808", ":6: training.seed: a whole number must fit into 64 bits"),
    (OPTIMIZER + f"lr = {10**400}", ":6: training.optimizer.lr: a whole number must fit into 64 bits"),
    (TRAINING + "rounds = 0x" + "f" * 9000, ":6: training.rounds: a whole number must fit into 64 bits"),
    (TRAINING + "rounds = " + "9" * 5000, "experiment.toml: not valid TOML: Exceeds the limit (4300 digits)"),
    # what is not TOML, though something like it is
    (TRAINING + "rounds = 010", "not valid TOML: Expected newline or end of document after a statement (at line 6"),
    (TRAINING + "rounds = no", "not valid TOML: Invalid value (at line 6"),
    (TRAINING + "rounds = True", "not valid TOML: Invalid value (at line 6"),
    (TRAINING + "rounds: 3", "not valid TOML: Expected '=' after a key in a key/value pair (at line 6"),
    (TRAINING + "rounds = 3 seed = 4", "not valid TOML: Expected newline or end of document after a statement (at"),
    (OPTIMIZER + "lr = .5", "not valid TOML: Invalid value (at line 6"),
    (OPTIMIZER + "lr = 1.", "not valid TOML: Expected newline or end of document after a statement (at line 6"),
    (TRAINING + "# a comment\rrounds = 3", "not valid TOML: Found invalid character '\\r' (at line 6"),
    (TRAINING + "rounds = 3\x00", "not valid TOML: Expected newline or end of document after a statement (at line 6"),
    # said twice
    (TRAINING + "rounds = 3\nrounds = 4\n", "not valid TOML: Cannot overwrite a value (at line 7"),
    (TRAINING + 'rounds = 3\n"rounds" = 4\n', "not valid TOML: Cannot overwrite a value (at line 7"),
    (PLAIN + '[method]\nname = "fpl"', "not valid TOML: Cannot declare ('method',) twice (at line 5"),
    (TRAINING + "optimizer.lr = 1\n[training.optimizer]", "not valid TOML: Cannot declare ('training', 'optimizer') t"),
    (TRAINING + "optimizer = {lr = 1}\noptimizer.lr = 2", "not valid TOML: Cannot"),
    (TRAINING + "optimizer = {lr = 1, lr = 2}", "not valid TOML: Duplicate inline table key 'lr' (at line 6"),
    # names
    ('[task]\nname = ""', ":2: task.name: '' is unknown; known: minidigits"),
    ('[task]\nname = ["minidigits"]', ":2: task.name: ['minidigits'] is unknown"),
    ('[task]\nname = "minidigits "', ":2: task.name: 'minidigits ' is unknown; did you mean 'minidigits'?"),
    (TRAINING + '"r\u043eunds" = 3', r':6: training."r\u043eunds": unknown key; did you mean ' + "'rounds'?"),
    (TRAINING + "r\u043eunds = 3", "not valid TOML: Expected '=' after a key in a key/value pair (at line 6"),
    (TRAINING + '"optimizer.lr" = 3', ':6: training."optimizer.lr": unknown key'),
    ('"training.rounds" = 3\n' + PLAIN, ':1: "training.rounds": unknown section'),
    (TRAINING + '"" = 3', ':6: training."": unknown key'),
    (TRAINING + '"__class__" = 3', ":6: training.__class__: unknown key"),
]


@pytest.mark.parametrize(("text", "said"), TRAPS, ids=range(len(TRAPS)))
def test_what_looks_right_and_is_not_is_refused(text: str, said: str) -> None:
    """C2: a value is the one that is written, or an error that names it."""
    assert said in refusal(text)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("task.path=data", "data"),
        ("task.path=C:\\data#1", "C:\\data#1"),
        ("task.path=010", "010"),
        ("task.path=no", "no"),
        ("task.path=a=b", "a=b"),
        ("task.path=a,b", "a,b"),
        ("task.path=1,2", "1,2"),
        ("task.path=1}\nx = {", "1}\nx = {"),
        ("task.path = a b ", "a b"),
        ('task.path="1"', "1"),
        ("task.path='a # b'", "a # b"),
        ("task.path=${HOME}", "${HOME}"),
        ("task.leave_out=['a', 'b']", ["a", "b"]),
        ("task.test_fraction=1e-1", 0.1),
        ("task.skip_damaged=true", True),
        ("task.pixels=0x20", 32),
    ],
)
def test_an_override_has_the_value_of_toml_or_is_a_bare_word(override: str, value: object) -> None:
    table = {"task": {"name": "custom", "path": "x"}, "method": {"name": "fedavg"}}
    found = config.parse(table, "test", [override])
    assert getattr(found.task, override.partition("=")[0].strip().split(".")[1]) == value


OVERRIDES = [
    (["training.rounds=1#2"], "--set: training.rounds: must be a valid integer, not '1#2'"),
    (["training.rounds=1 # two"], "--set: training.rounds: must be a valid integer, not '1 # two'"),
    (["training.rounds=1\nseed=2"], "--set: training.rounds: must be a valid integer, not '1\\nseed=2'"),
    (["training.rounds=1, seed=2"], "--set: training.rounds: must be a valid integer, not '1, seed=2'"),
    (["training.rounds=True"], "--set: training.rounds: must be a valid integer, not 'True'"),
    (["training.rounds=2020-01-01"], "--set: training.rounds: must be a valid integer, not datetime.date"),
    (["training.rounds=3.0"], "--set: training.rounds: must be a valid integer, not 3.0"),
    (["training.rounds="], '--set training.rounds=: write it as section.key=value, an empty text as ""'),
    (["training.rounds"], "--set training.rounds: write it as section.key=value"),
    (["=3"], "--set =3: write it as section.key=value"),
    (["training..rounds=3"], "--set training..rounds=3: write it as section.key=value"),
    (["training.rounds=[3"], "--set training.rounds=[3: not valid TOML: "),
    (['task.name="minidigits'], '--set task.name="minidigits: not valid TOML: '),
    (["training.optimizer={lr = 1, lr = 2}"], "not valid TOML: Duplicate inline table key 'lr'"),
    ([f"training.rounds={10**400}"], "a whole number must fit into 64 bits"),
    (["training.optimizer.weight_decay=1e-400"], "1e-400 is too close to 0 for a number"),
    (["training.rounds=" + "[" * 33 + "]" * 33], "nested too deeply"),
    (["training" + ".a" * 5000 + "=1"], "nested too deeply"),
    (["rounds=3"], "--set: rounds: unknown section; it is a key of [training]"),
    (["training.Rounds=3"], "--set: training.Rounds: unknown key; did you mean 'rounds'?"),
    (["training.rounds=3", "training.rounds=4"], "--set: training.rounds: is set twice, to 3 and to 4: set it once"),
    (["runtime.threads=1", "runtime.threads=true"], "--set: runtime.threads: is set twice, to 1 and to True"),
    (["training.optimizer.lr=1", "training.optimizer={}"], "--set: training.optimizer: is set twice, also by training"),
    (["training.optimizer={lr = 1}", "training.optimizer.lr=2"], "training.optimizer.lr: is set twice, also by train"),
]


@pytest.mark.parametrize(("overrides", "said"), OVERRIDES, ids=range(len(OVERRIDES)))
def test_an_override_is_never_another_value_than_it_says(overrides: list[str], said: str) -> None:
    assert said in refusal(PLAIN, overrides)


def test_an_override_may_be_said_again_in_the_same_words() -> None:
    table = {"task": {"name": "minidigits"}, "method": {"name": "fedavg"}}
    assert config.parse(table, "test", ["training.rounds=3", "training.rounds=3"]).training.rounds == 3


# ---- C3: files that mean harm

DEEP: dict[str, Callable[[int], str]] = {
    "arrays": lambda n: "a = " + "[" * n + "]" * n,
    "inline tables": lambda n: "a = " + "{a = " * n + "1" + "}" * n,
    "dotted keys": lambda n: "a" + ".a" * n + " = 1",
    "quoted keys": lambda n: '"a"' + " . 'a'" * n + " = 1",
    "a table": lambda n: "[a" + ".a" * (n - 1) + "]",
    "tables of an array": lambda n: "[[a" + ".a" * (n - 2) + "]]",  # the array is a level of its own
    "some of each": lambda n: "[a" + ".a" * 9 + "]\nb" + ".b" * 10 + " = " + "[" * (n - 20) + "]" * (n - 20),
}


@pytest.mark.parametrize("kind", DEEP)
def test_32_levels_are_read_and_33_are_not(kind: str) -> None:
    Path("some.toml").write_text(DEEP[kind](32))
    assert document(Path("some.toml"))[0]
    Path("some.toml").write_text(DEEP[kind](33))
    with pytest.raises(BadInput, match=r"some\.toml: nested too deeply: more than 32"):
        document(Path("some.toml"))


def test_brackets_and_dots_inside_text_and_comments_are_no_levels() -> None:
    text = f'a = "{"[" * 99}" # {"[" * 99} {"a." * 99}\nb = """\n{"a." * 99}a\n"""\nc = \'{"{" * 99}\'\n'
    Path("some.toml").write_text(text)
    assert document(Path("some.toml"))[0].keys() == {"a", "b", "c"}


def test_a_file_of_half_a_megabyte_is_read_and_a_longer_one_is_not() -> None:
    Path("some.toml").write_text(PLAIN + "#" * (MAX_BYTES - len(PLAIN)))
    assert config.load(Path("some.toml")).training.rounds == 20
    Path("some.toml").write_text(PLAIN + "#" * (MAX_BYTES - len(PLAIN) + 1))
    for load in (config.load, compare.load):
        with pytest.raises(BadInput, match=r"some\.toml: is larger than 500000 bytes"):
            load(Path("some.toml"))


HOSTILE = {f"{kind}, 5000 deep": (build(5000), "nested too deeply") for kind, build in DEEP.items()} | {
    "a key of 200,000 words": ("a" + ".a" * 200_000 + " = 1", "nested too deeply"),
    "half a million brackets": ("a = " + "[" * 499_000, "nested too deeply"),
    "strings that do not end": ('"""' + '\n\\"""' * 95_000, "not valid TOML"),
    "a word that does not end": ("a" * 499_000, "not valid TOML"),
    "a long number": ("a = 0x" + "f" * 490_000, "a: a whole number must fit into 64 bits"),
    "a longer number": ("a = " + "9" * 490_000, "not valid TOML"),
    "a long key": ("a" * 490_000 + " = 1", "unknown section"),
    "a long value": (
        PLAIN + '[training]\nrounds = "' + "a" * 450_000 + '"',
        "training.rounds: must be a valid integer",
    ),
    "45,000 keys": (PLAIN + "".join(f"k{n} = 1\n" for n in range(45_000)), "and 44900 more"),
    "a class to make": (PLAIN + '_target_ = "canary.touch"\n', "method._target_: unknown key"),
    "a module for a method": (
        '[task]\nname = "minidigits"\n[method]\nname = "canary.touch"',
        "'canary.touch' is unknown",
    ),
    "a module for a task": ('[task]\nname = "canary"\n[method]\nname = "fedavg"', "task.name: 'canary' is unknown"),
    "a module for a runtime": (PLAIN + '[runtime]\nname = "canary:touch"', "runtime.name: must be 'auto'"),
    "a module for an optimiser": (
        PLAIN + '[training.optimizer]\nname = "canary"',
        "optimizer.name: 'canary' is unknown",
    ),
    "a tag": ("[task]\nname = !!python/object:canary.touch", "not valid TOML"),
    "no text": ("\x7fELF", "not valid TOML"),
}

JUDGE = """
import json, resource, sys, time, tomllib
from pathlib import Path
from protofed.errors import BadInput
from protofed.runs import compare
from protofed.runs.config import config
grown = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, said = grown(), {}
start = time.process_time()
tomllib.loads("\\n".join(f"key{k} = {k}" for k in range(30_000)))
plain = time.process_time() - start
for reader, load in (("config", config.load), ("compare", compare.load)):
    for name in sys.argv[1:]:
        start = time.process_time()
        try:
            load(Path(name))
        except BadInput as error:
            said[f"{reader} {name}"] = [str(error)[:50_000], time.process_time() - start]
print(json.dumps([said, grown() - before, "canary" in sys.modules, plain]))
"""


def test_hostile_files_are_refused_in_a_second_and_little_memory(tmp_path: Path) -> None:
    """C3. What is not a file is there too: it must not be waited for. Seconds are the process's own. On a slow
    processor a refusal may take six times as long as reading 400 kB of plain TOML."""
    expected = {}
    for k, (text, said) in enumerate(HOSTILE.values()):
        (tmp_path / f"{k}.toml").write_text(text)
        expected[f"{k}.toml"] = said
    with Path("huge.toml").open("wb") as file:
        file.truncate(100_000_000)
    os.mkfifo("pipe.toml")
    Path("loop.toml").symlink_to("loop.toml")
    Path("device.toml").symlink_to("/dev/zero")
    Path("folder.toml").mkdir()
    expected |= {
        "huge.toml": "is larger than 500000 bytes",
        "loop.toml": "symbolic links",
        "gone.toml": "no such file",
    }
    expected |= dict.fromkeys(("pipe.toml", "device.toml", "folder.toml"), "cannot be read: it is not a file")
    Path("canary.py").write_text("from pathlib import Path\nPath('sung').touch()\ndef touch(*_): ...\n")
    answer = subprocess.run(
        [sys.executable, "-c", JUDGE, *expected],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    said, megabytes, is_imported, plain = json.loads(answer.stdout)
    for name, part in expected.items():
        message, _ = said[f"config {name}"]
        assert part in message, (name, message[:300])
        assert name in message
        assert len(message) < 50_000, "a message is to be read"
        for reader in ("config", "compare"):
            _, seconds = said[f"{reader} {name}"]
            assert seconds <= max(1, 6 * plain), (reader, name, seconds)
    assert megabytes <= 200
    assert not is_imported
    assert not Path("sung").exists()


# ---- C4: settings that contradict each other

SKEWED = '[task]\nname = "minidigits_skewed"\n'
FEDAVG = '[method]\nname = "fedavg"\n'
OWN = '[task]\nname = "custom"\n'
ADAM, ASAM = '[training.optimizer]\nname = "adam"\n', '[training.optimizer]\nname = "asam"\n'

CONTRADICTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ranges": (
        PLAIN + "[training]\nrounds = 0\nepochs = 0\nbatch_size = 0\n[evaluation]\nevery = 0\n",
        ("training.rounds: ", "training.epochs: ", "training.batch_size: ", "evaluation.every: "),
    ),
    "shares": (
        PLAIN + "[training]\nfraction = 0\n[training.optimizer]\nmomentum = 1\nlr_decay = 2\n",
        ("training.fraction: ", "training.optimizer.momentum: ", "training.optimizer.lr_decay: "),
    ),
    "workers without workers": (
        PLAIN + '[runtime]\nname = "sequential"\nworkers = 3\nexecutor = "streams"\n',
        (":7: runtime.workers: the runtime sequential has no workers", ":8: runtime.executor: the runtime sequential"),
    ),
    "a cohort with workers": (
        PLAIN + '[runtime]\nname = "cohort"\nworkers = 3\nthreads = 0\n',
        ("runtime.workers: the runtime cohort has no workers", "runtime.threads: "),
    ),
    "workers on a GPU": (
        PLAIN + '[runtime]\nname = "workers"\ndevice = "cuda"\nprecision = "bf16"\nexecutor = "stacked"\n',
        (
            "runtime.device: the runtime workers runs on the CPU",
            "runtime.precision: 'bf16' is for GPUs",
            "runtime.executor",
        ),
    ),
    "precision on the CPU": (
        PLAIN + '[runtime]\nname = "cohort"\ndevice = "cpu"\nprecision = "bf16"\n[training]\nseed = -1\n',
        ("runtime.precision: 'bf16' is for GPUs", "training.seed: "),
    ),
    "precision of one after another": (
        PLAIN + '[runtime]\nname = "sequential"\nprecision = "tf32"\nworkers = 1\n',
        ("runtime.precision: 'tf32' is for GPUs", "runtime.workers: "),
    ),
    "no device": (
        PLAIN + '[runtime]\ndevice = "gpu"\n[evaluation]\nclients = -1\n',
        (":6: runtime.device: 'gpu' is not a device", "evaluation.clients: "),
    ),
    "more replies than clients": (
        SKEWED + "num_clients = 5\n" + FEDAVG + "[training]\nminimum_replies = 6\nrounds = 0\n",
        ("training.minimum_replies: is 6, but the task has only 5 clients", "training.rounds: "),
    ),
    "more replies than clients of all domains": (
        '[task]\nname = "digits"\nclients = {mnist = 1, usps = 1}\nfraction = 2\n'
        + FEDAVG
        + "[training]\nminimum_replies = 3\n",
        ("training.minimum_replies: is 3, but the task has only 2 clients", "task.fraction: "),
    ),
    "a draw that cannot be": (
        SKEWED + "concentration = 1e-9\nseed = -1\n" + FEDAVG,
        ("task.concentration: is 1e-09: give a number from 0.001", "task.seed: "),
    ),
    "another's preprocessing": (
        '[task]\nname = "fashion_mnist"\npreprocessing = "pfedcspc"\n' + FEDAVG + "[training]\nminimum_replies = 200\n",
        ("task.preprocessing: pfedcspc is not for fashion_mnist: use fedpc", "training.minimum_replies: is 200"),
    ),
    "tables without label": (
        OWN + 'kind = "tables"\nmodel = "cnn3"\n' + FEDAVG,
        ("task.path: is missing", "task.label: is missing", "task.model: 'cnn3' is not for tables: use mlp"),
    ),
    "a label that is left out": (
        FOLDER + 'kind = "tables"\nlabel = "y"\nleave_out = ["y"]\ntest_fraction = 1.0\n' + FEDAVG,
        ("task.leave_out: 'y' is the label", "task.test_fraction: "),
    ),
    "a network for other images": (
        FOLDER + 'model = "small_cnn"\npixels = 32\n' + FEDAVG + "[runtime]\nthreads = 0\n",
        ("task.model: 'small_cnn' reads images of 28 pixels, not 32", "runtime.threads: "),
    ),
    "a network for tables": (OWN + 'model = "mlp"\n' + FEDAVG, ("task.path: ", "task.model: 'mlp' is not for images")),
    "a hub of nothing": (
        '[task]\nname = "hub"\npixels = 1\n' + FEDAVG,
        ("task.source: is missing", "task.pixels: "),
    ),
    **{
        f"{method} with adam": (
            f'[task]\nname = "minidigits"\n[method]\nname = "{method}"\n{ADAM}[training]\nrounds = 0\n',
            ("is defined for clients that train with sgd, not adam", "training.rounds: "),
        )
        for method in ("fednova", "scaffold", "feddc")
    },
    "sharpness twice": (
        '[task]\nname = "minidigits"\n[method]\nname = "fedasam"\nrho = -1\n' + ASAM,
        (":7: training.optimizer.name: FedASAM makes the optimiser sharpness-aware itself", "method.rho: "),
    ),
    "half of one": (
        '[task]\nname = "minidigits"\n[method]\nname = "grace"\n[training]\nbatch_size = 1\nepochs = 0\n',
        ("training.batch_size: GRACE halves its batches", "training.epochs: "),
    ),
    "a base inside": (
        '[task]\nname = "minidigits"\n[method]\nname = "averaging"\n[method.base]\nname = "fednova"\n'
        + ADAM
        + "[runtime]\nthreads = 0\n",
        ("training.optimizer.name: FedNova is defined for", "runtime.threads: "),
    ),
    "a base that is refused": (
        '[task]\nname = "minidigits"\n[method]\nname = "ccvr"\n[method.base]\nname = "fedsr"\n[runtime]\nthreads = 0\n',
        (":6: method.base.name: ccvr cannot go around fedsr: choose one of fpl", "runtime.threads: "),
    ),
    "a base for each client": (
        '[task]\nname = "minidigits"\n[method]\nname = "ga"\nbase = {name = "fedproto"}\nstep = 2\n',
        (":5: method.base.name: ga cannot go around fedproto: choose one of fpl", "method.step: "),
    ),
    "sharpness around sharpness": (
        PLAIN + '[training.optimizer]\nname = "sam"\nrho = -1\nbase = {name = "asam"}\n',
        ("optimizer.base.name: sam cannot go around asam: choose one of sgd, adam", "training.optimizer.rho: "),
    ),
    "momentum that is not there": (
        PLAIN + "[training]\nrounds = 0\n[training.optimizer]\nname = 'sgd'\nnesterov = true\n",
        (":7: training.optimizer: nesterov = true needs a momentum above 0", "training.rounds: "),
    ),
    "replies, once the task is there": (
        PLAIN + '[training]\nminimum_replies = 13\n[runtime]\nprecision = "bf16"\n',
        ("training.minimum_replies is 13, but only 12 clients take part", "'bf16' is for GPUs"),
    ),
    "a GPU that is not there": (
        PLAIN + '[runtime]\nname = "sequential"\ndevice = "cuda:99"\n',
        ("torch finds 0 CUDA",),
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_all_said_at_once_and_nothing_is_written(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """C4. Each case has at least two mistakes, but for the last one."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    text, expected = CONTRADICTIONS[case]
    Path("experiment.toml").write_text(text)
    monkeypatch.setattr(sys, "argv", ["protofed", "run", "experiment.toml", "--out", "out"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    for part in expected:
        assert part in said
    assert said.count("\n") == len(expected), said
    assert [path.name for path in Path().iterdir()] == ["experiment.toml"]


def test_the_command_itself_ends_with_2() -> None:
    Path("experiment.toml").write_text(CONTRADICTIONS["ranges"][0])
    words = [sys.executable, "-m", "protofed.cli.app", "run", "experiment.toml", "--out", "out"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert ended.returncode == 2, ended.stderr
    assert not Path("out").exists()


def test_a_contradiction_with_a_value_that_is_wrong_itself_is_not_claimed() -> None:
    said = refusal(PLAIN + '[runtime]\nname = "sequental"\nworkers = 3\n')
    assert "runtime.name: must be" in said
    assert "runtime.workers" not in said
    said = refusal(FOLDER + 'kind = "table"\nmodel = "mlp"\n' + FEDAVG)
    assert "task.kind: must be" in said
    assert "task.model" not in said


def test_what_is_fine_together_is_not_refused() -> None:
    for runtime in (
        {"name": "workers", "workers": 3, "device": "cpu"},
        {"name": "auto", "workers": 3, "executor": "streams", "precision": "bf16"},
        {"name": "cohort", "device": "cuda:1", "precision": "bf16", "executor": "stacked"},
        {"name": "sequential", "device": "cuda", "precision": "tf32"},
    ):
        table = {"task": {"name": "minidigits"}, "method": {"name": "fedavg"}, "runtime": runtime}
        assert config.parse(table, "test").runtime == RuntimeSettings(**runtime)


def test_clients_that_cannot_be_judged_are_named_before_anything_is_done() -> None:
    task = small_task()
    tests = {name: data.rows((data.labels != 2).nonzero().flatten()) for name, data in task.tests.items()}
    only = {client: data.rows((data.labels == 2).nonzero().flatten()) for client, data in task.clients.items()}

    def judged(clients: dict[str, Data], **others: Any) -> Config:
        own = replace(task, clients=clients, tests=tests, **others)
        return Config(
            own, METHODS["fedavg"](), Training(), RuntimeSettings("sequential"), EvaluationSettings(clients=1)
        )

    with pytest.raises(BadInput, match="has no test of a class of client 'c1': set it"):
        judged({**task.clients, "c1": only["c1"]}).experiment()
    with pytest.raises(BadInput, match="of client 'c0' and 2 other clients: set it"):
        judged(only).experiment()
    judged(only, local_tests=only).experiment()


def test_what_the_task_lacks_is_said_with_everything_else() -> None:
    task = replace(small_task(), tests={}, domain_of={}, public=None)
    evaluation, training = EvaluationSettings(clients=1), Training(minimum_replies=4)
    with pytest.raises(BadInput) as caught:
        Config(task, METHODS["fedmd"](), training, RuntimeSettings("sequential"), evaluation).experiment()
    assert "evaluation.clients: the task custom has no test sets" in str(caught.value)
    assert "method.name: FedMD needs public examples" in str(caught.value)
    assert "training.minimum_replies is 4, but only 3 clients take part" in str(caught.value)


def test_every_wrapper_names_its_bases() -> None:
    """Otherwise every base of it would be refused."""
    wrappers = [cls for cls in METHODS.values() if "base" in field_names(cls)]
    assert wrappers
    for cls in wrappers:
        assert "fedavg" in bases_of(cls)
