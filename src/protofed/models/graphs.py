"""A model as a graph for other programs: `torch.export`, and ONNX if the extra is installed."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import Tensor

from protofed.errors import BadInput, RunFailed
from protofed.models.module import TrainedModel, WithFeatures

log = logging.getLogger(__name__)

TOLERANCE = 1e-4
BATCH = 3
"""Examples with which a graph is traced; it takes any number."""
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
NEEDS_ONNX = "ONNX needs packages that are not installed: pip install 'protofed[onnx]'"


def samples(model: TrainedModel, size: int, seed: int = 0) -> Tensor:
    """Inputs to compare graphs with."""
    draw = torch.Generator().manual_seed(seed)
    shape = (size, *model.input_shape)
    if not model.input_dtype.is_floating_point:
        return torch.zeros(shape, dtype=model.input_dtype)
    return torch.randn(shape, generator=draw)


def program_of(model: TrainedModel) -> torch.export.ExportedProgram:
    """The graph from inputs to scores and features, for any number of examples."""
    batch = torch.export.Dim("batch", min=1)
    with _quiet():
        return torch.export.export(WithFeatures(model), (samples(model, BATCH),), dynamic_shapes={"x": {0: batch}})


@torch.no_grad()
def torch_graph(model: TrainedModel) -> bytes:
    """The file that `torch.export.load` reads. Its answers are compared with the model's."""
    program, x = program_of(model), samples(model, BATCH + 2)
    with _quiet():
        scores, features = program.module()(x)
    _refuse_difference("torch.export", scores, model(x))
    _refuse_difference("torch.export", features, model.embed(x))
    file = io.BytesIO()
    with _quiet():
        torch.export.save(program, file)
    return file.getvalue()


def has_onnx() -> bool:
    return all(find_spec(package) is not None for package in ONNX_PACKAGES)


@torch.no_grad()
def onnx_graph(model: TrainedModel) -> bytes:
    """The ONNX file. onnxruntime's answers are compared with the model's."""
    if not has_onnx():
        raise BadInput(NEEDS_ONNX)
    import onnxruntime

    with _quiet():
        program = torch.onnx.export(
            program_of(model), input_names=["x"], output_names=["scores", "features"], verbose=False
        )
    assert program is not None
    data: bytes = program.model_proto.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    x = samples(model, BATCH + 2)
    scores, features = session.run(None, {"x": x.numpy()})
    _refuse_difference("ONNX", torch.from_numpy(scores), model(x))
    _refuse_difference("ONNX", torch.from_numpy(features), model.embed(x))
    return data


def _refuse_difference(kind: str, found: Tensor, expected: Tensor) -> None:
    is_equal = found.shape == expected.shape and torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    if not is_equal:
        gap = (found - expected).abs().max().item() if found.shape == expected.shape else float("nan")
        raise RunFailed(
            f"the {kind} graph does not give the model's answers: they differ by {gap:g}; nothing was written"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Exporters warn of their own workings, and log them."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)
