"""The page's facts, and the file that holds them."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from page_doubles import a_round, written
from protofed.errors import BadInput
from protofed.reports.page import document as documents
from protofed.reports.page.document import document, embedded
from protofed.reports.page.facts import facts
from protofed.reports.page.make import page_facts, write_page
from protofed.reports.page.series import Budget
from protofed.runs.listing import listing
from protofed.runs.results import Round


def page_of(*folders: Path) -> dict[str, Any]:
    return facts(listing(folders), "title", "protofed report")


class Scripts(HTMLParser):
    """The scripts and styles of a page, as a browser finds them, and all addresses in attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.addresses: list[str] = []
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "style"):
            self.found.append((given.get("type") or tag, ""))
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""
        self.addresses += [value or "" for key, value in attrs if key in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self.found and self.cdata_elem:
            kind, text = self.found[-1]
            self.found[-1] = (kind, text + data)


def test_numbers_of_a_group_are_means_over_seeds(tmp_path: Path) -> None:
    for seed, own in ((0, 0.4), (1, 0.6)):
        written(tmp_path / f"f{seed}", [a_round(1, own), a_round(2, own)], {"training": {"seed": seed}})
        settings = {"method": {"name": "fpl"}, "training": {"seed": seed}}
        written(tmp_path / f"p{seed}", [a_round(1, own), a_round(2, own + 0.2)], settings)
    (task,) = page_of(tmp_path)["tasks"]
    fedavg, fpl = task["groups"]
    assert (task["headline"], task["domains"], task["clients"]) == ("average", ["a", "b"], ["c000", "c001"])
    # average = 0.75 own: 30 and 45 % with FedAvg; of FPL the mean of two rounds, 37.5 and 52.5 %
    assert fedavg["standing"]["metrics"]["average"] == pytest.approx([37.5, 15 / 2**0.5], abs=1e-3)
    assert fpl["standing"]["metrics"]["average"] == pytest.approx([45.0, 15 / 2**0.5], abs=1e-3)
    assert fpl["standing"]["gain"] == pytest.approx([7.5, 7.5, 7.5], abs=1e-3)  # both seeds gain the same
    assert fedavg["standing"]["gain"] == []
    run = fpl["runs"][0]
    assert run["series"]["metrics"]["average"] == [3000, 4500]
    assert run["series"]["clients"]["c001"] == [4010, 6010]
    assert run["series"]["loss"] == [1.0, 0.5]
    assert run["headline"] == 3750
    assert run["failures"] == [[1, "c000", "LATE: no reply"]]
    assert (run["seconds"], run["bytes"], run["progress"]) == (2.0, 3000, "done")


def test_runs_on_several_tasks_are_apart_and_settings_are_whole(tmp_path: Path) -> None:
    written(tmp_path / "a", [a_round(1)])
    written(tmp_path / "b", [a_round(1)], {"task": {"name": "minidigits_skewed", "num_clients": 5}})
    written(tmp_path / "c", [a_round(1)], {"method": {"name": "fpl", "temperature": 0.1}})
    written(tmp_path / "d", [a_round(1)], {"method": {"name": "fpl", "temperature": 0.2}})
    page = page_of(tmp_path)
    found = {task["label"]: [group["label"] for group in task["groups"]] for task in page["tasks"]}
    assert found["minidigits_skewed"] == ["fedavg"]
    assert found["minidigits"] == ["fedavg", "fpl, temperature 0.1", "fpl, temperature 0.2"]
    at = page["settings"].index("method.temperature")
    assert [g["runs"][0]["settings"][at] for g in page["tasks"][0]["groups"]] == [None, 0.1, 0.2]


def test_a_damaged_folder_is_named_and_costs_its_run_alone(tmp_path: Path) -> None:
    written(tmp_path / "good", [a_round(1)])
    (written(tmp_path / "bad", [a_round(1)]) / "rounds.jsonl").write_text("{}\n")
    page = page_of(tmp_path)
    assert len(page["tasks"][0]["groups"][0]["runs"]) == 1
    ((folder, why),) = page["left_out"]
    assert folder.endswith("bad")
    assert "damaged" in why
    with pytest.raises(BadInput, match="damaged"):
        page_facts([tmp_path / "bad"], "", "", False, lambda what: None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="there is no run folder in"):
        page_facts([tmp_path / "empty"], "", "", False, lambda what: None)


HOSTILE = "</script><script>alert(1)</script><!--\x1b[31m\u202e&lt;\ud800"


def test_texts_of_runs_are_data_and_never_html(tmp_path: Path) -> None:
    one = a_round(1)
    one["at_home"] = {HOSTILE: {"accuracy": 0.5}}
    one["failures"] = {HOSTILE: HOSTILE}
    written(tmp_path / "a", [one], {"method": {"name": "fpl", "note": "</script><b>"}}, command=HOSTILE)
    page = facts(listing([tmp_path]), HOSTILE, HOSTILE)
    text = document(page)
    text.encode()  # half characters cannot be written
    scripts = Scripts(text)
    assert [kind for kind, _ in scripts.found] == ["style", "application/json", "script", "script", "script"]
    held = json.loads(scripts.found[1][1])
    assert held["tasks"][0]["clients"] == ["</script><script>alert(1)</script><!--\\x1b[31m\\u202e&lt;\\ud800"]
    assert not set("<>&") & set(embedded(page))


def test_the_policy_allows_the_scripts_of_the_page_and_nothing_else(tmp_path: Path) -> None:
    written(tmp_path / "a", [a_round(1)])
    page = page_of(tmp_path)
    scripts = Scripts(document(page))
    digests = {
        kind: {
            f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'"
            for k, t in scripts.found
            if k == kind
        }
        for kind in ("script", "style")
    }
    rules = {rule.split()[0]: set(rule.split()[1:]) for rule in scripts.policy.split("; ")}
    assert rules["default-src"] == rules["connect-src"] == rules["base-uri"] == rules["form-action"] == {"'none'"}
    assert rules["script-src"] == digests["script"]
    assert digests["style"] < rules["style-src"]
    assert len(rules["style-src"]) == 2
    assert {address for address in scripts.addresses if not address.startswith("#")} == {"data:,"}
    assert "connect-src 'self'" in Scripts(document({**page, "live": True})).policy


def test_the_style_that_the_policy_names_is_the_one_that_plot_adds() -> None:
    library = documents._asset("vendor/plot.umd.min.js")
    (added,) = re.findall(r"`(:where\(\.\$\{(\w)\}\) \{\\n  --plot-background[^`]*)`", library)
    assert added[0].replace(f"${{{added[1]}}}", "plot").replace("\\n", "\n") == documents.PLOT_STYLE


def test_fifty_long_runs_of_many_clients_are_a_page_under_five_megabytes(tmp_path: Path) -> None:
    lines = "".join(json.dumps(a_round(k, 0.3 + 0.001 * k, clients=100)) + "\n" for k in range(1, 101))
    for k in range(50):
        settings = {"method": {"name": ("fedavg", "fpl", "moon")[k % 3]}, "training": {"seed": k // 3}}
        folder = written(tmp_path / "runs" / str(k), [], settings)
        (folder / "rounds.jsonl").write_text(lines)
    found, page = page_facts([tmp_path / "runs"], "", "", False, lambda what: None)
    assert len(found.runs) == 50
    assert page["thinned"] is True
    kept = page["tasks"][0]["groups"][0]["runs"][0]["series"]["at"]
    assert (kept[0], kept[-1]) == (1, 100)
    assert write_page(page, tmp_path / "new" / "page.html") < 5_000_000


def test_rounds_are_left_out_evenly() -> None:
    rounds = [Round(k, 1, {}) for k in range(1, 11)]
    assert [r.round for r in Budget(4, True).kept(rounds)] == [1, 4, 7, 10]
    assert Budget(10, False).kept(rounds) == rounds


def test_a_page_overwrites_pages_only(tmp_path: Path) -> None:
    written(tmp_path / "a", [a_round(1)])
    page = page_of(tmp_path)
    (tmp_path / "notes.toml").write_text("mine")
    with pytest.raises(BadInput, match="is no HTML page"):
        write_page(page, tmp_path / "notes.toml")
    assert (tmp_path / "notes.toml").read_text() == "mine"
    with pytest.raises(BadInput, match="is a folder"):
        write_page(page, tmp_path)
    for _ in range(2):
        write_page(page, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


# ---- what is made from states


def right(flat: list[int]) -> float:
    cells = [flat[k : k + 3] for k in range(0, len(flat), 3)]
    return sum(n for i, j, n in cells if i == j) / sum(n for _, _, n in cells)


def test_confusion_matrices_have_the_accuracies_that_the_run_recorded(runs: Path) -> None:
    _, page = page_facts([runs], "", "", True, lambda what: None)
    (task,) = page["tasks"]
    fedavg, fedproto = (group["models"] for group in task["groups"])
    recorded = [group["runs"][0]["series"] for group in task["groups"]]
    for domain, flat in fedavg["confusion"]["domains"].items():
        assert round(10_000 * right(flat)) == recorded[0]["domains"][domain][-1]
    assert fedavg["confusion"]["clients"] == {}
    assert len(fedproto["confusion"]["clients"]) == 12
    for client, flat in fedproto["confusion"]["clients"].items():
        assert round(10_000 * right(flat)) == recorded[1]["clients"][client][-1]
    for domain, flat in fedproto["confusion"]["domains"].items():
        assert round(10_000 * right(flat)) == pytest.approx(recorded[1]["own_domains"][domain][-1], abs=1)
    assert task["holdings"]["clients"][0] == "pen-0"
    assert sum(task["holdings"]["counts"][0]) == 200
    assert task["holdings"]["domains"][0] == "pen"
    rounds = fedproto["tsne"]["rounds"]
    assert [one["round"] for one in rounds] == [1, 2]
    clouds = [cloud for one in rounds for cloud in one["clouds"]]
    assert {cloud["kind"] for cloud in clouds} == {"test example", "global prototypes"}
    assert all(0 <= place <= 1000 for cloud in clouds for place in (*cloud["x"], *cloud["y"]))
    assert document(page)


def test_a_run_without_states_says_why_there_are_no_matrices(tmp_path: Path) -> None:
    written(tmp_path / "a", [a_round(1)])
    settings = {"method": {"name": "my_module:Mine"}}
    written(tmp_path / "b", [a_round(1)], settings)
    _, page = page_facts([tmp_path], "", "", True, lambda what: None)
    without, unknown = page["tasks"][0]["groups"]
    assert "no state" in without["models"]["why"]
    assert "my_module:Mine" in unknown["models"]["why"]
    assert "holdings" in page["tasks"][0]
