"""Networks compute what torch computes, at the weights that they are given and nowhere else."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from doubles import CLASSES, FEATURES, INPUTS, bits, tiny_parts
from protofed.methods.pfedcspc.calibration import knowledge
from protofed.nn.fusion import OVERWRITABLE, fuse
from protofed.nn.networks import Networks, Parts, matching, without
from protofed.nn.precision import product
from protofed.prototypes.class_means import Prototypes, class_sums
from protofed.prototypes.contrast import cluster_contrast
from protofed.prototypes.finch import first_neighbours
from protofed.tree import Params

STATISTICS = ["features.1.running_mean", "features.1.running_var"]


@pytest.fixture
def networks() -> Networks:
    return Networks(tiny_parts)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(6, INPUTS, generator=torch.Generator().manual_seed(0))


def cloned(params: Params) -> Params:
    return {name: leaf.clone() for name, leaf in params.items()}


def reference(parts: Parts, training: bool) -> nn.Module:
    return nn.Sequential(OrderedDict(parts)).train(training)


def test_weights_depend_on_the_seed_alone(networks: Networks) -> None:
    assert bits(networks.init(1)) == bits(Networks(tiny_parts).init(1))
    changed = [n for n, (*_, leaf) in bits(networks.init(1)).items() if leaf != bits(networks.init(2))[n][-1]]
    assert changed == ["features.0.weight", "features.0.bias", "classifier.weight", "classifier.bias"]


def test_fresh_weights_are_not_shared_between_calls(networks: Networks) -> None:
    first = networks.init(1)
    for leaf in first.values():
        leaf.add_(1)
    assert bits(networks.init(1)) != bits(first)


def test_a_later_part_does_not_change_the_weights_of_the_earlier_ones(networks: Networks) -> None:
    more = Networks(lambda: {**tiny_parts(), "head": nn.Linear(FEATURES, 2)})
    assert bits(without(more.init(5), ("head.*",))) == bits(networks.init(5))


def test_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    Networks(tiny_parts).init(3)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("training", [False, True])
def test_a_model_computes_what_torch_computes(networks: Networks, x: Tensor, training: bool) -> None:
    params = {name: leaf + 0.1 for name, leaf in networks.init(1).items()}
    own, theirs = cloned(params), cloned(params)
    module = reference(tiny_parts(), training)
    for _ in range(3):  # statistics of BatchNorm must have moved alike before each call
        found = networks.model(own, training=training).logits(x)
        assert torch.equal(found, functional_call(module, theirs, (x,)))
    assert bits(own) == bits(theirs)
    moved = [name for name in params if not torch.equal(own[name], params[name])]
    assert moved == (STATISTICS if training else [])


def test_features_of_a_batch_are_computed_once_in_training(networks: Networks, x: Tensor) -> None:
    once, twice = networks.init(1), networks.init(1)
    networks.model(once, training=True).features(x)
    model = networks.model(twice, training=True)
    first = model.features(x)
    assert model.features(x) is first
    assert bits(once) == bits(twice), "the statistics of BatchNorm saw the batch again"
    assert not torch.equal(model.features(x + 1), first)
    other = networks.model(networks.init(1), training=True)
    assert other.features(x) is not first
    assert torch.equal(other.features(x), first)


def test_nothing_is_kept_in_evaluation(networks: Networks, x: Tensor) -> None:
    model = networks.model(networks.init(1))
    assert model.features(x) is not model.features(x)


def test_features_are_not_taken_for_those_of_a_tensor_that_is_gone(networks: Networks) -> None:
    model = networks.model(networks.init(1), training=True)
    for k in range(50):  # freed tensors give their place in memory to the next
        x = torch.full((2, INPUTS), float(k)) + torch.arange(2)[:, None]
        assert torch.equal(model.features(x), networks.model(networks.init(1), training=True).features(x))


def test_entries_of_layers_of_normalisation_are_named() -> None:
    features = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Sequential(nn.GroupNorm(2, 4)))
    networks = Networks(lambda: {"features": features, "classifier": nn.BatchNorm1d(4, affine=False)})
    statistics = [f"features.1.{name}" for name in ("weight", "bias", "running_mean", "running_var")]
    others = [f"{layer}.{name}" for layer in ("features.2", "features.3.0") for name in ("weight", "bias")]
    assert list(networks.normalisation) == [*statistics, *others, "classifier.running_mean", "classifier.running_var"]
    assert set(networks.normalisation) < networks.init(0).keys()


class LastState(nn.Module):
    """A recurrent network keeps a second list of its weights, which must not go stale."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(4, FEATURES, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0][:, -1]


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (LastState, (2, 3, 4)),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()), (2, 3, 5, 5)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 3, 8)),
    ],
    ids=["gru", "conv", "attention"],
)
@pytest.mark.parametrize("training", [False, True])
def test_other_kinds_of_layers_too(build: Callable[[], nn.Module], shape: tuple[int, ...], training: bool) -> None:
    networks = Networks(lambda: {"features": build()})
    params = networks.init(1)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weights = {n: leaf.clone().requires_grad_(n in networks.trainable) for n, leaf in params.items()}
    found = networks.model(weights, training=training).features(x)
    theirs = {n: leaf.clone().requires_grad_(n in networks.trainable) for n, leaf in params.items()}
    expected = functional_call(reference({"features": build()}, training), theirs, (x,))
    torch.testing.assert_close(found, expected)
    grads = torch.autograd.grad(found.square().sum(), [weights[n] for n in networks.trainable])
    wanted = torch.autograd.grad(expected.square().sum(), [theirs[n] for n in networks.trainable])
    torch.testing.assert_close(grads, wanted)


