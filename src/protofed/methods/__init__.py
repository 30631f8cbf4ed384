"""METHODS: every method by name. The table of contents."""

from typing import Any

from protofed.api.method import Method
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

METHODS: dict[str, type[Method[Any, Any, Any, Any]]] = {
    # the four systems
    "fpl": FPL,
    "fedseproto": FedSeProto,
    "fedpc": FedPC,
    "pfedcspc": PFedCSPC,
    # one model for all
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "moon": Moon,
    "fedopt": FedOPT,
    "fednova": FedNova,
    "scaffold": Scaffold,
    "feddyn": FedDyn,
    "feddc": FedDC,
    "fedntd": FedNTD,
    "feddecorr": FedDecorr,
    "fedasam": FedASAM,
    "averaging": Averaging,
    "fedsoup": FedSoup,
    "grace": GRACE,
    "ga": GA,
    "ccvr": CCVR,
    "fedsr": FedSR,
    # one model for all, and prototypes
    "fedproto_avg": FedProtoAvg,
    "fedproc": FedProc,
    "fedmlp": FedMLP,
    "fednh": FedNH,
    "fedetf": FedETF,
    # a model for each client
    "local": LocalOnly,
    "fedproto": FedProto,
    "fedgh": FedGH,
    "fedmd": FedMD,
    "fedper": FedPer,
    "fedper_plus": FedPerPlus,
    "fedrep": FedRep,
    "lg_fed": LGFed,
    "fedbn": FedBN,
    "ditto": Ditto,
    "fedavg_ft": FedAvgFT,
    "fedala": FedALA,
    "fedfomo": FedFomo,
    "ifca": IFCA,
}


def bases_of(method: type[Method[Any, Any, Any, Any]]) -> list[str]:
    """The methods that this one can go around: those with a public model; none unless it is a wrapper."""
    if "wrapper" not in method.tags:
        return []
    public = {n: cls for n, cls in METHODS.items() if cls.public is not Method.public and "wrapper" not in cls.tags}
    return [n for n, cls in public.items() if cls.has_plain_classifier or not method.retrains_classifier]
