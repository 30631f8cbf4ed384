"""The papers' networks: parameters counted by hand, shapes, what the layers compute, and life under `Networks`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from doubles import bits
from protofed.nn.networks import Networks, Parts
from protofed.tasks.models import MODELS, cnn_norm, conv2, mlp, mlp_norm, resnet10, resnet18
from protofed.tree import Params


@dataclass(frozen=True)
class Case:
    name: str
    pixels: int
    counts: dict[str, list[int]]
    """Parameters of each layer that has some, in order, by part."""
    dim: int
    settings: dict[str, Any]
    channels: int = 3
    num_classes: int = 10

    def build(self) -> Parts:
        return MODELS[self.name](self.channels, self.num_classes, **self.settings)

    def images(self, number: int = 4, seed: int = 0) -> Tensor:
        draws = torch.Generator().manual_seed(seed)
        return torch.randn(number, self.channels, self.pixels, self.pixels, generator=draws)

    def __str__(self) -> str:
        return "-".join([self.name, *map(str, self.settings.values())])


# A convolution from i to o channels with a k × k kernel has i·o·k² weights, BatchNorm of o channels 2·o, a linear layer
# (i + 1)·o. Stem: 3·64·9 = 1728, and 128.
STEM = [1728, 128]
# Blocks: conv, norm, conv, norm, and for the shortcut 1 × 1 conv and norm.
# 64 → 64: 64·64·9 = 36 864 twice.
FIRST = [36_864, 128, 36_864, 128]
# 64 → 128: 64·128·9 = 73 728; 128·128·9 = 147 456; 64·128 = 8192.
SECOND = [73_728, 256, 147_456, 256, 8_192, 256]
# 128 → 256: 128·256·9 = 294 912; 256·256·9 = 589 824; 128·256 = 32 768.
THIRD = [294_912, 512, 589_824, 512, 32_768, 512]
# 256 → 512: 256·512·9 = 1 179 648; 512·512·9 = 2 359 296; 256·512 = 131 072.
FOURTH = [1_179_648, 1024, 2_359_296, 1024, 131_072, 1024]
RESNET10 = STEM + FIRST + SECOND + THIRD + FOURTH
# The second block of a stage keeps its shape, so it has no shortcut layers.
RESNET18 = STEM + FIRST + FIRST + SECOND + [147_456, 256] * 2 + THIRD + [589_824, 512] * 2
RESNET18 += FOURTH + [2_359_296, 1024] * 2
# 512 → 10: 513·10 = 5130. 512 → 512: 513·512 = 262 656. 512 → 256: 513·256 = 131 328. 256 → 10: 257·10 = 2570.
PROJECTED = {"features": RESNET18, "projection": [262_656, 131_328], "classifier": [2570]}
LINEAR = {"features": RESNET18, "projection": [262_656, 262_656], "classifier": [5130]}

CASES = [
    Case("resnet10", 32, {"features": RESNET10, "classifier": [5130]}, 512, {}),
    Case("resnet18", 32, {"features": RESNET18, "classifier": [5130]}, 512, {"stem": "cifar"}),
    Case("resnet18", 64, {"features": RESNET18, "classifier": [5130]}, 512, {"stem": "imagenet64"}),
    Case("resnet18", 32, PROJECTED, 512, {"stem": "cifar", "projected": True}),
    Case("resnet18", 64, LINEAR, 512, {"stem": "imagenet64", "projected": True}),
    # (3·9 + 1)·32 = 896; (32·9 + 1)·64 = 18 496; (64·9 + 1)·128 = 73 856; (128·16 + 1)·512 = 1 049 088.
    Case("cnn3", 32, {"features": [896, 18_496, 73_856, 1_049_088], "classifier": [5130]}, 512, {}),
    # 3·32·9 = 864; 32·64·9 = 18 432; 64·128·9 = 73 728; 128·128·9 = 147 456, without bias; 129·10 = 1290.
    Case(
        *("cnn_norm", 32, {"features": [864, 64, 18_432, 128, 73_728, 256, 147_456, 256], "classifier": [1290]}),
        *(128, {}),
    ),
    # (64·16 + 1)·512 = 524 800.
    Case("cnn2", 32, {"features": [896, 18_496, 524_800], "classifier": [5130]}, 512, {}),
    # (3·25 + 1)·64 = 4864; (64·25 + 1)·64 = 102 464; 32 → 28 → 14 → 10 → 5 pixels, (64·25 + 1)·384 = 614 784;
    # 385·192 = 73 920; 192·10 = 1920 without bias.
    Case("conv2", 32, {"features": [4_864, 102_464, 614_784, 73_920], "classifier": [1920]}, 192, {}),
    # (25 + 1)·64 = 1664; 28 → 24 → 12 → 8 → 4 pixels, (64·16 + 1)·384 = 393 600.
    Case(
        *("conv2", 28, {"features": [1_664, 102_464, 393_600, 73_920], "classifier": [1920]}, 192, {"pixels": 28}),
        channels=1,
    ),
    # (3·25 + 1)·6 = 456; (6·25 + 1)·16 = 2416; (16·25 + 1)·120 = 48 120; 121·84 = 10 164;
    # 85·84 = 7140; 85·256 = 21 760; 257·10 = 2570.
    Case(
        *("lenet_projected", 32),
        {"features": [456, 2_416, 48_120, 10_164], "projection": [7_140, 21_760], "classifier": [2570]},
        *(84, {}),
    ),
]

# The layers above summed up by hand; the counts of the two ResNets are also known from elsewhere.
TOTALS = {
    "resnet10": 4_903_242,
    "resnet18-cifar": 11_173_962,
    "resnet18-imagenet64": 11_173_962,
    "resnet18-cifar-True": 11_173_962 - 5_130 + 262_656 + 131_328 + 2_570,
    "resnet18-imagenet64-True": 11_173_962 + 2 * 262_656,
    "cnn3": 1_147_466,
    "cnn_norm": 242_474,
    "cnn2": 549_322,
    "conv2": 797_952,
    "conv2-28": 573_568,
    "lenet_projected": 92_626,
}


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


def layer_counts(module: nn.Module) -> list[int]:
    """Parameters of each layer that has some of its own, in the order of construction."""
    own = [sum(p.numel() for p in layer.parameters(recurse=False)) for layer in module.modules()]
    return [number for number in own if number]


def test_every_layer_has_the_parameters_that_the_papers_imply(case: Case) -> None:
    parts = case.build()
    assert {part: layer_counts(module) for part, module in parts.items()} == case.counts
    assert list(parts) == list(case.counts), "the order of the parts decides their first weights"
    assert sum(p.numel() for module in parts.values() for p in module.parameters()) == TOTALS[str(case)]


def test_features_have_their_size_and_are_not_negative_and_scores_are_one_per_class(case: Case) -> None:
    networks = Networks(case.build)
    for training in (False, True):
        model = networks.model(networks.init(1), training=training)
        z = model.features(case.images())
        assert z.shape == (4, case.dim)
        assert (z >= 0).all()
        assert (z > 0).any()
        assert model.scores(z).shape == (4, 10)
    assert networks.feature_dim(case.images(1)) == case.dim


def test_a_gradient_reaches_every_parameter(case: Case) -> None:
    networks = Networks(case.build)
    params = {n: p.requires_grad_(n in networks.trainable) for n, p in networks.init(1).items()}
    loss = F.cross_entropy(networks.model(params, training=True).logits(case.images(8)), torch.arange(8))
    grads = torch.autograd.grad(loss, [params[name] for name in networks.trainable])
    still = [name for name, g in zip(networks.trainable, grads, strict=True) if not g.abs().sum() > 0]
    assert not still


def test_the_same_seed_builds_the_same_network_and_another_seed_another_one(case: Case) -> None:
    first, second = Networks(case.build), Networks(case.build)
    assert bits(first.init(5)) == bits(second.init(5))
    assert first.signature == second.signature
    other, same = bits(first.init(6)), bits(first.init(5))
    matrices = [name for name, leaf in first.init(5).items() if leaf.ndim > 1]
    assert all(other[name] != same[name] for name in matrices)


def test_statistics_of_batchnorm_are_entries_that_training_moves_and_evaluation_reads(case: Case) -> None:
    networks = Networks(case.build)
    norms = sum(isinstance(layer, nn.BatchNorm2d) for part in case.build().values() for layer in part.modules())
    # ResNet-10: stem 1, blocks 2 + 3·3. ResNet-18: four more blocks of 2. cnn_norm: 4. The others have none.
    assert norms == {"resnet10": 12, "resnet18": 20, "cnn_norm": 4}.get(case.name, 0)
    statistics = [name for name in networks.init(1) if name.endswith(("running_mean", "running_var"))]
    assert len(statistics) == 2 * norms
    assert set(networks.init(1)) == set(networks.trainable) | set(statistics)
    params = networks.init(1)
    before = {name: leaf.clone() for name, leaf in params.items()}
    networks.model(params, training=False).logits(case.images())
    assert bits(params) == bits(before)
    networks.model(params, training=True).logits(case.images())
    assert [n for n in params if not torch.equal(params[n], before[n])] == statistics


def test_layers_start_as_pytorch_starts_them(case: Case) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = case.build()
    for part in parts.values():
        for layer in part.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                # Uniform within ±1/√fan_in for weights and biases alike, so that the standard deviation is bound/√3.
                bound = layer.weight[0].numel() ** -0.5
                assert layer.weight.abs().max() <= bound
                if layer.weight.numel() > 2000:  # enough numbers for 5 percent
                    assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
                assert layer.bias is None or layer.bias.abs().max() <= bound
            elif isinstance(layer, nn.BatchNorm2d):
                assert (layer.weight == 1).all()
                assert (layer.bias == 0).all()
                assert layer.momentum == 0.1


# ---- what the layers compute, written out without modules


def normed(x: Tensor, p: Params, name: str) -> Tensor:
    """Normalised with the statistics of the batch, as in training."""
    return F.batch_norm(x, None, None, p[f"{name}.weight"], p[f"{name}.bias"], training=True)


def residual(x: Tensor, p: Params, name: str, stride: int) -> Tensor:
    inner = normed(F.conv2d(x, p[f"{name}.conv1.weight"], stride=stride, padding=1), p, f"{name}.norm1").relu()
    inner = normed(F.conv2d(inner, p[f"{name}.conv2.weight"], padding=1), p, f"{name}.norm2")
    if f"{name}.shortcut.0.weight" in p:
        x = normed(F.conv2d(x, p[f"{name}.shortcut.0.weight"], stride=stride), p, f"{name}.shortcut.1")
    return (inner + x).relu()


def resnet_by_hand(x: Tensor, p: Params, stem_stride: int, strides: list[int]) -> Tensor:
    x = normed(F.conv2d(x, p["features.0.weight"], stride=stem_stride, padding=1), p, "features.1").relu()
    for k, stride in enumerate(strides):
        x = residual(x, p, f"features.{3 + k}", stride)
    return x.mean((2, 3))


def cnn_by_hand(x: Tensor, p: Params, layers: tuple[int, ...]) -> Tensor:
    for k in layers:
        x = F.conv2d(x, p[f"features.{k}.weight"], p[f"features.{k}.bias"], padding=1).relu()
        x = F.max_pool2d(x, 2)
    side = x.shape[-1] // 4  # a mean of side × side pixels for each cell of 4 × 4
    x = F.avg_pool2d(x, side).flatten(1)
    last = 3 * len(layers) + 2
    return F.linear(x, p[f"features.{last}.weight"], p[f"features.{last}.bias"]).relu()


def cnn_norm_by_hand(x: Tensor, p: Params) -> Tensor:
    for k in (0, 3, 6, 9):
        x = normed(F.conv2d(x, p[f"features.{k}.weight"], stride=2, padding=1), p, f"features.{k + 1}").relu()
    return x.mean((2, 3))


def lenet_by_hand(x: Tensor, p: Params) -> Tensor:
    """The shape that `conv2` and `lenet_projected` share."""
    for k in (0, 3):
        x = F.max_pool2d(F.conv2d(x, p[f"features.{k}.weight"], p[f"features.{k}.bias"]).relu(), 2)
    x = x.flatten(1)
    for k in (7, 9):
        x = F.linear(x, p[f"features.{k}.weight"], p[f"features.{k}.bias"]).relu()
    return x


BY_HAND: dict[str, Callable[[Tensor, Params], Tensor]] = {
    "resnet10": lambda x, p: resnet_by_hand(x, p, 1, [1, 2, 2, 2]),
    "resnet18-cifar": lambda x, p: resnet_by_hand(x, p, 1, [1, 1, 2, 1, 2, 1, 2, 1]),
    "resnet18-imagenet64": lambda x, p: resnet_by_hand(x, p, 2, [1, 1, 2, 1, 2, 1, 2, 1]),
    "cnn_norm": lambda x, p: cnn_norm_by_hand(x, p),
    "cnn3": lambda x, p: cnn_by_hand(x, p, (0, 3, 6)),
    "cnn2": lambda x, p: cnn_by_hand(x, p, (0, 3)),
    "conv2": lenet_by_hand,
    "lenet_projected": lenet_by_hand,
}


def test_the_layers_compute_what_the_same_steps_without_modules_compute(case: Case) -> None:
    networks = Networks(case.build)
    params = {n: p + 0.01 if p.ndim == 1 else p for n, p in networks.init(2).items()}  # no bias or shift may be 0
    x = case.images(3)
    by_hand = BY_HAND[str(case).removesuffix("-True").removesuffix("-28")]
    z = by_hand(x, {n: p.clone() for n, p in params.items()})
    model = networks.model({n: p.clone() for n, p in params.items()}, training=True)
    torch.testing.assert_close(model.features(x), z, rtol=1e-4, atol=1e-5)
    h = z
    if "projection" in networks.parts:
        first, last = sorted({name.split(".")[1] for name in params if name.startswith("projection.")})
        h = F.linear(h, params[f"projection.{first}.weight"], params[f"projection.{first}.bias"])
        if str(case) != "resnet18-imagenet64-True":  # which has no ReLU there
            h = h.relu()
        h = F.linear(h, params[f"projection.{last}.weight"], params[f"projection.{last}.bias"])
    scores = F.linear(h, params["classifier.weight"], params.get("classifier.bias"))
    torch.testing.assert_close(model.scores(z), scores, rtol=1e-4, atol=1e-5)


def multiplications(parts: Parts, x: Tensor) -> int:
    """Multiply-adds of convolutions and linear layers for one image."""
    seen = []

    def count(layer: nn.Module, _: Any, output: Tensor) -> None:
        seen.append(output[0].numel() * layer.weight[0].numel())

    for part in parts.values():
        for layer in part.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                layer.register_forward_hook(count)
    parts["classifier"](parts["features"](x))
    return sum(seen)


def test_resnet10_costs_a_quarter_of_a_giga_multiplication_for_an_image_of_32() -> None:
    # Weights of the convolutions times the pixels of their output: 1728·32² + 73 728·32² + 229 376·16² + 917 504·8² +
    # 3 670 016·4² + 5120 = 253 432 832, which is known as 0.253 GMAC.
    assert multiplications(resnet10(3, 10), torch.zeros(1, 3, 32, 32)) == 253_432_832


def test_the_stems_give_the_stages_the_same_maps_for_32_and_64_pixels() -> None:
    cifar = multiplications(resnet18(3, 10), torch.zeros(1, 3, 32, 32))
    assert multiplications(resnet18(3, 10, stem="imagenet64"), torch.zeros(1, 3, 64, 64)) == cifar


@pytest.mark.parametrize("pixels", [28, 32, 64, 225])
@pytest.mark.parametrize("name", ["cnn2", "cnn3"])
def test_the_encoders_of_fedseproto_take_images_of_any_size(name: str, pixels: int) -> None:
    assert MODELS[name](3, 7)["features"](torch.zeros(1, 3, pixels, pixels)).shape == (1, 512)


def test_channels_and_classes_are_as_asked_for() -> None:
    for name in MODELS.keys() - {"mlp", "mlp_norm"}:
        parts = MODELS[name](1, 7)
        first = next(layer for layer in parts["features"].modules() if isinstance(layer, nn.Conv2d))
        assert first.in_channels == 1, name
        assert parts["classifier"].out_features == 7, name


def test_the_registry_names_each_builder_by_its_own_name() -> None:
    assert all(builder.__name__ == name for name, builder in MODELS.items())
    assert {case.name for case in CASES} | {"small_cnn", "mlp", "mlp_norm"} == MODELS.keys()


def test_only_fedpc_has_a_classifier_without_bias() -> None:
    assert conv2(3, 10)["classifier"].bias is None
    without = [n for n in MODELS if n != "mlp" and MODELS[n](3, 10)["classifier"].bias is None]
    assert without == ["conv2"]


def test_the_network_for_tables_with_normalisation_is_the_plain_one_with_batchnorm() -> None:
    plain, normalised = mlp(5, 3)["features"], mlp_norm(5, 3)["features"]
    assert [type(layer) for layer in normalised if not isinstance(layer, nn.BatchNorm1d)] == [type(p) for p in plain]
    assert sum(isinstance(layer, nn.BatchNorm1d) for layer in normalised) == 1
    assert mlp_norm(5, 3)["classifier"].out_features == 3


@pytest.mark.parametrize("pixels", [8, 28, 64, 128])
def test_the_network_with_normalisation_reads_images_of_any_size(pixels: int) -> None:
    assert cnn_norm(1, 4)["features"](torch.zeros(2, 1, pixels, pixels)).shape == (2, 128)