def test_two_models_do_not_interfere(networks: Networks, x: Tensor) -> None:
    one, two = networks.init(1), networks.init(2)
    a, b = networks.model(one), networks.model(two)
    alone = networks.model(one).logits(x), networks.model(two).logits(x)
    z_a, z_b = a.features(x), b.features(x)
    assert torch.equal(a.classifier(z_a), alone[0])
    assert torch.equal(b.classifier(z_b), alone[1])


def test_two_models_do_not_interfere_within_one_graph(networks: Networks, x: Tensor) -> None:
    names = networks.trainable
    weights = [{n: leaf.requires_grad_(n in names) for n, leaf in networks.init(s).items()} for s in (1, 2)]

    def slopes(loss: Tensor, params: Params) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, [params[n] for n in names], retain_graph=True)

    alone = [slopes(networks.model(w).logits(x).square().sum(), w) for w in weights]
    a, b = (networks.model(w) for w in weights)
    z_a, z_b = a.features(x), b.features(x)
    both = a.classifier(z_a).square().sum() + b.classifier(z_b).square().sum()
    for own, expected in zip(weights, alone, strict=True):
        assert all(torch.equal(g, e) for g, e in zip(slopes(both, own), expected, strict=True))


def test_a_model_in_training_does_not_disturb_one_in_evaluation(networks: Networks, x: Tensor) -> None:
    params = networks.init(1)
    before = networks.model(cloned(params)).logits(x)
    networks.model(cloned(params), training=True).logits(x)
    assert torch.equal(networks.model(params).logits(x), before)


def test_a_frozen_model_is_a_teacher(networks: Networks, x: Tensor) -> None:
    params = {n: leaf.requires_grad_(n in networks.trainable) for n, leaf in networks.init(1).items()}
    teacher = networks.model(networks.init(2), training=True).frozen(params)
    expected = networks.model(params).logits(x)
    inputs = x.clone().requires_grad_()
    found = teacher.logits(inputs)
    assert torch.equal(found, expected)  # evaluation mode
    found.sum().backward()
    assert inputs.grad is not None
    assert all(leaf.grad is None for leaf in params.values())
    assert not any(leaf.requires_grad for leaf in teacher.params.values())


def test_parameters_and_buffers_are_told_apart(networks: Networks) -> None:
    layers = ["features.0.weight", "features.0.bias", "features.1.weight", "features.1.bias"]
    assert networks.parts == ("features", "classifier")
    assert networks.trainable == (*layers, "classifier.weight", "classifier.bias")
    assert list(networks.initial_buffers) == STATISTICS
    assert networks.initial_buffers[STATISTICS[0]].tolist() == [0.0] * FEATURES
    assert networks.initial_buffers[STATISTICS[1]].tolist() == [1.0] * FEATURES
    params = networks.init(0)
    assert list(networks.model(params).trainable) == list(networks.trainable)
    assert set(params) == {*networks.trainable, *STATISTICS}  # and so no num_batches_tracked


