"""Federated learning with prototypes, on PyTorch."""

from protofed.data import Batch, Data, Transform
from protofed.errors import BadInput, RunFailed
from protofed.experiments.api import run
from protofed.experiments.run import Result
from protofed.method import Local, Method, Objective, Reply, Task
from protofed.methods import METHODS
from protofed.methods.fedasam import FedASAM
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedpc import FedPC
from protofed.methods.fedproto import FedProto
from protofed.methods.fedproto_avg import FedProtoAvg
from protofed.methods.fedprox import FedProx
from protofed.methods.fedrep import FedRep
from protofed.methods.fedseproto import FedSeProto
from protofed.methods.fpl import FPL
from protofed.methods.local import LocalOnly
from protofed.methods.moon import Moon
from protofed.methods.pfedcspc import PFedCSPC
from protofed.networks import Model
from protofed.optim import Adam, Asam, Sam, Sgd
from protofed.tasks import TASKS
from protofed.tree import record
from protofed.version import __version__

__all__ = [
    "FPL",
    "METHODS",
    "TASKS",
    "Adam",
    "Asam",
    "BadInput",
    "Batch",
    "Data",
    "FedASAM",
    "FedAvg",
    "FedPC",
    "FedProto",
    "FedProtoAvg",
    "FedProx",
    "FedRep",
    "FedSeProto",
    "Local",
    "LocalOnly",
    "Method",
    "Model",
    "Moon",
    "Objective",
    "PFedCSPC",
    "Reply",
    "Result",
    "RunFailed",
    "Sam",
    "Sgd",
    "Task",
    "Transform",
    "__version__",
    "record",
    "run",
]
