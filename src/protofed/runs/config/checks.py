"""Checks across settings: each value is valid, but the combination is not. They run before anything is done."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from protofed.api.method import Method, validate
from protofed.api.task import Task
from protofed.datasets.sites import group_problem
from protofed.engine.private import OF_TRAINING, why_not_private
from protofed.engine.test_sets import is_testable
from protofed.engine.training import Training
from protofed.privacy.settings import PrivacySettings
from protofed.runs.config.recording import registered_name
from protofed.runs.config.schema import Problem
from protofed.runs.runtime_choice import RuntimeSettings
from protofed.tasks import TASKS, TaskSettings
from protofed.tasks.custom import IMAGE_NETWORKS, ONLY_SIDE, TABLE_NETWORKS, Custom
from protofed.tasks.domain_shift import Hub
from protofed.tasks.label_skew import PREPROCESSING
from protofed.tasks.partition import LEAST, MOST
from protofed.transforms.robust_stage import RobustSettings

RUNTIME = ("runtime", "name")


def check_sections(sections: Mapping[str, Any], data_elsewhere: bool = False) -> Iterator[Problem]:
    """Contradictions that the settings alone show. A section that is None is skipped. `data_elsewhere`: own files may
    be at sites, and so without a path here."""
    task, method = sections.get("task"), sections.get("method")
    training, runtime = sections.get("training"), sections.get("runtime")
    if runtime is not None:
        yield from _check_runtime(runtime)
    if task is not None and not isinstance(task, Task):
        if isinstance(task, Custom) and not task.path and not data_elsewhere:
            what = "is missing: give the folder with the sites, or see `protofed data inspect`"
            yield Problem(("task", "path"), what)
        yield from _check_task_settings(task)
        if training is not None:
            yield from _check_replies(task, training)
    if training is not None:
        yield from _check_schedule(training)
    if method is not None and training is not None:
        yield from _check_method(method, training)
    if sections.get("secure") is not None and sections["secure"].sums:
        yield from _check_secure(method, sections.get("evaluation"))
    if sections.get("privacy") is not None:
        yield from _check_privacy(sections) if sections["privacy"].is_on else _check_no_privacy(sections["privacy"])
    if method is not None and training is not None and sections.get("robust") is not None:
        yield from _check_robust(sections["robust"], method, training)
    if training is not None and sections.get("saving") is not None:
        yield from _check_kept(sections["saving"].keep, training)


def check_task(evaluation: Any, task: Task) -> Iterator[Problem]:
    """What other sections need and the built task lacks."""
    if evaluation.patience and not (task.validation and task.has_tests):
        what = f"the task {task.name} has no validation examples"
        fix = "set task.validation_fraction" if task.name == "custom" else "set it to 0"
        yield Problem(("evaluation", "patience"), f"{what}: {fix}")
    if evaluation.clients and not task.has_tests:
        yield Problem(("evaluation", "clients"), f"the task {task.name} has no test sets: set it to 0")
    elif evaluation.clients:
        untested = [client for client in sorted(task.clients) if not is_testable(task, client)]
        if untested:
            others = f" and {len(untested) - 1} other clients" if len(untested) > 1 else ""
            what = f"the task {task.name} has no test of a class of client {untested[0]!r}{others}: set it to 0"
            yield Problem(("evaluation", "clients"), what)


def check_device(runtime: RuntimeSettings) -> Iterator[Problem]:
    """A GPU that this machine does not have."""
    device = torch.device(runtime.device if _is_device(runtime.device) else "cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        what = f"torch finds {torch.cuda.device_count()} CUDA devices here, so there is no {runtime.device!r}"
        yield Problem(("runtime", "device"), f"{what}: name another device, or remove the setting")


def _check_runtime(runtime: RuntimeSettings) -> Iterator[Problem]:
    name, device = runtime.name, runtime.device
    if runtime.workers and name in ("sequential", "cohort"):
        what = f"the runtime {name} has no workers: remove the setting, or use the runtime workers"
        yield Problem(("runtime", "workers"), what, (RUNTIME,))
    if runtime.executor != "auto" and name in ("sequential", "workers"):
        what = f"the runtime {name} has no executor: remove the setting, or use the runtime cohort"
        yield Problem(("runtime", "executor"), what, (RUNTIME,))
    if device and not _is_device(device):
        yield Problem(("runtime", "device"), f"{device!r} is not a device: write cpu, cuda or cuda:1")
    elif name == "workers" and device not in ("", "cpu"):
        what = "the runtime workers runs on the CPU: remove the setting, or use the runtime cohort"
        yield Problem(("runtime", "device"), what, (RUNTIME,))
    is_on_cpu = name == "workers" or device == "cpu" or (name == "sequential" and not device)
    if runtime.precision != "float32" and is_on_cpu:
        what = f"{runtime.precision!r} is for GPUs, and this run would be on the CPU: remove the setting"
        yield Problem(("runtime", "precision"), what, (RUNTIME, ("runtime", "device")))


def _is_device(name: str) -> bool:
    try:
        return torch.device(name).type in ("cpu", "cuda", "mps")
    except RuntimeError:
        return False


def _check_replies(task: TaskSettings, training: Training) -> Iterator[Problem]:
    count = _num_clients(task)
    if count is not None and training.minimum_replies > count - training.held_out_clients:
        count -= training.held_out_clients
        what = f"is {training.minimum_replies}, but the task has only {count} clients: lower it"
        others = (("task", "num_clients"), ("task", "clients"))
        yield Problem(("training", "minimum_replies"), what, others)


def _check_secure(method: Any, evaluation: Any) -> Iterator[Problem]:
    """What would show the server more than sums."""
    if method is not None and not method.sums:
        name = type(method).__name__
        what = f"with these settings {name} (method.name) reads single uploads: set it to false, or take another method"
        yield Problem(("secure", "sums"), what, (("method", "name"),))
    if evaluation is not None and evaluation.clients:
        what = "tells how each client's model does, beside the sum of secure.sums: set one of the two to 0 or false"
        yield Problem(("evaluation", "clients"), what, (("secure", "sums"),))


def _check_no_privacy(privacy: PrivacySettings) -> Iterator[Problem]:
    """A promise that nothing keeps."""
    for name in (field.name for field in fields(PrivacySettings)):
        if getattr(privacy, name) != getattr(PrivacySettings(), name):
            what = 'does nothing while privacy.level is "none": set that to "record" or "client", or remove this'
            yield Problem(("privacy", name), what, (("privacy", "level"),))


def _check_privacy(sections: Mapping[str, Any]) -> Iterator[Problem]:
    """What would tell more than releases do, or has no form under differential privacy."""
    key, level = ("privacy", "level"), sections["privacy"].level
    method, training, evaluation = (sections.get(name) for name in ("method", "training", "evaluation"))
    is_summed = sections.get("secure") is not None and sections["secure"].sums
    if level == "client" and not is_summed:
        yield Problem(key, '"client" needs secure.sums: only a sum can hide a client', (("secure", "sums"),))
    elif method is not None and not is_summed and (why := why_not_private(method)):
        name = type(method).__name__
        yield Problem(key, f"{name} (method.name) {why}: take another method", (("method", "name"),))
    if training is not None:
        for name, allowed, why in OF_TRAINING:
            if getattr(training, name) not in allowed:
                what = f"{why}, under privacy.level = {level!r}: use {allowed[0]!r}"
                yield Problem(("training", name), what, (key,))
    if evaluation is not None:
        for name, why in (
            ("clients", "tells how each client's model does"),
            ("patience", "lets examples without noise decide when the run ends"),
            ("fine_tune", "tests models that were trained without noise"),
        ):
            if getattr(evaluation, name):
                yield Problem(("evaluation", name), f"{why}, which privacy.level does not cover: set it to 0", (key,))


def _check_schedule(training: Training) -> Iterator[Problem]:
    warmup = getattr(training.schedule, "warmup", 0)
    if warmup > training.rounds:
        what = f"is {warmup}, but the run has only {training.rounds} rounds: lower it"
        yield Problem(("training", "schedule", "warmup"), what, (("training", "rounds"),))


def _check_robust(robust: RobustSettings, method: Method[Any, Any, Any, Any], training: Training) -> Iterator[Problem]:
    for key, why, other in robust.conflicts(method, training.weighting, training.minimum_replies):
        yield Problem(tuple(key.split(".")), why, (tuple(other.split(".")),))


def _check_kept(keep: Sequence[int], training: Training) -> Iterator[Problem]:
    if keep and max(keep) > training.rounds:
        what = f"names round {max(keep)}, but the run has only {training.rounds} rounds: leave it out"
        yield Problem(("saving", "keep"), what, (("training", "rounds"),))


def _num_clients(task: TaskSettings) -> int | None:
    """None if only the data can tell."""
    clients = getattr(task, "clients", None)
    return sum(clients.values()) if clients else getattr(task, "num_clients", None)


def _check_task_settings(task: TaskSettings) -> Iterator[Problem]:
    if isinstance(task, Custom):
        yield from _check_custom(task)
    if isinstance(task, Hub) and not task.source:
        yield Problem(("task", "source"), "is missing: write hf:owner/name, or hf: and the path of a saved folder")
    name = registered_name(TASKS, task)
    preprocessing = getattr(task, "preprocessing", None)
    if preprocessing is not None and name not in PREPROCESSING[preprocessing]:
        fitting = " or ".join(one for one, sets in PREPROCESSING.items() if name in sets)
        yield Problem(("task", "preprocessing"), f"{preprocessing} is not for {name}: use {fitting}")
    concentration = getattr(task, "concentration", 1.0)
    if not LEAST <= concentration <= MOST and getattr(task, "partition", "dirichlet") == "dirichlet":
        what = f"is {concentration}: give a number from {LEAST} to {MOST}"
        yield Problem(("task", "concentration"), what, (("task", "partition"),))


def _check_custom(task: Custom) -> Iterator[Problem]:
    kind, networks = ("task", "kind"), [*IMAGE_NETWORKS] if task.kind == "images" else [*TABLE_NETWORKS]
    if task.kind == "tables" and task.label is None:
        yield Problem(("task", "label"), "is missing: name the column to predict", (kind,))
    if task.label is not None and task.label in task.leave_out:
        yield Problem(
            ("task", "leave_out"), f"{task.label!r} is the label: it cannot be left out", (("task", "label"),)
        )
    if task.test_fraction + task.validation_fraction >= 1:
        what = f"is {task.validation_fraction}: with test_fraction = {task.test_fraction} nothing is left to train on"
        yield Problem(("task", "validation_fraction"), what, (("task", "test_fraction"),))
    if task.group is not None and task.kind == "images" and (why := group_problem(task.group)):
        yield Problem(("task", "group"), f"{task.group!r} {why}", (kind,))
    if task.model is not None and task.model not in networks and ":" not in task.model:
        what = f"{task.model!r} is not for {task.kind}: use {' or '.join(networks)}"
        yield Problem(("task", "model"), what, (kind,))
    side = ONLY_SIDE.get(task.model or "", task.pixels)
    if task.kind == "images" and side != task.pixels:
        what = f"{task.model!r} reads images of {side} pixels, not {task.pixels}: use cnn3, or set pixels"
        yield Problem(("task", "model"), what, (kind, ("task", "pixels")))


def _check_method(method: Method[Any, Any, Any, Any], training: Training) -> Iterator[Problem]:
    for setting, why in validate(method, training.optimizer, training.batch_size, None):
        yield Problem(tuple(setting.split(".")), why, (("method", "name"),))