class NextToken(nn.Module):
    """The mean of the tokens' vectors, through a layer."""

    def __init__(self, num_tokens: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, dim)
        self.layer = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.embedding(x).mean(1)))


def tied() -> Parts:
    features, classifier = NextToken(7, 4), nn.Linear(4, 7)
    classifier.weight = features.embedding.weight
    return {"features": features, "classifier": classifier}


def test_tied_weights_are_one_entry() -> None:
    networks, x = Networks(tied), torch.arange(6).view(2, 3)
    params = networks.init(1)
    assert list(params) == list(networks.trainable)
    assert list(params) == [f"features.{n}" for n in ("embedding.weight", "layer.weight", "layer.bias")] + [
        "classifier.bias"
    ]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        parts = tied()
    theirs = list(dict.fromkeys(leaf for part in parts.values() for leaf in part.parameters()))
    ours = {name: leaf.requires_grad_() for name, leaf in params.items()}
    values = [networks.model(ours).logits(x), parts["classifier"](parts["features"](x))]
    assert torch.equal(*values)
    slopes = [
        torch.autograd.grad(v.square().sum(), of) for v, of in zip(values, (list(ours.values()), theirs), strict=True)
    ]
    torch.testing.assert_close(*slopes)
    untied = Networks(lambda: {"features": NextToken(7, 4), "classifier": nn.Linear(4, 7)})
    assert untied.signature != networks.signature


def test_batchnorm_that_counts_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="momentum=None"):
        Networks(lambda: {"features": nn.Sequential(nn.BatchNorm1d(3, momentum=None))})


@pytest.mark.parametrize("name", ["logits", "frozen", "trainable", "params", "networks", "training", "a.b"])
def test_a_part_cannot_take_a_name_that_means_something_else(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Networks(lambda: {name: nn.Linear(1, 1)})


def test_an_unknown_part_is_named_with_those_that_there_are(networks: Networks) -> None:
    with pytest.raises(AttributeError, match="no part 'projector'; the parts are features, classifier"):
        networks.model(networks.init(0)).projector(torch.zeros(1))


def test_feature_dim(networks: Networks, x: Tensor) -> None:
    assert networks.feature_dim(x[:1]) == FEATURES


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def test_equal_networks_have_equal_signatures(networks: Networks) -> None:
    assert networks.signature == Networks(tiny_parts).signature
    wider = Networks(lambda: {**tiny_parts(), "classifier": nn.Linear(FEATURES, CLASSES + 1)})
    assert networks.signature != wider.signature


def test_networks_that_differ_in_a_constant_have_different_signatures() -> None:
    """Else two clients would be given one of the two networks."""
    one, two = (Networks(lambda f=f: {"features": Scaled(f)}) for f in (1.0, 2.0))
    assert one.signature != two.signature


def test_patterns_choose_names() -> None:
    params = {name: torch.zeros(1) for name in ("features.0.weight", "features.1.bias", "classifier.weight")}
    assert list(matching(params, ("features.*",))) == ["features.0.weight", "features.1.bias"]
    assert list(matching(params, ("*.bias", "class*"))) == ["features.1.bias", "classifier.weight"]
    assert list(without(params, ("*.weight",))) == ["features.1.bias"]
    assert matching(params, ("Features.*",)) == {}
    assert matching(params, ()) == {}


def test_a_projection_stands_between_features_and_classifier_if_there_is_one() -> None:
    def parts(has_projection: bool) -> Parts:
        between = {"projection": nn.Linear(4, 3)} if has_projection else {}
        return {"features": nn.Linear(2, 4), **between, "classifier": nn.Linear(3 if has_projection else 4, 5)}

    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    for has_projection in (False, True):
        model = Networks(lambda has_projection=has_projection: parts(has_projection))
        model = model.model(model.init(1))
        z = model.features(x)
        read = model.projection(z) if has_projection else z
        assert torch.equal(model.embedding(z), read)
        assert torch.equal(model.scores(z), model.classifier(read))
        assert torch.equal(model.logits(x), model.classifier(read))


def closure(activation: Callable[[Tensor], Tensor]) -> nn.Module:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return activation(x)

    return nn.Sequential(nn.Linear(2, 2), Inner())


def masked(seed: int) -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.mask = torch.randn(2000, generator=torch.Generator().manual_seed(seed))  # printed abbreviated
    return layer


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: closure(torch.relu), lambda: closure(torch.tanh)),
        (lambda: masked(1), lambda: masked(2)),
    ],
)
def test_networks_whose_difference_is_not_printed_are_not_taken_as_equal(one: Any, other: Any) -> None:
    def signature(build: Callable[[], nn.Module]) -> str:
        return Networks(lambda: {"features": build()}).signature

    assert signature(one) != signature(other)
    assert signature(lambda: masked(1)) == signature(lambda: masked(1))


