"""The card of a model: what it was trained on, how well it does, what it is for, and what it does not know."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from protofed.engine.around import unwrapped
from protofed.errors import BadInput, RunFailed
from protofed.methods import METHODS
from protofed.metrics import formulas
from protofed.metrics.formulas import Counts
from protofed.models.formats import Images, Rows, inputs_of
from protofed.models.loading import INPUTS, MODEL, PROTOTYPES, WEIGHTS
from protofed.printable import one_line
from protofed.runs.config.recording import named_table
from protofed.runs.store.folder import RunFolder, commit
from protofed.version import __version__

if TYPE_CHECKING:
    from protofed.runs.results import Result

log = logging.getLogger(__name__)

FILES = {
    WEIGHTS: "the weights, by name (safetensors)",
    PROTOTYPES: "the prototypes that the server has (safetensors)",
    INPUTS: "how a file becomes what the network reads",
    MODEL: "method, network, classes and checksums; `protofed predict` reads it",
    "model.pt2": "the graph for PyTorch (`torch.export.load`): inputs `x` to scores and features",
    "model.onnx": "the same graph as ONNX, compared with onnxruntime to 1e-4",
}
MAX_MATRIX = 30
"""Classes up to which the confusion matrix is printed."""


def card(result: "Result", site: str | None, files: Sequence[str]) -> str:
    """The card in Markdown."""
    whose = "all sites" if site is None else f"site {_cell(site)}"
    sections = [
        f"# Model of {whose}",
        _origin(result, site),
        "## Data",
        _data(result, site),
        "## Results",
        _results(result, site),
        "## Input and output",
        _inputs(result, site),
        "## Intended use",
        _use(site),
        "## What it does not know",
        _limits(result, site),
        "## Files",
        _table(("file", "what it is"), [(f"`{name}`", FILES[name]) for name in FILES if name in files]),
    ]
    return "\n\n".join(sections) + "\n"


def _origin(result: "Result", site: str | None) -> str:
    federation = result.federation
    method = named_table(METHODS, unwrapped(federation.method))
    name = method.pop("name")
    settings = ", ".join(f"{key} = {_cell(value)}" for key, value in method.items()) or "no settings"
    training = federation.training
    trained = {} if result.folder is None else RunFolder(result.folder).read_environment()
    lines = [
        f"- **Method**: {_cell(name)} ({settings})",
        f"- **Training**: {result.state.round} of {training.rounds} rounds, {training.epochs} local epochs, batches of "
        f"{training.batch_size}, seed {training.seed}",
        f"- **Network**: {', '.join(result.module(site).part_names)} of {_network(result, site)}",
        f"- **Trained with**: {_version(trained)}",
        f"- **Exported with**: {_version({'protofed': __version__, 'commit': commit()})}",
    ]
    return "\n".join(lines)


def _version(facts: Mapping[str, object]) -> str:
    if "protofed" not in facts:
        return "a version that was not written down"
    return f"protofed {_cell(facts['protofed'])}, commit {_cell(facts.get('commit', 'unknown'))}"


def _network(result: "Result", site: str | None) -> str:
    model = result.federation.task.model
    network = getattr(model, "networks", {}).get(site or result.federation.ids[0], model)
    return _cell(getattr(network, "name", "a network without a name"))


def _data(result: "Result", site: str | None) -> str:
    federation, task = result.federation, result.federation.task
    rows = [
        (_cell(client), str(enrolment.num_examples), "trained it" if client in federation.ids else "held out")
        for client, enrolment in task.spec.clients.items()
    ]
    first = f"Task {_cell(task.name)}, classes: {', '.join(map(_cell, task.classes))}."
    note = "The data stayed at the sites; what a site's model learnt of others came through the method's messages."
    return "\n\n".join([first, _table(("site", "training examples", "part"), rows), note])


def _results(result: "Result", site: str | None) -> str:
    evaluated = [one for one in result.rounds if one.is_evaluated]
    if not evaluated:
        return "No round was evaluated."
    last = evaluated[-1]
    at_home = last.at_home.get(site or "")
    scores = dict(last.domains) if at_home is None else {site or "": at_home}
    names = list(dict.fromkeys(name for own in scores.values() for name in own))
    rows = [(_cell(name), *(_share(own.get(key)) for key in names)) for name, own in scores.items()]
    what = "on the site's own test set" if at_home else f"on each test set ({last.judged})"
    if at_home and result.federation.fine_tune:
        what += ", after fine-tuning that this model has not had"
    head = f"After round {last.round}, {what}:"
    return "\n\n".join([head, _table(("test set", *names), rows), _confusion(result, site)])


def _confusion(result: "Result", site: str | None) -> str:
    try:
        counts = np.asarray(result.confusion(site))
    except (BadInput, RunFailed) as error:  # its words may hold paths of this machine
        log.info("no confusion matrix for the card: %s", error)
        return (
            "The confusion matrix is not known: the data of the run were not at hand, or had changed, when the model "
            "was exported. `protofed evaluate` makes one from labelled data."
        )
    return confusion_text(counts, result.federation.task.classes)


def confusion_text(confusion: Counts, classes: Sequence[str]) -> str:
    """Metrics of a confusion matrix and the matrix itself, in Markdown."""
    counts = np.asarray(confusion)
    lines = [
        f"{int(counts.sum())} test examples: accuracy {_share(formulas.accuracy(counts))}, balanced accuracy "
        f"{_share(formulas.balanced_accuracy(counts))}, macro-F1 {_share(formulas.macro_f1(counts))}; always "
        f"predicting the most frequent class gives {_share(formulas.majority_rate(counts))}."
    ]
    truth = counts.sum(1)
    found = [_share(counts[k, k] / truth[k]) if truth[k] else "–" for k in range(len(classes))]
    if len(classes) > MAX_MATRIX:
        rows = [(_cell(name), str(int(truth[k])), found[k]) for k, name in enumerate(classes)]
        return "\n\n".join([*lines, _table(("class", "examples", "sensitivity"), rows)])
    head = ("true \\ predicted", *map(_cell, classes), "sensitivity")
    cells = [(_cell(name), *map(str, counts[k].astype(int)), found[k]) for k, name in enumerate(classes)]
    return "\n\n".join([*lines, _table(head, cells)])


def _inputs(result: "Result", site: str | None) -> str:
    inputs, classes = inputs_of(result.federation.task), result.federation.task.classes
    match inputs.files:
        case Images() as images:
            colour = "colour" if images.channels == 3 else "grey"
            how = f"Image files, resized to {images.pixels} × {images.pixels} pixels, in {colour}; bytes become 0 to 1"
        case Rows() as rows:
            how = f"Rows of a table with the columns {', '.join(_cell(column.column) for column in rows.columns)}"
        case None:
            how = "Tensors: no file format is known for this task"
    normal = f", then (x − {list(inputs.mean)}) / {list(inputs.std)} for each channel" if inputs.mean else ""
    shape = " × ".join(map(str, inputs.shape))
    return (
        f"{how}{normal}. The graph reads `x` (N × {shape}, {inputs.dtype}) and gives `scores` (N × {len(classes)}, in "
        f"the order {', '.join(map(_cell, classes))}) and `features`. The largest score is the predicted class."
    )


def _use(site: str | None) -> str:
    where = "at the sites that trained it" if site is None else f"at {_cell(site)}"
    return (
        f"To classify examples of the same kind as those above, {where}, where somebody checks what it says. Before it "
        "is used elsewhere, evaluate it there: `protofed evaluate MODEL DATA`. It is not a medical device."
    )


def _limits(result: "Result", site: str | None) -> str:
    lines = [
        "- It knows only the classes above, and gives one of them to anything, also to what is none of them.",
        "- Probabilities were not calibrated. Those of a nearest prototype only say how much nearer it is.",
        "- Differences between groups of people were not measured.",
        "- The numbers above come from test sets of the same sites; another site's data may differ.",
    ]
    if result.federation.task.num_classes > 1 and site is not None:
        lines.append("- It was made for one site. For another one's data, export that site's model.")
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    """Text of others in Markdown, as it is: no markup, no line breaks, no end of a cell."""
    text = one_line(str(value))
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]<>#|!~" else letter for letter in text)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"
