"""What it costs to load a set of data: seconds and peak memory of the first load, which decodes, and of the second.

Each load is a process of its own; the peak is that of the whole process, with PyTorch in it. The publisher's files are
taken from $PROTOFED_DATA and copied into a temporary folder, so that the cache there is left alone. Run it with
`python benchmarks/loading.py`, or with the names of sets.
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from protofed.datasets import DATASETS
from protofed.datasets.cache import load
from protofed.datasets.files import folders


def measured(name: str) -> str:
    """One load in this process, as tensors."""
    begin = time.perf_counter()
    splits = load(DATASETS[name])
    tensors = [torch.from_numpy(part.x) for split in splits.values() for part in (split.train, split.test)]
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    return f"{seconds:8.2f} s {peak:6.2f} GiB {sum(len(x) for x in tensors):8d} examples"


def compare(name: str, source: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for found in folders(source, name):
            copy = Path(folder) / found.relative_to(source)
            if found.is_dir() and not copy.exists():
                shutil.copytree(found, copy)
        for which in ("first", "second"):
            command = [sys.executable, __file__, "--measure", name]
            environment = os.environ | {"PROTOFED_DATA": folder}
            done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)  # noqa: S603
            print(f"{name:14} {which:7} {done.stdout.strip()}", flush=True)


def main(names: list[str]) -> None:
    source = Path(os.environ["PROTOFED_DATA"])
    for name in names or DATASETS:
        if any(found.is_dir() for found in folders(source, name)):
            compare(name, source)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(measured(sys.argv[2]))
    else:
        main(sys.argv[1:])