class Counting(nn.Module):
    """Counts its calls in a buffer, in one of three ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros(1), persistent=way != "unsaved")

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "assigned":
            self.calls = self.calls + 1
        else:
            self.calls.add_(1)
        return x * self.weight


@pytest.mark.parametrize("way", ["in place", "assigned"])
def test_a_buffer_that_changes_is_changed_in_the_weights(way: str) -> None:
    networks = Networks(lambda: {"features": Counting(way)})
    params = networks.init(0)
    for _ in range(3):
        networks.model(params, training=True).features(torch.ones(1))
    assert params["features.calls"].item() == 3
    assert networks.init(0)["features.calls"].item() == 0
    networks.check_unchanged()


def test_state_that_is_neither_saved_nor_sent_is_refused() -> None:
    networks = Networks(lambda: {"features": Counting("unsaved")})
    networks.check_unchanged()
    networks.model(networks.init(0), training=True).features(torch.ones(1))
    with pytest.raises(ValueError, match=r"changed features\.calls, .*: register it with persistent=True"):
        networks.check_unchanged()


def test_weights_are_laid_out_as_a_checkpoint_lays_them_out() -> None:
    networks = Networks(lambda: {"features": nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)})
    assert all(leaf.is_contiguous() for leaf in networks.init(0).values())


def pooled() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3), nn.Flatten())


class Viewing(nn.Module):
    """As many networks are written; `view` refuses maps whose channels are last in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.maps(x).view(len(x), -1)


@pytest.mark.parametrize("build", [pooled, Viewing])
def test_images_may_be_laid_out_anew_on_a_cpu_but_the_results_are_torchs(build: Callable[[], nn.Module]) -> None:
    networks = Networks(lambda: {"features": build()})
    params, x = networks.init(1), torch.randn(5, 3, 12, 12, requires_grad=True)
    module = build()
    module.load_state_dict({name.removeprefix("features."): leaf for name, leaf in params.items()})
    mine, theirs = networks.model(params).features(x), module(x)
    torch.testing.assert_close(mine, theirs)
    weight = torch.randn(mine.shape)
    slopes = [torch.autograd.grad((value * weight).sum(), x)[0] for value in (mine, theirs)]
    torch.testing.assert_close(*slopes)


def test_maps_are_pooled_with_their_channels_last() -> None:
    """Which is faster; networks with layers of their own are left alone."""
    layouts = []
    for build in (pooled, Viewing):
        networks = Networks(lambda build=build: {"features": build()})
        (layer,) = (m for m in networks._modes[False]["features"].modules() if isinstance(m, nn.MaxPool2d))
        layer.register_forward_pre_hook(lambda _, inputs: layouts.append(inputs[0].stride(1)))
        networks.model(networks.init(1)).features(torch.randn(5, 3, 12, 12))
    assert layouts == [1, 100]


POOLS = [
    lambda: nn.MaxPool2d(2),
    lambda: nn.MaxPool2d(3, stride=2, padding=1),
    lambda: nn.MaxPool2d(3, stride=1, dilation=2, ceil_mode=True),
]


def kinds(module: nn.Module) -> list[type]:
    return [type(layer) for layer in module.children()]


