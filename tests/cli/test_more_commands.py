"""list, show, report, watch, and what the commands say of themselves."""

import http.client
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from cli.test_cli import EXPERIMENT, protofed
from clocks import PATIENCE, wait_for
from page_doubles import a_round, written
from protofed.cli.signals import StopRequest, stop_on_signal
from protofed.runs.sweep_log import Listener


@pytest.fixture
def results(tmp_path: Path) -> Path:
    written(tmp_path / "results" / "one", [a_round(1, 0.4), a_round(2, 0.6)], {"training": {"seed": 7}})
    settings = {"method": {"name": "fpl", "temperature": 0.05}, "training": {"rounds": 9}}
    written(tmp_path / "results" / "two", [a_round(1, 0.4, judged="own models")], settings, is_done=False)
    return tmp_path


def test_list_says_of_each_run_what_it_is_how_far_and_how_good(results: Path) -> None:
    first, second = json.loads(protofed("list", "--json", cwd=results).stdout)
    assert (first["method"], first["seed"], first["state"], first["rounds"], first["total"]) == (
        "fedavg",
        7,
        "done",
        2,
        2,
    )
    assert (first["metric"], first["headline"]) == ("average", pytest.approx(0.75 * 0.5))
    assert (second["method"], second["state"], second["rounds"], second["total"]) == ("fpl", "stopped", 1, 9)
    assert (second["metric"], second["headline"]) == ("own", 0.4)
    text = protofed("list", "results", cwd=results).stdout
    for word in ("fedavg", "minidigits", "2/2", "37.5", "done", "stopped", "1/9", "40.0"):
        assert word in text
    (results / "results" / "two" / "rounds.jsonl").write_text("nonsense\n")
    damaged = protofed("list", "--json", cwd=results)
    assert [run["method"] for run in json.loads(damaged.stdout)] == ["fedavg"]
    assert damaged.stderr.count("damaged") == 1
    assert protofed("list", "nowhere", cwd=results).returncode == 2


def test_show_has_all_settings_and_the_command(results: Path) -> None:
    text = protofed("show", "results/two", cwd=results).stdout
    for word in ("method.temperature", "0.05", "training.rounds", "command: protofed run x.toml", "protofed 0.2.0"):
        assert word in text
    facts = json.loads(protofed("show", "results/two", "--json", cwd=results).stdout)
    assert facts["settings"]["method.temperature"] == 0.05
    assert facts["environment"]["command"] == "protofed run x.toml"


def test_report_writes_one_page(results: Path) -> None:
    made = protofed("report", "results", "--html", "new/page.html", "--no-models", "--title", "Ours <1>", cwd=results)
    assert made.returncode == 0, made.stderr
    assert "page new/page.html (2 runs, 0." in made.stdout
    assert "<title>Ours &lt;1&gt;</title>" in (results / "new" / "page.html").read_text()
    facts = json.loads(
        protofed("report", "results/one", "--html", "p.html", "--no-models", "--json", cwd=results).stdout
    )
    assert (facts["runs"], facts["bytes"]) == (1, (results / "p.html").stat().st_size)
    assert protofed("report", "nowhere", cwd=results).returncode == 2
    taken = protofed("report", "results", "--html", "results/one/config.toml", cwd=results)
    assert taken.returncode == 2
    assert "not overwritten" in taken.stderr


def test_watch_serves_until_ctrl_c(results: Path) -> None:
    command = [sys.executable, "-m", "protofed.cli.app", "watch", "results", "--no-models"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=results) as running:
        try:
            assert running.stdout
            address = running.stdout.readline().split()[1]
            assert address.startswith("http://127.0.0.1:")
            connection = http.client.HTTPConnection(address.removeprefix("http://").rstrip("/"), timeout=PATIENCE)
            connection.request("GET", "/facts.json")
            facts = json.loads(connection.getresponse().read())
            connection.close()
            assert len(facts["tasks"][0]["groups"]) == 2
            running.send_signal(signal.SIGINT)
            _, complaint = running.communicate(timeout=PATIENCE)
        finally:
            running.kill()
    assert (running.returncode, complaint) == (0, "")


