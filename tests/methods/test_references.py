"""Methods beside references in plain torch, written from papers and authors' code: all that server and clients know
after three rounds.

`pytest -rP tests/methods/test_references.py` prints the largest differences.
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from protofed import tree
from protofed.api.method import Method
from protofed.data.batches import Data
from protofed.engine.federation import Federation
from protofed.methods._shared.validation import stratified_split
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
from protofed.methods.pfedcspc import PFedCSPC, calibration
from protofed.methods.scaffold import Scaffold
from protofed.nn.networks import Parts
from protofed.optim.optimizers import Sgd
from protofed.seeds import derive_seed, generator
from protofed.testing.federations import TASK, TRAINING, after, federation, memories, small_network
from protofed.tree import Params
from references import (
    averaging,
    ccvr,
    fedala,
    fedasam,
    fedavg,
    feddc,
    feddecorr,
    feddyn,
    fedetf,
    fedfomo,
    fedgh,
    fedmd,
    fedmlp,
    fednh,
    fednova,
    fedntd,
    fedopt,
    fedpc,
    fedper_plus,
    fedproc,
    fedproto,
    fedprox,
    fedseproto,
    fedsoup,
    fedsr,
    fpl,
    ga,
    grace,
    ifca,
    moon,
    own_models,
    personal_parts,
    pfedcspc,
    plain,
    scaffold,
)
from references.plain import EQUAL, ROUNDS, SGD, SIZE, parameters

PLAIN_SGD = {**SGD, "momentum": 0.0}


@dataclass(frozen=True)
class Case:
    name: str
    method: Method[Any, Any, Any, Any]
    reference: Callable[[Params], dict[str, Any]]
    """Of the initial weights, what there is after three rounds, by the names of the method's records."""
    sgd: Sgd = TRAINING.optimizer
    unread: tuple[str, ...] = ()
    """What the reference does not have."""
    within: float = 1e-5
    model: Callable[[str], Parts] = small_network
    ends: bool = False
    """Whether what comes after the last round is compared too."""


NO_MOMENTUM = Sgd(lr=SGD["lr"], weight_decay=SGD["weight_decay"])
HEAD = ("classifier.weight", "classifier.bias")
OF_CLUSTERS = ("server/partition/*", "server/prototypes/count")


# ---- draws, which references are given


def validation(client: str) -> tuple[Data, Data]:
    """Which of its examples a client of FedFomo trains on and validates on."""
    return stratified_split(TASK.clients[client], 0.2, generator(TRAINING.seed, "validation", client))


def second() -> Params:
    """The weights that the second model of IFCA begins with."""
    return federation(FedAvg()).networks_of("ann").init(derive_seed(TRAINING.seed, "weights", 1))


def public_examples(size: int) -> list[Tensor]:
    """Those that FedMD's clients score in each round, and in the one after."""
    seeds = [derive_seed(TRAINING.seed, *path) for path in (("setup", 0), *(("round", t) for t in range(ROUNDS)))]
    orders = [torch.randperm(len(TASK.public), generator=generator(seed, "server")) for seed in seeds]
    return [order[:size].sort().values for order in orders]