def results(module: nn.Module, x: Tensor) -> list[Tensor]:
    """What it gives, and the gradients of its weights and of its inputs."""
    x = x.clone().requires_grad_()
    value = module(x * 1)  # times one, since what has no other use may be overwritten
    weight = torch.arange(value.numel()).view(value.shape) % 7 - 3.0
    return [value, *torch.autograd.grad((value * weight).sum(), [*module.parameters(), x])]


def whole(shape: tuple[int, ...]) -> Tensor:
    """Small whole numbers: many are equal, zero or below, and sums are exact."""
    return torch.randint(-2, 3, shape).float()


@pytest.mark.parametrize("pool", POOLS)
def test_pooling_before_a_relu_changes_no_value_and_no_gradient(pool: Callable[[], nn.Module]) -> None:
    usual = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), pool(), nn.Conv2d(3, 2, 2))
    for leaf in usual.parameters():
        leaf.data = whole(tuple(leaf.shape))
    moved = copy.deepcopy(usual)
    fuse(moved)
    assert kinds(moved) == [nn.Conv2d, nn.MaxPool2d, nn.ReLU, nn.Conv2d]
    assert list(moved.state_dict()) == list(usual.state_dict())
    x = whole((7, 2, 9, 9))
    assert all(map(torch.equal, results(usual, x), results(moved, x)))


LAYERS = {
    nn.Conv1d: (lambda: nn.Conv1d(4, 4, 1), (3, 4, 5)),
    nn.Conv2d: (lambda: nn.Conv2d(4, 4, 1), (3, 4, 5, 5)),
    nn.Conv3d: (lambda: nn.Conv3d(4, 4, 1), (3, 4, 5, 5, 5)),
    nn.Linear: (lambda: nn.Linear(4, 4), (3, 4)),
    nn.BatchNorm1d: (lambda: nn.BatchNorm1d(4), (3, 4)),
    nn.BatchNorm2d: (lambda: nn.BatchNorm2d(4), (3, 4, 5, 5)),
    nn.MaxPool2d: (lambda: nn.MaxPool2d(2), (3, 4, 6, 6)),
}


@pytest.mark.parametrize("kind", OVERWRITABLE)
def test_what_a_relu_overwrites_nobody_misses(kind: type) -> None:
    build, shape = LAYERS[kind]
    usual = nn.Sequential(build(), nn.ReLU(), nn.Flatten())
    quick = copy.deepcopy(usual)
    fuse(quick)
    assert quick.get_submodule("1").inplace
    x = torch.randn(shape)
    assert all(map(torch.equal, results(usual, x), results(quick, x)))


def test_a_relu_does_not_overwrite_what_others_need() -> None:
    relu = nn.ReLU()
    module = nn.Sequential(relu, nn.Linear(4, 4), relu, nn.Sigmoid(), nn.ReLU())
    usual, x = copy.deepcopy(module), torch.randn(3, 4)
    fuse(module)
    assert [layer.inplace for layer in module if isinstance(layer, nn.ReLU)] == [False, True, False]
    assert all(map(torch.equal, results(usual, x), results(module, x)))


def test_networks_pool_before_they_take_a_relu_and_overwrite_what_they_pooled() -> None:
    own = Networks(lambda: {"features": pooled()})
    for training in (False, True):
        features = own._modes[training]["features"]
        assert kinds(features) == [nn.Conv2d, nn.MaxPool2d, nn.ReLU, nn.Conv2d, nn.Flatten]
        assert features.get_submodule("2").inplace