def test_a_file_for_the_other_command_is_named(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(EXPERIMENT)
    (tmp_path / "many.toml").write_text('[tasks.a.task]\nname = "minidigits"\n[methods.b.method]\nname = "fedavg"\n')
    wrong = protofed("run", "many.toml", cwd=tmp_path)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "protofed compare many.toml" in wrong.stderr
    wrong = protofed("compare", "one.toml", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "protofed run one.toml" in wrong.stderr


@pytest.mark.parametrize("words", [(), ("run",), ("list",), ("data",), ("data", "inspect")])
def test_h_is_help(words: tuple[str, ...]) -> None:
    short, long = protofed(*words, "-h"), protofed(*words, "--help")
    assert (short.returncode, short.stdout) == (0, long.stdout)
    assert "Usage:" in short.stdout


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("protofed re", ["report"]),
        ("protofed methods fp", ["fpl", "fpl_sums"]),
        ("protofed methods --tag pro", ["prototype"]),
        ("protofed tasks mini", ["minidigits", "minidigits_skewed"]),
    ],
)
def test_a_shell_completes(words: str, found: list[str]) -> None:
    asked = {"_PROTOFED_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    code = "import sys; sys.argv = ['protofed']; from protofed.cli.start import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **asked}
    )
    assert ran.stdout.split() == found


def test_every_task_shows_its_settings() -> None:
    shown = json.loads(protofed("tasks", "minidigits_skewed", "--json").stdout)
    settings = {one["name"]: one for one in shown["settings"]}
    assert settings["num_clients"]["default"] == 20
    assert len(shown["clients"]) == 20
    text = protofed("tasks", "minidigits_skewed").stdout
    assert "num_clients = 20  (whole number ≥ 1)" in text
    without = protofed("tasks", "custom")  # no data are here
    assert without.returncode == 2
    assert "skip_damaged = false  (true or false)" in without.stdout


def test_an_inspection_as_json(tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    for site, count in (("leeds", 40), ("porto", 20)):
        rows = "".join(f"{k % 7},{'yes' if k % 4 else 'no'}\n" for k in range(count))
        (tmp_path / "sites" / f"{site}.csv").write_text("marker,outcome\n" + rows)
    vague = protofed("data", "inspect", "sites", "--json", cwd=tmp_path)
    assert vague.returncode == 2
    facts = json.loads(vague.stdout)
    assert facts["ready"] is False
    assert facts["findings"][0]["severity"] == "error"
    facts = json.loads(protofed("data", "inspect", "sites", "--label", "outcome", "--json", cwd=tmp_path).stdout)
    assert facts["ready"] is True
    assert facts["classes"] == ["no", "yes"]
    leeds = facts["sites"]["leeds"]
    assert (leeds["examples"], leeds["classes"]) == (40, {"no": 10, "yes": 30})
    assert leeds["train"] + leeds["test"] == 40


def test_ctrl_c_has_a_notice_before_and_after() -> None:
    with stop_on_signal("resume with --resume", 30, has_bars=True) as stop:
        assert stop.notice == "Ctrl-C stops after this round; resume with --resume"
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.notice == "stopping after this round, or in 30 s; resume with --resume"


@pytest.mark.parametrize("has_bars", [False, True])
def test_a_signal_writes_no_line_into_bars(has_bars: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with stop_on_signal("resume", 30, has_bars):
        os.kill(os.getpid(), signal.SIGINT)
    assert bool(capfd.readouterr().err) is not has_bars
    assert StopRequest().notice == ""


def test_what_several_processes_of_a_sweep_say_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    context = multiprocessing.get_context("spawn")
    with Listener(context) as listener:
        for message in [(30, "protofed.test", "a file is damaged")] * 2 + [(30, "protofed.test", "round 1")]:
            listener.messages.put(message)
        wait_for(lambda: "round 1" in caplog.text)
    assert caplog.messages == ["a file is damaged", "round 1"]


@pytest.mark.slow
def test_damaged_files_are_named_once_by_a_comparison(tmp_path: Path) -> None:
    for site in ("north", "south"):
        for k, name in enumerate(("cat", "dog")):
            folder = tmp_path / "images" / site / name
            folder.mkdir(parents=True)
            for n in range(8):
                Image.new("L", (28, 28), 100 * k + 7 * n + 3 * (site == "south")).save(folder / f"{n}.png")
    (tmp_path / "images" / "north" / "cat" / "bad.png").write_bytes(b"no picture")
    (tmp_path / "c.toml").write_text(
        "seeds = [0, 1]\n[common.training]\nrounds = 1\nepochs = 1\n[tasks.own.task]\n"
        'name = "custom"\nkind = "images"\npath = "images"\nskip_damaged = true\nmax_damaged = 0.5\n'
        '[methods.a.method]\nname = "fedavg"\n'
    )
    made = subprocess.run(
        [sys.executable, "-m", "protofed.cli.app", "compare", "c.toml", "--jobs", "1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert (made.stdout + made.stderr).count("bad.png") == 1
