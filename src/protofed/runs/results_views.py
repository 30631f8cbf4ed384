"""What a `Result` shows of itself: text, tables, curves, confusion matrices and features."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofed.api.evaluation import confusion_of
from protofed.api.task import ClientId
from protofed.data.batches import EVALUATION_BATCH, Data
from protofed.engine.around import unwrapped
from protofed.errors import BadInput
from protofed.metrics.registry import METRICS
from protofed.models.module import TrainedModel
from protofed.printable import one_line
from protofed.privacy import statement

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

    from protofed.runs.results import Result, Round

MAX_LISTED = 12
"""Sites and domains that a summary lists."""


def summary(result: "Result") -> str:
    federation, rounds = result.federation, [r for r in result.rounds if r.is_evaluated]
    method, sites = type(unwrapped(federation.method)).__name__, len(federation.ids)
    lines = [
        f"{method} on {one_line(federation.task.name)}: {result.state.round} of {federation.training.rounds} rounds, "
        f"{sites} client{'s' * (sites != 1)}"
    ]
    if federation.private is not None:
        lines += statement.lines(federation.private.settings, federation.private.most_spent)
    if not rounds:
        return "\n".join([*lines, "no round was evaluated"])
    last = rounds[-1]
    lines.append(f"after round {last.round}, {last.judged}:")
    is_own = last.judged == "own models"
    scores = last.at_home if is_own and last.at_home else last.domains
    shown = [f"  {one_line(name)}  {_percent(own['accuracy'])}" for name, own in scores.items() if "accuracy" in own]
    lines += shown[:MAX_LISTED]
    if len(shown) > MAX_LISTED:
        lines.append(f"  and {len(shown) - MAX_LISTED} more")
    if last.headline is not None:
        lines.append(f"  {'mean over clients' if is_own else 'mean over domains'}  {_percent(last.headline)}")
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def curves(rounds: Sequence["Round"]) -> "pandas.DataFrame":
    try:
        import pandas
    except ImportError:
        raise BadInput(
            "curves are pandas tables, and pandas is not installed: pip install 'protofed[pandas]'"
        ) from None
    rows = []
    for one in rounds:
        if not one.is_evaluated:
            continue
        row: dict[str, float | int | None] = {"round": one.round, "loss": one.loss}
        measured = {m.id: one.metric(m.id) for m in METRICS if m.group != "domain"}
        row |= {name: value for name, value in measured.items() if value is not None}
        rows.append(row | {f"accuracy of {domain}": scores.get("accuracy") for domain, scores in one.domains.items()})
    if not rows:
        raise BadInput("no round was evaluated yet")
    return pandas.DataFrame(rows).set_index("round")


def plot(rounds: Sequence["Round"], metric: str) -> "Axes":
    from matplotlib import pyplot

    evaluated = [one for one in rounds if one.is_evaluated]
    if not evaluated:
        raise BadInput("no round was evaluated yet")
    if metric not in next(iter(evaluated[0].domains.values())):
        known = ", ".join(next(iter(evaluated[0].domains.values())))
        raise BadInput(f"domains have no metric {metric!r}; they have {known}")
    _, axes = pyplot.subplots()
    for domain in evaluated[0].domains:
        axes.plot([r.round for r in evaluated], [100 * r.domains[domain][metric] for r in evaluated], label=domain)
    axes.set(xlabel="round", ylabel=f"{metric.replace('_', ' ')} in %")
    axes.legend()
    return axes


def embeddings(result: "Result", client: ClientId | None, data: Data | Tensor) -> Tensor:
    model, x = result.module(client), data.x[data.index] if isinstance(data, Data) else data
    with torch.no_grad():
        return torch.cat([model.embed(batch) for batch in _batches(model, x)])


def confusion(result: "Result", client: ClientId | None) -> NDArray[np.int64]:
    counted = result.rounds[-1].confusion if result.rounds and result.rounds[-1].round == result.state.round else {}
    if client is not None and client in counted and not result.federation.task.has_data:
        return np.asarray(counted[client], dtype=np.int64)
    result = with_data(result)
    federation, model = result.federation, result.module(client)
    if client is None:
        sets = list(federation.task.tests.values())
    elif client in federation.task.domain_of:
        sets = [federation.task.tests[federation.task.domain_of[client]]]
    else:
        own = federation.test_sets(client, "own").own
        sets = [] if own is None else [own]
    if not sets:
        raise BadInput(f"there is no test set for {'the public model' if client is None else client}")
    total = np.zeros((federation.task.num_classes,) * 2, dtype=np.int64)
    for data in sets:
        predicted = torch.cat([model(batch).argmax(-1) for batch in _batches(model, data.x[data.index])])
        total += confusion_of(predicted, data.labels.cpu(), federation.task.num_classes)
    return total


def _batches(model: TrainedModel, x: Tensor) -> Iterator[Tensor]:
    """Examples as stored, as inputs, some at a time."""
    with torch.no_grad():
        for part in torch.split(x.cpu(), EVALUATION_BATCH):
            yield model.transform(part)


def with_data(result: "Result") -> "Result":
    if result.federation.task.has_data:
        return result
    if result.folder is None:
        result.federation.task.refuse_without_data()
    from protofed.runs.loading import open_run

    assert result.folder is not None
    method = None if result.config is None else result.config.method
    saved = open_run(result.folder, method=method)
    return saved.at(result.state.round)
