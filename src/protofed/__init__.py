"""Federated learning with prototypes, on PyTorch."""

from typing import TYPE_CHECKING

from protofed.api.contexts import ClientContext, Reply
from protofed.api.method import Method
from protofed.api.requests import Objective
from protofed.api.task import Task
from protofed.data.batches import Batch, Data
from protofed.data.transforms import Transform
from protofed.errors import BadInput, RunFailed
from protofed.methods import METHODS
from protofed.nn.networks import Model
from protofed.optim.optimizers import Adam, AdamW, Asam, RmsProp, Sam, Sgd
from protofed.optim.schedules import ConstantRate, CosineRate, StepRate
from protofed.runs.results import Result
from protofed.runs.run import run
from protofed.runs.runtime_choice import RuntimeSettings
from protofed.tasks import TASKS
from protofed.tree import record
from protofed.version import __version__

__all__ = [
    "METHODS",
    "TASKS",
    "Adam",
    "AdamW",
    "Asam",
    "BadInput",
    "Batch",
    "ClientContext",
    "ConstantRate",
    "CosineRate",
    "Data",
    "Method",
    "Model",
    "Objective",
    "Reply",
    "Result",
    "RmsProp",
    "RunFailed",
    "RuntimeSettings",
    "Sam",
    "Sgd",
    "StepRate",
    "Task",
    "Transform",
    "__version__",
    "record",
    "run",
]

# generated: begin methods
if TYPE_CHECKING:
    from protofed.methods.averaging import Averaging
    from protofed.methods.ccvr import CCVR
    from protofed.methods.ditto import Ditto
    from protofed.methods.fedala import FedALA
    from protofed.methods.fedasam import FedASAM
    from protofed.methods.fedavg import FedAvg
    from protofed.methods.fedavg_ft import FedAvgFT
    from protofed.methods.fedbn import FedBN
    from protofed.methods.feddc import FedDC
    from protofed.methods.feddecorr import FedDecorr
    from protofed.methods.feddyn import FedDyn
    from protofed.methods.fedetf import FedETF
    from protofed.methods.fedfomo import FedFomo
    from protofed.methods.fedgh import FedGH
    from protofed.methods.fedmd import FedMD
    from protofed.methods.fedmlp import FedMLP
    from protofed.methods.fednh import FedNH
    from protofed.methods.fednova import FedNova
    from protofed.methods.fedntd import FedNTD
    from protofed.methods.fedopt import FedOPT
    from protofed.methods.fedpc import FedPC
    from protofed.methods.fedper import FedPer
    from protofed.methods.fedper_plus import FedPerPlus
    from protofed.methods.fedproc import FedProc
    from protofed.methods.fedproto import FedProto
    from protofed.methods.fedproto_avg import FedProtoAvg
    from protofed.methods.fedprox import FedProx
    from protofed.methods.fedrep import FedRep
    from protofed.methods.fedseproto import FedSeProto
    from protofed.methods.fedsoup import FedSoup
    from protofed.methods.fedsr import FedSR
    from protofed.methods.fpl import FPL
    from protofed.methods.ga import GA
    from protofed.methods.grace import GRACE
    from protofed.methods.ifca import IFCA
    from protofed.methods.lg_fed import LGFed
    from protofed.methods.local import LocalOnly
    from protofed.methods.moon import Moon
    from protofed.methods.pfedcspc import PFedCSPC
    from protofed.methods.scaffold import Scaffold

__all__ += [
    "CCVR",
    "FPL",
    "GA",
    "GRACE",
    "IFCA",
    "Averaging",
    "Ditto",
    "FedALA",
    "FedASAM",
    "FedAvg",
    "FedAvgFT",
    "FedBN",
    "FedDC",
    "FedDecorr",
    "FedDyn",
    "FedETF",
    "FedFomo",
    "FedGH",
    "FedMD",
    "FedMLP",
    "FedNH",
    "FedNTD",
    "FedNova",
    "FedOPT",
    "FedPC",
    "FedPer",
    "FedPerPlus",
    "FedProc",
    "FedProto",
    "FedProtoAvg",
    "FedProx",
    "FedRep",
    "FedSR",
    "FedSeProto",
    "FedSoup",
    "LGFed",
    "LocalOnly",
    "Moon",
    "PFedCSPC",
    "Scaffold",
]
# generated: end methods

if not TYPE_CHECKING:  # type checkers see the imports above, and report names that do not exist

    def __getattr__(name):
        """The class of a method, `protofed.FPL`. Its module is imported when it is first asked for."""
        method = METHODS.class_named(name) if name[:1].isupper() else None
        if method is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = method
        return method

    def __dir__():
        return sorted({*globals(), *(method.__name__ for method in METHODS.values())})
