"""METHODS: every method by name. The table of contents."""

from typing import Any

from protofed.method import Method
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

METHODS: dict[str, type[Method[Any, Any, Any, Any]]] = {
    "local": LocalOnly,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "moon": Moon,
    "fedproto": FedProto,
    "fedproto_avg": FedProtoAvg,
    "fpl": FPL,
    "fedseproto": FedSeProto,
    "fedpc": FedPC,
    "pfedcspc": PFedCSPC,
    "fedasam": FedASAM,
    "fedrep": FedRep,
}
