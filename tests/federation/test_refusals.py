"""What is refused before the first round, and that both ends can read why: the server's user in the error, a site's in
its log. Refusals within rounds are in test_site.py and test_faults.py, those of the SuperLink in test_superlink.py."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from federation.grids import config_of, sites_of
from protofed.errors import BadInput
from protofed.federation import agreement
from protofed.federation.codec import decoded, encoded
from protofed.federation.in_process import InProcess
from protofed.federation.messages import Limits, Notice
from protofed.federation.server import prepared
from protofed.federation.site import Site
from protofed.methods import METHODS
from protofed.runtimes.jobs import Reason

DITTO = METHODS["ditto"]()
NONCE = "0" * 32


def reasons(site: Site) -> list[str]:
    """What the log of a site says of why it does not take part."""
    lines = [json.loads(line) for line in (site.folder / "log.jsonl").read_text().splitlines()]
    refused = [f"{name}: {text}" for line in lines for name, text in line.get("refused", [])]
    return [*refused, *(why for line in lines if line["event"] == "not begun" for why in line["why"])]


def another_version(sites: dict[str, Site], monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = replace(agreement.versions(), protofed="0.0.1")
    monkeypatch.setattr("protofed.federation.site.versions", lambda: theirs)


def other_inputs(sites: dict[str, Site], monkeypatch: pytest.MonkeyPatch) -> None:
    data = sites["south"].data
    transform = replace(data.task.transform, mean=(0.5,) * 3, std=(1.0,) * 3)
    sites["south"].data = replace(data, task=replace(data.task, transform=transform))


def policy(**limits: Any) -> Callable[[dict[str, Site], pytest.MonkeyPatch], None]:
    def change(sites: dict[str, Site], monkeypatch: pytest.MonkeyPatch) -> None:
        sites["south"].limits = Limits(**limits)

    return change


def dry(sites: dict[str, Site], monkeypatch: pytest.MonkeyPatch) -> None:
    sites["south"].dry_run = True


def two_of_one(sites: dict[str, Site], monkeypatch: pytest.MonkeyPatch) -> None:
    sites["south"].data = sites["north"].data


REFUSED: dict[str, tuple[str, Callable[[dict[str, Site], pytest.MonkeyPatch], None]]] = {
    "two sites claim one client": ("OTHER_CLIENTS: 'ann' is a client of north too", two_of_one),
    "another version": ("OTHER_VERSION: ", another_version),
    "another task": ("OTHER_TASK: inputs", other_inputs),
    "a method beyond the policy": ("METHOD_NOT_ALLOWED: ", policy(methods=("fedavg",))),
    "epochs beyond the policy": ("TOO_MANY_EPOCHS: ", policy(epochs=1)),
    "rounds beyond the policy": ("TOO_MANY_ROUNDS: ", policy(rounds=1)),
    "a network beyond the policy": ("NETWORK_NOT_ALLOWED: ", policy(networks=("small_cnn",))),
    "a site that only looks": ("DRY_RUN: ", dry),
}


@pytest.mark.parametrize("what", REFUSED)
def test_both_ends_can_read_why(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason, change = REFUSED[what]
    sites = sites_of(tmp_path)
    change(sites, monkeypatch)
    with pytest.raises(BadInput) as refused:
        prepared(InProcess(sites), config_of(DITTO), "run-1")
    assert f"south: {reason}" in str(refused.value)
    assert any(each.startswith(reason) for each in reasons(sites["south"]))
    assert any("another site does not take part" in each or reason in each for each in reasons(sites["west"]))


def test_a_key_that_may_not_speak_for_a_client_is_refused_at_both_ends(tmp_path: Path) -> None:
    sites = sites_of(tmp_path)
    with pytest.raises(BadInput, match="west: OTHER_CLIENTS: its key may not speak for 'eve'"):
        prepared(InProcess(sites), config_of(DITTO), "run-1", speakers={"west": ("zoe",)})
    assert reasons(sites["west"]) == ["OTHER_CLIENTS: its key may not speak for 'eve'"]
    assert reasons(sites["north"]) == ["another site does not take part"]


def test_a_notice_has_the_same_answer_whatever_it_says(tmp_path: Path) -> None:
    site = sites_of(tmp_path)["west"]
    answer = site.handle(encoded(Notice(NONCE, ("\x1b[2Jnothing", "x" * 5000))))
    assert answer is not None
    assert decoded(answer, 1000) == Notice(NONCE)
    assert not any("\x1b" in why for why in reasons(site))


def test_an_order_that_is_too_large_for_a_site_is_not_sent(tmp_path: Path) -> None:
    sites = sites_of(tmp_path)
    sites["west"].limits = Limits(bytes=2000)  # the proposal passes, and no order
    of = prepared(InProcess(sites), config_of(DITTO), "run-1").federation
    state = of.advance(of.start())
    ((client, reason, detail),) = ((one.client, one.reason, one.detail) for one in state.failures)
    assert (client, reason) == ("eve", Reason.REFUSED_BY_SITE)
    assert re.fullmatch(r"TOO_MANY_BYTES: an order of \d+ bytes, and its site takes at most 2000", detail)
    assert not any("unreadable" in line for line in (sites["west"].folder / "log.jsonl").read_text().splitlines())
