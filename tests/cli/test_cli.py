"""The command, as a user types it."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from clocks import PATIENCE, wait_for
from protofed import METHODS, RunFailed, __version__
from protofed.cli import app
from protofed.runs.sweep import Outcome

EXPERIMENT = """
[task]
name = "minidigits"

[method]
name = "fedavg"

[training]
rounds = 3
epochs = 1
batch_size = 64
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    path = tmp_path / "first.toml"
    path.write_text(EXPERIMENT)
    return path


def protofed(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command in this process, since a new one takes seconds to import torch."""
    out, complaint, code = io.StringIO(), io.StringIO(), 0
    argv = ["protofed", *map(str, words)]
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.dict(os.environ, {"COLUMNS": "120", "TERM": "dumb"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(complaint),
        contextlib.chdir(cwd or Path.cwd()),
    ):
        try:
            app.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
    return subprocess.CompletedProcess(argv, code, out.getvalue(), complaint.getvalue())


def in_own_process(*words: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "protofed.cli.app", *map(str, words)]
    own = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "TTY_COMPATIBLE")}
    text = {**own, "COLUMNS": "120", "TERM": "dumb", **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=text, check=False)


def test_run_show_and_run_again(experiment: Path, tmp_path: Path) -> None:
    first = in_own_process("run", experiment, "--seed", 5, "--out", tmp_path / "out")
    assert first.returncode == 0, first.stderr
    assert "round 3/3  pen" in first.stdout
    assert "last five" in first.stdout
    (folder,) = (tmp_path / "out").iterdir()
    assert "seed = 5" in (folder / "config.toml").read_text()

    shown = protofed("show", folder, "--json")
    facts = json.loads(shown.stdout)
    assert facts["done"] is True
    assert [r["round"] for r in facts["rounds"]] == [1, 2, 3]
    assert facts["last_five"]["domains"].keys() == {"pen", "ink", "street", "print"}
    assert {"average", "own", "public.accuracy"} <= facts["last_five"]["metrics"].keys()

    before = (folder / "rounds.jsonl").read_bytes()
    again = protofed("run", experiment, "--set", "training.seed=5", "--out", tmp_path / "out", "--json")
    assert json.loads(again.stdout) == facts
    assert (folder / "rounds.jsonl").read_bytes() == before, "a finished run was run again"


def test_stopped_by_ctrl_c_it_saves_and_resumes_to_the_same_bytes(experiment: Path, tmp_path: Path) -> None:
    words = ["run", experiment, "--set", "training.rounds=6", "--out"]
    assert protofed(*words, tmp_path / "whole").returncode == 0
    command = [sys.executable, "-m", "protofed.cli.app", *words, tmp_path / "out"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout
    running.stdout.readline()  # the first round is done
    running.send_signal(signal.SIGINT)
    _, complaint = running.communicate(timeout=PATIENCE)
    assert running.returncode == 130
    assert "resume with the same command and --resume" in complaint
    (folder,) = (tmp_path / "out").iterdir()
    assert not (folder / "done").exists()
    saved = len((folder / "rounds.jsonl").read_text().splitlines())
    assert f"not finished: {saved} rounds so far" in protofed("show", folder).stdout

    refused = protofed(*words, tmp_path / "out")
    assert refused.returncode == 2
    assert "continue it with --resume" in refused.stderr
    assert protofed(*words, tmp_path / "out", "--resume").returncode == 0
    last = Path("checkpoint") / "000006" / "server.safetensors"
    assert (folder / last).read_bytes() == (tmp_path / "whole" / folder.name / last).read_bytes()


def test_two_processes_on_one_run_folder(experiment: Path, tmp_path: Path) -> None:
    words = ["run", experiment, "--set", "training.rounds=200", "--out", tmp_path / "out"]
    command = [sys.executable, "-m", "protofed.cli.app", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout
        first.stdout.readline()
        second = protofed(*words, "--resume")
        first.kill()
    assert second.returncode == 2
    assert f"in use by another process (pid {first.pid} on " in second.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("run", "nowhere.toml"), 2, "nowhere.toml: there is no such file"),
        (("run", "first.toml", "--set", "method.nme=1"), 2, "--set: method.nme: unknown key"),
        (("methods", "fpk"), 2, "method 'fpk' is unknown; did you mean 'fpl'?"),
        (("tasks", "mnist"), 2, "task 'mnist' is unknown"),
        (("show", "."), 2, "is not a run folder"),
        (("run", "first.toml", "--out", "first.toml/x"), 2, "cannot write to first.toml/x"),
        (("run", "first.toml", "--set", "training.minimum_replies=13"), 2, "but only 12 clients take part in a round"),
        (
            ("run", "first.toml", "--set", "training.optimizer.name=sgd", "--set", "training.optimizer.lr=1e30"),
            3,
            "diverged with",
        ),
        (("fly",), 2, "No such command"),
        (("run", "first.toml", "--grace", "5"), 2, "--grace-period"),
    ],
)
def test_bad_input_says_what_is_wrong(
    experiment: Path, words: tuple[str, ...], code: int, message: str, tmp_path: Path
) -> None:
    ended = protofed(*words, cwd=tmp_path)
    assert message in ended.stderr
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr


def test_an_error_of_a_process_is_its_exit_code(tmp_path: Path) -> None:
    ended = in_own_process("run", "nowhere.toml", cwd=tmp_path)
    assert ended.returncode == 2
    assert "nowhere.toml: there is no such file" in ended.stderr


def test_the_version() -> None:
    shown = protofed("--version")
    assert (shown.returncode, shown.stdout.split()) == (0, ["protofed", __version__])


def test_methods_and_tasks_in_text_and_json() -> None:
    listed = json.loads(protofed("methods", "--json").stdout)
    assert list(listed) == list(METHODS)
    assert all(own["about"] and own["tags"] for own in listed.values())
    personal = json.loads(protofed("methods", "--tag", "personal", "--tag", "prototype", "--json").stdout)
    assert "fedproto" in personal
    assert "fpl" not in personal
    assert "did you mean 'global'" in protofed("methods", "--tag", "globl").stderr
    fpl = json.loads(protofed("methods", "fpl", "--json").stdout)
    settings = {s["name"]: s for s in fpl["settings"]}
    assert settings["temperature"]["default"] == 0.02
    assert settings["temperature"]["meaning"].startswith("τ")
    assert "Departures" in protofed("methods", "fpl").stdout
    assert fpl["bases"] == []
    assert {"fedavg", "fedprox", "moon", "fedasam"} <= set(
        json.loads(protofed("methods", "ga", "--json").stdout)["bases"]
    )
    task = json.loads(protofed("tasks", "minidigits", "--json").stdout)
    assert len(task["clients"]) == 12
    assert "pen-0" in protofed("tasks", "minidigits").stdout


def test_own_data_are_inspected_and_the_file_that_is_written_runs(tmp_path: Path) -> None:
    (tmp_path / "patients").mkdir()
    for site, shift in (("leeds", 0), ("porto", 5)):
        rows = "".join(f"{k % 7 + shift},{'ab'[k % 2]},{'yes' if k % 3 else 'no'}\n" for k in range(60))
        (tmp_path / "patients" / f"{site}.csv").write_text("marker,group,outcome\n" + rows)
    vague = protofed("data", "inspect", "patients", cwd=tmp_path)
    assert vague.returncode == 2
    assert "--label" in vague.stdout
    ready = protofed("data", "inspect", "patients", "--label", "outcome", "--write", "first.toml", cwd=tmp_path)
    assert ready.returncode == 0, ready.stderr
    assert "Run it with: protofed compare first.toml" in ready.stdout
    small = ("first.toml", "--method", "fedavg", "--set", "training.rounds=1", "--jobs", 1)
    ran = protofed("compare", *small, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    (tmp_path / "patients" / "porto.csv").write_text("marker,group,outcome\n" + "1,a,yes\n2,b,no\n" * 20)
    again = protofed("compare", *small, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    runs = [path for path in (tmp_path / "results").iterdir() if (path / "config.toml").exists()]
    assert len(runs) == 2 * 3, "three seeds, and changed files give no old result"


def test_a_task_is_drawn_with_the_settings_that_are_asked_for(tmp_path: Path) -> None:
    drawn = protofed("tasks", "minidigits_skewed", "--set", "num_clients=5", "--plot", "--out", tmp_path / "new")
    assert drawn.returncode == 0, drawn.stderr
    for name in ("clients", "images"):
        picture = tmp_path / "new" / f"minidigits_skewed-{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert str(picture) in drawn.stdout
    listed = json.loads(protofed("tasks", "minidigits_skewed", "--set", "num_clients=5", "--json").stdout)
    assert len(listed["clients"]) == 5
    wrong = protofed("tasks", "minidigits_skewed", "--set", "num_client=5")
    assert wrong.returncode == 2
    assert "did you mean 'num_clients'" in wrong.stderr


@pytest.mark.slow
def test_demo_makes_a_table_and_a_picture(tmp_path: Path) -> None:
    made = in_own_process("demo", "--rounds", 1, "--out", tmp_path)
    assert made.returncode == 0, made.stderr
    for word in ("local", "fedavg", "fedproto", "fpl", "own", "Δ", "±"):
        assert word in made.stdout
    assert (tmp_path / "minidigits.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "report.md").read_text().count("|") > 30
    before = {path: path.read_bytes() for path in tmp_path.glob("*/rounds.jsonl")}
    assert len(before) == 12
    again = protofed("demo", "--rounds", 1, "--out", tmp_path, "--json")
    assert json.loads(again.stdout)["minidigits"].keys() == {"local", "fedavg", "fedproto", "fpl"}
    assert all(path.read_bytes() == lines for path, lines in before.items()), "finished runs were run again"


COMPARISON = """
title = "Two learning rates"
seeds = [0, 1]
target = 5

[common.training]
rounds = 1
epochs = 1

[common.evaluation]
clients = 1

[tasks.digits.task]
name = "minidigits"

[methods.FedAvg.method]
name = "fedavg"

[methods.Diverging]
method = { name = "fedavg" }
training = { minimum_replies = 12, optimizer = { lr = 1e30 } }
"""


def test_compare_reports_what_failed_and_what_did_not(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(COMPARISON)
    where = ("--out", tmp_path / "out", "--report", tmp_path / "report", "--jobs", 1)
    words = ("compare", tmp_path / "two.toml", *where)
    made = protofed(*words)
    assert made.returncode == 3
    assert "2 of 4 runs failed" in made.stderr
    report = (tmp_path / "report" / "report.md").read_text()
    assert "Diverging, seed 0: round 1: " in report
    assert "| Diverging | failed |" in report
    for heading in ("GM", "PM(V)", "PM(L)", "MF1", "I_local", "HM", "kB down", "rounds to 5 %"):
        assert heading in report
    results = json.loads((tmp_path / "report" / "results.json").read_text())
    assert len(results["results"]["digits"]["FedAvg"]) == 2
    assert results["made"]["commit"]
    before = {path: path.read_bytes() for path in tmp_path.glob("out/*/rounds.jsonl")}
    only = protofed(*words, "--set", "training.optimizer.lr=0.01", "--json")
    assert only.returncode == 0, only.stderr
    assert json.loads(only.stdout)["digits"].keys() == {"FedAvg", "Diverging"}
    assert all(path.read_bytes() == lines for path, lines in before.items())


def test_a_comparison_whose_runs_end_before_their_time_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "two.toml").write_text(COMPARISON)
    stopped = lambda configs, *_, **__: [Outcome([], is_done=False) for _ in configs]  # noqa: E731
    monkeypatch.setattr("protofed.runs.sweep.sweep", stopped)
    monkeypatch.setattr(
        sys, "argv", ["protofed", "compare", str(tmp_path / "two.toml"), "--out", str(tmp_path / "out")]
    )
    with pytest.raises(RunFailed, match="a run ended early although nobody stopped it"):
        app.app(standalone_mode=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("as_json", [False, True])
def test_a_comparison_that_is_stopped_leaves_a_partial_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], as_json: bool
) -> None:
    (tmp_path / "two.toml").write_text(COMPARISON)
    command = ["protofed", "compare", str(tmp_path / "two.toml"), "--out", str(tmp_path / "out"), "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", [*command, *(["--json"] if as_json else [])])

    def stopped(configs: Any, *_: Any, progress: Any, should_stop: Any, **__: Any) -> list[Outcome]:
        progress([1, 0, 0, 0])
        os.kill(os.getpid(), signal.SIGTERM)
        assert should_stop()
        return [Outcome([], is_done=False, failure="no files"), *([Outcome([], is_done=False)] * 3)]

    monkeypatch.setattr("protofed.runs.sweep.sweep", stopped)
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 128 + signal.SIGTERM
    report = (tmp_path / "out" / "reports" / "two" / "report.md").read_text()
    assert "**Partial" in report
    assert "- FedAvg, seed 1: 0 of 1 rounds" in report
    said = capfd.readouterr()
    assert "1 of 4 runs failed" in said.err
    shown = said.err if as_json else said.out
    assert "FedAvg, seed 0: 1 of 1 rounds" in shown
    if as_json:
        assert json.loads(said.out)["digits"] == {"FedAvg": [], "Diverging": []}
    else:
        assert "not done: Diverging, seed 0: 0 of 1 rounds" in said.out
        assert "partial report" in said.out


def demo_process(out: Path) -> "subprocess.Popen[str]":
    """A demo that has begun to work."""
    command = [sys.executable, "-m", "protofed.cli.app", "demo", "--rounds", "50", "--out", str(out)]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(lambda: len(list(out.glob("*/checkpoint/00000[1-9]"))) > 0)
    return running


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_told_to_stop_stops_its_runs_after_their_rounds(tmp_path: Path, number: int) -> None:
    """The signal goes to the whole group, as a terminal and `timeout` send it."""
    with demo_process(tmp_path) as running:
        os.killpg(running.pid, number)
        _, complaint = running.communicate(timeout=PATIENCE)
    assert running.returncode == 128 + number
    assert "run the same command again to continue" in complaint
    assert "Traceback" not in complaint
    assert not list(tmp_path.glob("*/done"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find the children of a process")
@pytest.mark.slow
def test_the_runs_of_a_demo_that_is_killed_end_too(tmp_path: Path) -> None:
    with demo_process(tmp_path) as running:
        children = children_of(running.pid)
        assert children
        running.kill()
    wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in children))


def test_a_run_that_has_ended_is_not_shown_for_other_data(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    table = tmp_path / "data" / "leeds.csv"
    table.write_text("x,y\n" + "1,0\n2,1\n" * 20)
    (tmp_path / "own.toml").write_text(
        '[task]\nname = "custom"\nkind = "tables"\npath = "data"\nlabel = "y"\n[method]\nname = "fedavg"\n'
        "[training]\nrounds = 1\nepochs = 1\n"
    )
    words = ("run", "own.toml", "--folder", "one")
    first = protofed(*words, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    (tmp_path / "data" / ".hidden").write_text("")
    assert protofed(*words, cwd=tmp_path).returncode == 0
    table.write_text("x,y\n" + "1,1\n2,0\n" * 20)
    other = protofed(*words, cwd=tmp_path)
    assert other.returncode != 0
    assert "its data or code have changed since" in other.stderr


def test_a_report_cannot_go_where_a_file_is(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[tasks.a.task]\nname = "minidigits"\n[methods.b.method]\nname = "fedavg"\n')
    (tmp_path / "taken").write_text("")
    found = protofed("compare", "c.toml", "--report", "taken", cwd=tmp_path)
    assert found.returncode != 0
    assert "the folder taken, which is a file" in found.stderr
    assert not (tmp_path / "results").exists()
