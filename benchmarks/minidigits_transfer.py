"""How far a model trained on one domain of minidigits carries to the others.

python benchmarks/minidigits_transfer.py [--sheet docs/tasks/minidigits.png]
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib import get_data_path
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from protofed.datasets.minidigits import CLASSES, SIDE, Domain, domains

SEEDS = (0, 1, 2)
EPOCHS = 20
BATCH = 32
RATE = 0.02
MOMENTUM = 0.9

EXAMPLES_PER_CLASS = 2
ZOOM = 2
GAP = 4
MARGIN = 84


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, CLASSES),
    )


def tensors(x: NDArray[np.uint8], y: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(x).float() / 255 - 0.5, torch.from_numpy(y)


def train(x: Tensor, y: Tensor, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    for _ in range(EPOCHS):
        order = torch.randperm(len(x))
        for start in range(0, len(x), BATCH):
            rows = order[start : start + BATCH]
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(x[rows]), y[rows]))
            optimizer.step()
    return model


@torch.no_grad()
def accuracy(model: nn.Sequential, x: Tensor, y: Tensor) -> float:
    return 100 * float((model(x).argmax(1) == y).float().mean())


def transfer(data: dict[str, Domain]) -> dict[str, list[float]]:
    """Mean test accuracy on every domain, by training domain and for all domains together."""
    trains = {name: tensors(domain.train_x, domain.train_y) for name, domain in data.items()}
    tests = [tensors(domain.test_x, domain.test_y) for domain in data.values()]
    together = list(trains.values())
    trains["all"] = (torch.cat([x for x, _ in together]), torch.cat([y for _, y in together]))
    rows = {}
    for name, (x, y) in trains.items():
        models = [train(x, y, seed) for seed in SEEDS]
        rows[name] = [float(np.mean([accuracy(model, *test) for model in models])) for test in tests]
    return rows


def table(rows: dict[str, list[float]], columns: list[str]) -> str:
    lines = ["| trained on \\ tested on | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for name, row in rows.items():
        lines.append(f"| {name} | " + " | ".join(f"{value:.1f}" for value in row) + " |")
    return "\n".join(lines)


def sheet(data: dict[str, Domain]) -> Image.Image:
    """One band per domain: examples of every class, class by class."""
    step = ZOOM * SIDE + GAP
    band = EXAMPLES_PER_CLASS * step + 3 * GAP
    picture = Image.new("RGB", (MARGIN + CLASSES * step + 2 * GAP, len(data) * band + 2 * GAP), "white")
    brush = ImageDraw.Draw(picture)
    font = ImageFont.truetype(str(Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")), 20)
    for k, (name, domain) in enumerate(data.items()):
        top = 2 * GAP + k * band
        brush.text((2 * GAP, top + (band - 3 * GAP) // 2), name, font=font, fill="black", anchor="lm")
        for digit in range(CLASSES):
            examples = np.flatnonzero(domain.train_y == digit)[:EXAMPLES_PER_CLASS]
            for line, row in enumerate(examples):
                tile = Image.fromarray(domain.train_x[row].transpose(1, 2, 0))
                tile = tile.resize((ZOOM * SIDE, ZOOM * SIDE), Image.Resampling.NEAREST)
                picture.paste(tile, (MARGIN + digit * step, top + line * step))
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sheet", type=Path, help="write a contact sheet of the four domains here and stop")
    arguments = parser.parse_args()
    data = domains()
    if arguments.sheet:
        sheet(data).save(arguments.sheet, optimize=True)
        return
    torch.set_num_threads(1)
    print(table(transfer(data), list(data)))


if __name__ == "__main__":
    main()
