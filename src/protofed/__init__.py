"""Federated learning with prototypes, on PyTorch. What it offers is imported when it is first asked for."""

from importlib import import_module
from typing import TYPE_CHECKING

from protofed.version import __version__

_MODULES = {
    "METHODS": "protofed.methods",
    "TASKS": "protofed.tasks",
    "Adam": "protofed.optim.optimizers",
    "AdamW": "protofed.optim.optimizers",
    "Asam": "protofed.optim.optimizers",
    "BadInput": "protofed.errors",
    "Batch": "protofed.data.batches",
    "Callback": "protofed.runs.observers",
    "ClientContext": "protofed.api.contexts",
    "ConstantRate": "protofed.optim.schedules",
    "CosineRate": "protofed.optim.schedules",
    "Data": "protofed.data.batches",
    "LoggingSettings": "protofed.runs.observers",
    "MLflow": "protofed.runs.observers",
    "Method": "protofed.api.method",
    "Model": "protofed.nn.networks",
    "Objective": "protofed.api.requests",
    "Observer": "protofed.runs.observers",
    "Reply": "protofed.api.contexts",
    "PrivacySettings": "protofed.privacy.settings",
    "Result": "protofed.runs.results",
    "RmsProp": "protofed.optim.optimizers",
    "RobustSettings": "protofed.transforms.robust_stage",
    "RunFailed": "protofed.errors",
    "RuntimeSettings": "protofed.runs.runtime_choice",
    "Sam": "protofed.optim.optimizers",
    "SecureSettings": "protofed.engine.secure_settings",
    "Sgd": "protofed.optim.optimizers",
    "StepRate": "protofed.optim.schedules",
    "Task": "protofed.api.task",
    "TensorBoard": "protofed.runs.observers",
    "TrainedModel": "protofed.models.module",
    "Transform": "protofed.data.transforms",
    "UploadSettings": "protofed.transforms.chain",
    "WeightsAndBiases": "protofed.runs.observers",
    "continue_from": "protofed.runs.run",
    "export": "protofed.models.exporting",
    "load": "protofed.runs.loading",
    "record": "protofed.tree",
    "run": "protofed.runs.run",
}
"""Where everything but the methods is. `make docs` writes the block below from this and from METHODS."""