def partners(count: int) -> pfedcspc.Partners:
    """Those of Eq. (10) of pFedCSPC."""

    def drawn(t: int, u: Tensor, label: Tensor, owner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        draws = generator(derive_seed(TRAINING.seed, "round", t), "server")
        found = calibration.drawn_partners(calibration.Pool(u, label, owner), count, draws)
        return found.same, found.other, found.strength

    return drawn


# ---- the methods

CASES = [
    Case("FedAvg", FedAvg(), fedavg.rounds),
    Case("FedProx", FedProx(proximal_weight=0.5), lambda w: fedprox.rounds(w, 0.5)),
    Case("MOON", Moon(contrast_weight=5.0, temperature=0.5), lambda w: moon.rounds(w, 5.0, 0.5)),
    Case("SCAFFOLD", Scaffold(server_lr=0.7), lambda w: scaffold.rounds(w, 0.7)),
    Case(
        "SCAFFOLD, as printed",
        Scaffold(weighting="uniform"),
        lambda w: scaffold.rounds(w, 1.0, EQUAL, PLAIN_SGD),
        sgd=NO_MOMENTUM,
    ),
    Case("FPL", FPL(temperature=0.1), lambda w: fpl.rounds(w, 0.1)),
    Case(
        "FPL, Eq. (4) and (10) as printed",
        FPL(temperature=0.1, finch_level="first", consistency_reduction="sum"),
        lambda w: fpl.rounds(w, 0.1, "first", "sum"),
    ),
    Case("FedProto", FedProto(pull_weight=2.0), lambda w: fedproto.own_models(w, 2.0)),
    Case(
        "FedProto, as printed",
        FedProto(prototype_mode="recomputed"),
        lambda w: fedproto.own_models(w, 1.0, running=False),
    ),
    Case("FedProto with averaged weights", FedProtoAvg(pull_weight=2.0), lambda w: fedproto.averaged_weights(w, 2.0)),
    Case("FedNova", FedNova(), fednova.rounds),
    Case("FedNova with momentum", FedNova(server_momentum=0.5), lambda w: fednova.rounds(w, server_momentum=0.5)),
    Case(
        "FedNova with a proximal term",
        FedNova(proximal_weight=0.5),
        lambda w: fednova.rounds(w, mu=0.5, sgd=PLAIN_SGD),
        sgd=NO_MOMENTUM,
    ),
    *(
        Case(
            f"FedOPT, {kind}",
            FedOPT(server_optimizer=kind),
            lambda w, kind=kind: fedopt.rounds(w, kind, 0.03, 0.9, 0.99, 1e-3),
        )
        for kind in ("adam", "yogi", "adagrad", "momentum")
    ),
    Case("FedDyn", FedDyn(penalty_weight=0.1), lambda w: feddyn.rounds(w, 0.1)),
    Case(
        "FedDyn, as printed",
        FedDyn(penalty_weight=0.1, weighting="uniform"),
        lambda w: feddyn.rounds(w, 0.1, EQUAL),
    ),
    Case("FedDC", FedDC(penalty_weight=0.1), lambda w: feddc.rounds(w, 0.1, False, SGD)),
    Case(
        "FedDC, as printed",
        FedDC(penalty_weight=0.1, weighting="uniform"),
        lambda w: feddc.rounds(w, 0.1, True, PLAIN_SGD),
        sgd=NO_MOMENTUM,
    ),
    Case("FedNTD", FedNTD(distillation_weight=0.7, temperature=2.0), lambda w: fedntd.rounds(w, 0.7, 2.0)),
    Case("FedRep", FedRep(head_epochs=3), lambda w: personal_parts.rounds(w, personal_parts.HEAD, 3)),
    Case("FedPer", FedPer(), lambda w: personal_parts.rounds(w, personal_parts.HEAD)),
    Case("LG-Fed", LGFed(), lambda w: personal_parts.rounds(w, personal_parts.BODY)),
    Case("FedBN", FedBN(), lambda w: personal_parts.rounds(w, personal_parts.NORMS)),
    Case("Ditto", Ditto(proximal_weight=0.75), lambda w: own_models.ditto(w, 0.75)),
    Case(
        "Ditto, as in FedNH's code",
        Ditto(proximal_weight=0.75, reference="trained", personal_optimizer="sgd", personal_epochs=3),
        lambda w: own_models.ditto(w, 0.75, to_trained=True, plain=True, epochs=3),
    ),
    Case("Local", LocalOnly(), own_models.local),
    Case("FedAvg-FT", FedAvgFT(fine_tuning_epochs=3), lambda w: own_models.fine_tuned(w, 3)),
    Case("FedNH", FedNH(smoothing=0.6, initial_scale=3.0), lambda w: fednh.rounds(w, 0.6)),
    Case("FedProc", FedProc(), fedproc.rounds),
    Case(
        "FedProc, as in RethinkFL",
        FedProc(schedule="closed", prototype_weighting="uniform"),
        lambda w: fedproc.rounds(w, closed=True),
    ),
    Case("FedGH", FedGH(header_rate=0.05, header_epochs=2), lambda w: fedgh.rounds(w, 0.05, 2)),
    Case(
        "FedMLP",
        FedMLP(pull_weight=2.0, semantic_weight=0.5, temperature=0.3, retention_weight=0.4),
        lambda w: fedmlp.rounds(w, 2.0, 0.5, 0.3, 0.4),
    ),
    Case(
        "FedSR",
        FedSR(length_weight=0.1, information_weight=0.05),
        lambda w: fedsr.rounds(w, 0.1, 0.05),
    ),
    Case(
        "FedSR, as printed",
        FedSR(length_weight=0.1, information_weight=0.05, length="square"),
        lambda w: fedsr.rounds(w, 0.1, 0.05, squared=True),
    ),
    Case("FedETF", FedETF(dimension=6, initial_scale=2.0, balance=0.7), lambda w: fedetf.rounds(w, 6, 0.7)),
    Case("FedDecorr", FedDecorr(decorrelation_weight=0.1), lambda w: feddecorr.rounds(w, 0.1)),
    Case(
        "FedDecorr, as printed",
        FedDecorr(decorrelation_weight=0.1, scale="paper"),
        lambda w: feddecorr.rounds(w, 0.1, printed=True),
    ),
    Case(
        "FedASAM",
        FedASAM(rho=0.3, eta=0.1, averaging=True, averaging_start=0.5),
        lambda w: fedasam.rounds(w, 0.3, 0.1, 0.5),
    ),
    Case("FedSoup", FedSoup(start=0.4), lambda w: fedsoup.rounds(w, 0.4)),
    Case("GA", GA(), lambda w: ga.rounds(w, SIZE, 0.2, errors=False, centred=True)),
    Case(
        "GA, as in the authors' code",
        GA(base=FedAvg(weighting="uniform"), measure="error", centred=False),
        lambda w: ga.rounds(w, EQUAL, 0.2, errors=True, centred=False),
    ),
    Case("CCVR", CCVR(samples=20, epochs=2), lambda w: ccvr.rounds(w, 20, 2, 0.01), ends=True),
    Case("Averaging", Averaging(start=0.5), lambda w: averaging.rounds(w, 1)),
    Case("FedALA", FedALA(mixing_rate=0.5), lambda w: fedala.rounds(w, HEAD, 0.5, 0.8, 0.1)),
    Case(
        "FedALA, all layers",
        FedALA(mixing_rate=0.5, mixed="all", threshold=0.01),
        lambda w: fedala.rounds(w, tuple(parameters(w)), 0.5, 0.8, 0.01),
    ),
    Case("FedFomo", FedFomo(), lambda w: fedfomo.rounds(w, validation)),
    Case(
        "FedFomo, as in FL-bench",
        FedFomo(baseline="trained", distance="l2"),
        lambda w: fedfomo.rounds(w, validation, from_trained=True, norm=2),
    ),
    Case("IFCA", IFCA(num_clusters=2), lambda w: ifca.rounds([w, second()])),
    Case(
        "IFCA, as printed",
        IFCA(num_clusters=2, weighting="uniform"),
        lambda w: ifca.rounds([w, second()], EQUAL),
    ),
    Case(
        "FedMD",
        FedMD(alignment_size=10, first_epochs=3, digest_epochs=2),
        lambda w: fedmd.rounds(w, public_examples(10), 3, 2),
    ),
    Case("FedPer++", FedPerPlus(feature_weight=0.5, head_decay=0.1), lambda w: fedper_plus.rounds(w, 0.5, 0.1)),
    Case(
        "GRACE", GRACE(trial_rate=0.1, server_rate=0.8, alignment_weight=5.0), lambda w: grace.rounds(w, 0.1, 5.0, 0.8)
    ),
    Case("FedPC", FedPC(num_clusters=2), lambda w: fedpc.rounds(w, 2, 0.5, 0.5), unread=OF_CLUSTERS),
    Case(
        "FedPC, as printed",
        FedPC(num_clusters=3, distance="norm", weighting="uniform"),
        lambda w: fedpc.rounds(w, 3, 0.5, 0.5, printed=True),
        unread=OF_CLUSTERS,
    ),
    Case(
        "FedSeProto",
        FedSeProto(distillation_weight=0.5, information_weight=0.3, prototype_weight=2.0),
        lambda w: fedseproto.rounds(w, (0.5, 0.3, 2.0)),
    ),
    Case(
        "FedSeProto without weights",
        FedSeProto(shares="prototypes"),
        lambda w: fedseproto.rounds(w, (0.1, 0.01, 1.0), shares_weights=False),
    ),
    Case(
        "pFedCSPC",
        PFedCSPC(
            prototypes="class_means",
            alignment_weight=0.5,
            contrast_weight=0.5,
            augmentations=2,
            calibration_epochs=32,
        ),
        lambda w: pfedcspc.rounds(w, 0.5, 0.5, 32, partners(2)),
        model=pfedcspc.build,
    ),
    Case(
        "pFedCSPC, a cluster for each example",
        PFedCSPC(clusters=6, repeats=1, augmentation=False, calibration_epochs=2),
        lambda w: pfedcspc.rounds(w, 0.1, 0.1, 2, each_example=True),
        model=pfedcspc.build,
    ),
    Case(
        "FedCSPC",
        PFedCSPC(prototypes="class_means", personalised=False, augmentations=1, calibration_epochs=2),
        lambda w: pfedcspc.rounds(w, 0.1, 0.1, 2, partners(1), personalised=False),
        model=pfedcspc.build,
    ),
]


def initial(of: Federation) -> Params:
    """The weights that all begin with."""
    return of.networks_of("ann").init(derive_seed(TRAINING.seed, "weights"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_that_is_known_after_three_rounds_is_that_of_the_reference(case: Case) -> None:
    of = federation(case.method, replace(TASK, model=case.model), optimizer=case.sgd)
    state = after(3, of)
    state = of.finish(state) if case.ends else state
    found = tree.named_leaves({"server": state.server, "memories": memories(state)})
    expected = tree.named_leaves(case.reference(initial(of)))
    missing = [path for path in found if path not in expected]
    assert not [path for path in missing if not any(fnmatchcase(path, pattern) for pattern in case.unread)]
    gaps = {path: (found[path].double() - leaf.double()).abs().max().item() for path, leaf in expected.items()}
    assert all(found[path].shape == leaf.shape for path, leaf in expected.items())
    print(f"{case.name}: {max(gaps.values()):.1e}")
    assert all(gap < case.within for gap in gaps.values()), dict(sorted(gaps.items(), key=lambda item: -item[1])[:5])


def test_training_moves_weights_by_more_than_is_allowed_for() -> None:
    of = federation(FedAvg())
    start, end = initial(of), after(3, of).server.params
    assert max((end[name] - leaf).abs().max().item() for name, leaf in start.items()) > 0.1
    assert torch.equal(start["classifier.weight"], of.start().server.params["classifier.weight"])


@pytest.mark.parametrize("level", ["first", "last"])
def test_fpl_clusters_more_prototypes_than_the_small_task_has_as_the_reference_does(level: Any) -> None:
    """Of twenty clients the coarsest partition is another one than the first."""
    points = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    clusters, unbiased = FPL(finch_level=level).of_class(points)
    expected = torch.stack(fpl.clustered(list(points), level))
    torch.testing.assert_close(clusters.float(), expected)
    torch.testing.assert_close(unbiased.float(), expected.mean(0))
    assert len(fpl.clustered(list(points), "last")) < len(fpl.clustered(list(points), "first"))


def test_references_take_nothing_but_data_draws_and_first_weights_from_protofed() -> None:
    taken = {
        node.module
        for path in Path(plain.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("protofed")
    }
    assert taken == {
        "protofed.data.batches",
        "protofed.data.transforms",
        "protofed.nn.networks",  # what draws the first weights
        "protofed.seeds",
        "protofed.testing.federations",  # the small task
    }
