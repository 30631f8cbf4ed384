"""Networks by name, as parts: `features` maps an input to a feature vector, `classifier` maps that to scores."""

from torch import nn

from protofed.networks import Parts


def small_cnn(channels: int, num_classes: int) -> Parts:
    """Two convolutions and a linear layer for images of 28 × 28; features of 64 non-negative numbers."""
    features = nn.Sequential(
        *(nn.Conv2d(channels, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU()),
    )
    return {"features": features, "classifier": nn.Linear(64, num_classes)}


def mlp(inputs: int, num_classes: int, width: int = 64) -> Parts:
    """One hidden layer for vectors; features of `width` non-negative numbers."""
    features = nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU())
    return {"features": features, "classifier": nn.Linear(width, num_classes)}
