"""The campaign of random attacks, for a minute, and that it leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clocks import wait_for

CAMPAIGN = Path(__file__).with_name("campaign.py")


def begun(minutes: float, seed: int, mark: str) -> "subprocess.Popen[str]":
    command = [sys.executable, str(CAMPAIGN), "--minutes", str(minutes), "--seed", str(seed)]
    environment = {**os.environ, "PROTOFED_CAMPAIGN": mark}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def marked(mark: str) -> list[int]:
    """The processes that a campaign with this mark has begun, and itself."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            is_ours = f"PROTOFED_CAMPAIGN={mark}".encode() in path.read_bytes().split(b"\0")
            state = path.with_name("stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if is_ours and state != "Z":
            found.append(int(path.parent.name))
    return found


def folders() -> set[str]:
    return {path.name for place in ("/dev/shm", "/tmp") for path in Path(place).glob("campaign-*")}  # noqa: S108


@pytest.mark.slow
def test_a_minute_of_random_attacks_changes_nothing() -> None:
    mark, before = f"{os.getpid()}-whole", folders()
    campaign = begun(1, 5, mark)
    said, _ = campaign.communicate(timeout=600)
    print(said)
    assert campaign.returncode == 0, said
    assert "0 differ" in said
    assert marked(mark) == []
    assert folders() <= before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_campaign_that_is_ended_leaves_nothing_behind(number: signal.Signals) -> None:
    mark, before = f"{os.getpid()}-{number.name}", folders()
    campaign = begun(10, 6, mark)
    wait_for(lambda: len(marked(mark)) >= 4)  # itself, its caretaker, a run and its processes
    time.sleep(0.2)
    campaign.send_signal(number)
    campaign.communicate(timeout=60)
    wait_for(lambda: not marked(mark))
    wait_for(lambda: folders() <= before)