# generated: begin exports
if TYPE_CHECKING:
    from protofed.api.contexts import ClientContext, Reply
    from protofed.api.method import Method
    from protofed.api.requests import Objective
    from protofed.api.task import Task
    from protofed.data.batches import Batch, Data
    from protofed.data.transforms import Transform
    from protofed.engine.secure_settings import SecureSettings
    from protofed.errors import BadInput, RunFailed
    from protofed.methods import METHODS
    from protofed.methods.apfl import APFL
    from protofed.methods.averaging import Averaging
    from protofed.methods.ccvr import CCVR
    from protofed.methods.cfl import CFL
    from protofed.methods.ditto import Ditto
    from protofed.methods.fedadmm import FedADMM
    from protofed.methods.fedala import FedALA
    from protofed.methods.fedamp import FedAMP
    from protofed.methods.fedasam import FedASAM
    from protofed.methods.fedavg import FedAvg
    from protofed.methods.fedavg_ft import FedAvgFT
    from protofed.methods.fedbabu import FedBABU
    from protofed.methods.fedbn import FedBN
    from protofed.methods.fedcp import FedCP
    from protofed.methods.feddc import FedDC
    from protofed.methods.feddecorr import FedDecorr
    from protofed.methods.feddistill import FedDistill
    from protofed.methods.feddyn import FedDyn
    from protofed.methods.fedem import FedEM
    from protofed.methods.fedetf import FedETF
    from protofed.methods.fedfomo import FedFomo
    from protofed.methods.fedgen import FedGen
    from protofed.methods.fedgh import FedGH
    from protofed.methods.fedhkd import FedHKD
    from protofed.methods.fedkd import FedKD
    from protofed.methods.fedlc import FedLC
    from protofed.methods.fedmd import FedMD
    from protofed.methods.fedmlp import FedMLP
    from protofed.methods.fednh import FedNH
    from protofed.methods.fednova import FedNova
    from protofed.methods.fedntd import FedNTD
    from protofed.methods.fedopt import FedOPT
    from protofed.methods.fedpac import FedPAC
    from protofed.methods.fedpc import FedPC
    from protofed.methods.fedpc_sums import FedPCSums
    from protofed.methods.fedpcl import FedPCL
    from protofed.methods.fedper import FedPer
    from protofed.methods.fedper_plus import FedPerPlus
    from protofed.methods.fedplvm import FedPLVM
    from protofed.methods.fedproc import FedProc
    from protofed.methods.fedproto import FedProto
    from protofed.methods.fedproto_avg import FedProtoAvg
    from protofed.methods.fedprox import FedProx
    from protofed.methods.fedrep import FedRep
    from protofed.methods.fedrod import FedROD
    from protofed.methods.fedseproto import FedSeProto
    from protofed.methods.fedsgd import FedSGD
    from protofed.methods.fedsoup import FedSoup
    from protofed.methods.fedsr import FedSR
    from protofed.methods.fedtgp import FedTGP
    from protofed.methods.fpl import FPL
    from protofed.methods.fpl_sums import FPLSums
    from protofed.methods.ga import GA
    from protofed.methods.gpfl import GPFL
    from protofed.methods.grace import GRACE
    from protofed.methods.ifca import IFCA
    from protofed.methods.knn_per import KnnPer
    from protofed.methods.lg_fed import LGFed
    from protofed.methods.local import LocalOnly
    from protofed.methods.moon import Moon
    from protofed.methods.mp_fedcl import MPFedCL
    from protofed.methods.per_fedavg import PerFedAvg
    from protofed.methods.pfedcspc import PFedCSPC
    from protofed.methods.pfedme import PFedMe
    from protofed.methods.scaffold import Scaffold
    from protofed.models.exporting import export
    from protofed.models.module import TrainedModel
    from protofed.nn.networks import Model
    from protofed.optim.optimizers import Adam, AdamW, Asam, RmsProp, Sam, Sgd
    from protofed.optim.schedules import ConstantRate, CosineRate, StepRate
    from protofed.privacy.settings import PrivacySettings
    from protofed.runs.loading import load
    from protofed.runs.observers import Callback, LoggingSettings, MLflow, Observer, TensorBoard, WeightsAndBiases
    from protofed.runs.results import Result
    from protofed.runs.run import continue_from, run
    from protofed.runs.runtime_choice import RuntimeSettings
    from protofed.tasks import TASKS
    from protofed.transforms.chain import UploadSettings
    from protofed.transforms.robust_stage import RobustSettings
    from protofed.tree import record

