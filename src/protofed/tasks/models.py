"""Networks by name, as parts: `features` maps an input to a feature vector, `classifier` maps that to scores."""

from torch import nn

from protofed.networks import Parts


def small_cnn(channels: int, num_classes: int) -> Parts:
    """Two convolutions with BatchNorm and a linear layer, for images of 28 × 28; 64 non-negative features."""
    features = nn.Sequential(
        *(nn.Conv2d(channels, 16, 5, stride=2, padding=2), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 5, stride=2, padding=2), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU()),
    )
    return {"features": features, "classifier": nn.Linear(64, num_classes)}


def mlp(inputs: int, num_classes: int, width: int = 64) -> Parts:
    """One hidden layer for vectors; features of `width` non-negative numbers."""
    features = nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU())
    return {"features": features, "classifier": nn.Linear(width, num_classes)}
