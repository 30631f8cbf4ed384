"""Lines on the disk, before anything leaves."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from protofed.errors import RunFailed
from protofed.privacy.ledger import Entry, Ledger, most_spent, read

LINE = Entry("run", 0, "round", 1, "client é", "gradients", 3, 0.25, "ab" * 32)


def test_what_was_written_is_there_for_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger(path).write([LINE, replace(LINE, kind="class sums", cost=0.125)])
    again = Ledger(path)
    assert again.entries == (LINE, replace(LINE, kind="class sums", cost=0.125))
    assert again.spent("client é") == 0.375 == most_spent(again.entries)
    assert again.spent("other") == 0.0


def test_the_same_bytes_sent_again_cost_nothing_and_others_do(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for entry in (LINE, LINE, replace(LINE, digest="cd" * 32), replace(LINE, round=1)):
        ledger.write([entry])
    assert ledger.spent(LINE.client) == 0.75
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 3


def test_a_line_that_a_kill_has_cut_off_was_not_sent(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger(path).write([LINE])
    whole = path.read_bytes()
    path.write_bytes(whole + replace(LINE, round=1).line.encode()[:-20])
    assert read(path) == [LINE], "whoever reads changes nothing"
    assert not path.read_bytes().endswith(b"\n")
    ledger = Ledger(path)
    assert ledger.entries == (LINE,)
    ledger.write([replace(LINE, round=2)])
    assert len(Ledger(path).entries) == 2


@pytest.mark.parametrize("line", ["{", "[]", "null", '{"run": "a"}', LINE.line.replace("0.25", "-1.0")])
def test_a_damaged_line_ends_the_run(tmp_path: Path, line: str) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(f"{LINE.line}\n{line}\n{LINE.line}\n")
    with pytest.raises(RunFailed, match="line 2"):
        Ledger(path)


def test_a_line_is_on_the_disk_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    Ledger(tmp_path / "ledger.jsonl").write([LINE])
    assert synced[0] == (tmp_path / "ledger.jsonl").stat().st_size


def test_the_lines_of_an_earlier_run_count(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", [LINE])
    assert ledger.spent(LINE.client) == 0.25
    assert Ledger(tmp_path / "ledger.jsonl", [LINE]).entries == (LINE,)