class Tapping(nn.Module):
    """Looks at what the layers of its chain give."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        maps = self.chain[0](x)
        return self.chain[2](self.chain[1](maps)).sum((1, 2, 3)) + maps.sum((1, 2, 3))


def hooked() -> nn.Sequential:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1))
    module[1].register_forward_hook(lambda *_: None)
    return module


def pooling() -> list[nn.Module]:
    return [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2)]


class Own(nn.Sequential):
    """Whatever stands between its layers is its own affair."""


@pytest.mark.parametrize(
    "build",
    [Tapping, hooked, lambda: Own(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1))],
    ids=["taps", "hook", "own"],
)
def test_layers_stay_as_they_are_where_somebody_may_look(build: Callable[[], nn.Module]) -> None:
    own = Networks(lambda: {"features": build()})
    features = own._modes[True]["features"]
    assert kinds(getattr(features, "chain", features)) == [nn.Conv2d, nn.ReLU, nn.MaxPool2d, nn.Conv2d]
    assert not any(layer.inplace for layer in features.modules() if isinstance(layer, nn.ReLU))


@pytest.mark.parametrize(
    "layers",
    [
        lambda: (nn.ReLU(), nn.MaxPool2d(2, return_indices=True)),
        lambda: (nn.LeakyReLU(-1.0), nn.MaxPool2d(2)),
        lambda: (nn.ReLU(), nn.AvgPool2d(2)),
    ],
)
def test_layers_stay_where_their_order_matters(layers: Callable[[], tuple[nn.Module, ...]]) -> None:
    module = nn.Sequential(*layers(), nn.Conv2d(4, 4, 1))
    before = kinds(module)
    fuse(module)
    assert kinds(module) == before


TWICE = nn.MaxPool2d(2)
OVERWRITING = {
    "dropout": lambda: [*pooling(), nn.Dropout(0.5, inplace=True), nn.Conv2d(4, 4, 1)],
    "another relu": lambda: [*pooling(), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1)],
    "behind a view": lambda: [*pooling(), nn.Flatten(), nn.LeakyReLU(inplace=True), nn.Linear(36, 4)],
    "in another chain": lambda: [
        nn.Sequential(*pooling()),
        nn.Sequential(nn.Hardtanh(inplace=True), nn.Conv2d(4, 4, 1)),
    ],
    "whoever is next": pooling,
    "whoever is next, behind a view": lambda: [*pooling(), nn.Flatten()],
    "the second visit": lambda: [nn.Conv2d(3, 3, 1), nn.ReLU(), TWICE, nn.Conv2d(3, 3, 1), nn.ReLU(), TWICE],
}
"""Chains whose pooled maps are changed in place, or may be."""


@pytest.mark.parametrize("name", OVERWRITING)
def test_what_is_overwritten_behind_pooling_is_no_relus(name: str) -> None:
    usual = nn.Sequential(*OVERWRITING[name]())
    quick = copy.deepcopy(usual)
    fuse(quick)
    x, slopes = torch.randn(2, 3, 8, 8), []
    for module in (usual, quick):
        torch.manual_seed(0)  # for dropout
        value = module(x).add_(1).square().sum()  # as a loss may treat features
        slopes.append(torch.autograd.grad(value, list(module.parameters())))
    assert all(map(torch.equal, *slopes))


def test_chains_within_chains_pool_first_too() -> None:
    module = nn.Sequential(nn.Sequential(*pooling()), nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True)))
    fuse(module)
    assert kinds(module[0]) == [nn.Conv2d, nn.MaxPool2d, nn.ReLU]


@pytest.mark.parametrize("rounds_in_tf32", [True, False])
def test_products_of_losses_and_sums_are_exact_whatever_the_networks_work_in(
    rounds_in_tf32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is rounded on a CPU in tf32; so what is asked is whether it would be, at the time of each product."""
    seen: list[bool] = []
    usual = Tensor.__matmul__

    def watched(a: Tensor, b: Tensor) -> Tensor:
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        return usual(a, b)

    before = torch.backends.cuda.matmul.allow_tf32
    a = torch.rand(5, 64, generator=torch.Generator().manual_seed(0))
    prototypes = Prototypes(a, torch.ones(5))
    monkeypatch.setattr(Tensor, "__matmul__", watched)
    torch.backends.cuda.matmul.allow_tf32 = rounds_in_tf32
    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(product(a, a.T), usual(a.double(), a.T.double()).float())
            class_sums(a, torch.arange(5), torch.ones(5), 5)
            cluster_contrast(a, torch.arange(5), a, torch.arange(5), 0.02)
            knowledge(a, prototypes, 0.02)
            first_neighbours(a)
        assert torch.backends.cuda.matmul.allow_tf32 is rounds_in_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert len(seen) >= 5
    assert not any(seen)
