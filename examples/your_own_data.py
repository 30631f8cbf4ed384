"""Data of your own: tensors in, a federation out. Two hospitals measure the same thing with different scanners."""

import torch
from torch import Tensor

import protofed
from protofed import FPL, Data, Sgd, Task
from protofed.tasks.models import mlp

CLASSES, SIZE = 3, 20
draw = torch.Generator().manual_seed(0)
signal = torch.randn(CLASSES, SIZE, generator=draw)


def measured(count: int, gain: float, offset: float) -> tuple[Tensor, Tensor]:
    """Examples of every class as one scanner sees them."""
    y = torch.randint(0, CLASSES, (count,), generator=draw)
    x = gain * (signal[y] + torch.randn(count, SIZE, generator=draw)) + offset
    return x, y


scanners = {"north": (1.0, 0.0), "south": (0.5, 1.5)}
task = Task(
    name="two hospitals",
    clients={f"{site}-{k}": Data.of(*measured(40, *scanner)) for site, scanner in scanners.items() for k in range(2)},
    tests={site: Data.of(*measured(200, *scanner)) for site, scanner in scanners.items()},
    domain_of={f"{site}-{k}": site for site in scanners for k in range(2)},
    num_classes=CLASSES,
    model=lambda client: mlp(SIZE, CLASSES),
)

if __name__ == "__main__":
    result = protofed.run(FPL(), task, rounds=10, epochs=2, batch_size=16, optimizer=Sgd(lr=0.05, momentum=0.9))
    print({site: round(accuracy, 3) for site, accuracy in result.accuracy("last").items()})
    x, y = measured(5, *scanners["south"])
    print("a new patient in the south:", result.model_for("south-0").logits(x).argmax(-1).tolist(), "truth", y.tolist())