_METHODS = {
    "APFL": "protofed.methods.apfl",
    "CCVR": "protofed.methods.ccvr",
    "CFL": "protofed.methods.cfl",
    "FPL": "protofed.methods.fpl",
    "GA": "protofed.methods.ga",
    "GPFL": "protofed.methods.gpfl",
    "GRACE": "protofed.methods.grace",
    "IFCA": "protofed.methods.ifca",
    "Averaging": "protofed.methods.averaging",
    "Ditto": "protofed.methods.ditto",
    "FPLSums": "protofed.methods.fpl_sums",
    "FedADMM": "protofed.methods.fedadmm",
    "FedALA": "protofed.methods.fedala",
    "FedAMP": "protofed.methods.fedamp",
    "FedASAM": "protofed.methods.fedasam",
    "FedAvg": "protofed.methods.fedavg",
    "FedAvgFT": "protofed.methods.fedavg_ft",
    "FedBABU": "protofed.methods.fedbabu",
    "FedBN": "protofed.methods.fedbn",
    "FedCP": "protofed.methods.fedcp",
    "FedDC": "protofed.methods.feddc",
    "FedDecorr": "protofed.methods.feddecorr",
    "FedDistill": "protofed.methods.feddistill",
    "FedDyn": "protofed.methods.feddyn",
    "FedEM": "protofed.methods.fedem",
    "FedETF": "protofed.methods.fedetf",
    "FedFomo": "protofed.methods.fedfomo",
    "FedGH": "protofed.methods.fedgh",
    "FedGen": "protofed.methods.fedgen",
    "FedHKD": "protofed.methods.fedhkd",
    "FedKD": "protofed.methods.fedkd",
    "FedLC": "protofed.methods.fedlc",
    "FedMD": "protofed.methods.fedmd",
    "FedMLP": "protofed.methods.fedmlp",
    "FedNH": "protofed.methods.fednh",
    "FedNTD": "protofed.methods.fedntd",
    "FedNova": "protofed.methods.fednova",
    "FedOPT": "protofed.methods.fedopt",
    "FedPAC": "protofed.methods.fedpac",
    "FedPC": "protofed.methods.fedpc",
    "FedPCL": "protofed.methods.fedpcl",
    "FedPCSums": "protofed.methods.fedpc_sums",
    "FedPLVM": "protofed.methods.fedplvm",
    "FedPer": "protofed.methods.fedper",
    "FedPerPlus": "protofed.methods.fedper_plus",
    "FedProc": "protofed.methods.fedproc",
    "FedProto": "protofed.methods.fedproto",
    "FedProtoAvg": "protofed.methods.fedproto_avg",
    "FedProx": "protofed.methods.fedprox",
    "FedROD": "protofed.methods.fedrod",
    "FedRep": "protofed.methods.fedrep",
    "FedSGD": "protofed.methods.fedsgd",
    "FedSR": "protofed.methods.fedsr",
    "FedSeProto": "protofed.methods.fedseproto",
    "FedSoup": "protofed.methods.fedsoup",
    "FedTGP": "protofed.methods.fedtgp",
    "KnnPer": "protofed.methods.knn_per",
    "LGFed": "protofed.methods.lg_fed",
    "LocalOnly": "protofed.methods.local",
    "MPFedCL": "protofed.methods.mp_fedcl",
    "Moon": "protofed.methods.moon",
    "PFedCSPC": "protofed.methods.pfedcspc",
    "PFedMe": "protofed.methods.pfedme",
    "PerFedAvg": "protofed.methods.per_fedavg",
    "Scaffold": "protofed.methods.scaffold",
}

__all__ = [
    "APFL",
    "CCVR",
    "CFL",
    "FPL",
    "GA",
    "GPFL",
    "GRACE",
    "IFCA",
    "METHODS",
    "TASKS",
    "Adam",
    "AdamW",
    "Asam",
    "Averaging",
    "BadInput",
    "Batch",
    "Callback",
    "ClientContext",
    "ConstantRate",
    "CosineRate",
    "Data",
    "Ditto",
    "FPLSums",
    "FedADMM",
    "FedALA",
    "FedAMP",
    "FedASAM",
    "FedAvg",
    "FedAvgFT",
    "FedBABU",
    "FedBN",
    "FedCP",
    "FedDC",
    "FedDecorr",
    "FedDistill",
    "FedDyn",
    "FedEM",
    "FedETF",
    "FedFomo",
    "FedGH",
    "FedGen",
    "FedHKD",
    "FedKD",
    "FedLC",
    "FedMD",
    "FedMLP",
    "FedNH",
    "FedNTD",
    "FedNova",
    "FedOPT",
    "FedPAC",
    "FedPC",
    "FedPCL",
    "FedPCSums",
    "FedPLVM",
    "FedPer",
    "FedPerPlus",
    "FedProc",
    "FedProto",
    "FedProtoAvg",
    "FedProx",
    "FedROD",
    "FedRep",
    "FedSGD",
    "FedSR",
    "FedSeProto",
    "FedSoup",
    "FedTGP",
    "KnnPer",
    "LGFed",
    "LocalOnly",
    "LoggingSettings",
    "MLflow",
    "MPFedCL",
    "Method",
    "Model",
    "Moon",
    "Objective",
    "Observer",
    "PFedCSPC",
    "PFedMe",
    "PerFedAvg",
    "PrivacySettings",
    "Reply",
    "Result",
    "RmsProp",
    "RobustSettings",
    "RunFailed",
    "RuntimeSettings",
    "Sam",
    "Scaffold",
    "SecureSettings",
    "Sgd",
    "StepRate",
    "Task",
    "TensorBoard",
    "TrainedModel",
    "Transform",
    "UploadSettings",
    "WeightsAndBiases",
    "__version__",
    "continue_from",
    "export",
    "load",
    "record",
    "run",
]
# generated: end exports

if not TYPE_CHECKING:  # type checkers see the imports above, and report names that do not exist

    def __getattr__(name):
        module = _MODULES.get(name) or _METHODS.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(module), name)
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
