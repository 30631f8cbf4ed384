"""What travels and what is kept in pFedCSPC."""

from torch import Tensor

from protofed.api.task import ClientId
from protofed.methods.pfedcspc.sampling import Slots
from protofed.prototypes.class_means import Prototypes
from protofed.tree import Params, Tree, record


@record
class Knowledge:
    """What the server knows."""

    base: Tree  # the server's record of the base method
    head: Params  # the calibrated projection and classifier
    prototypes: Prototypes  # the global prototypes, (C, D)
    exemplars: Prototypes  # the exemplars, (C, P) with P the size of what the classifier reads
    encoders: Params  # (K, ...), of the K clients of the last round; nothing without personal initialisation
    mixing: dict[ClientId, Tensor]  # (K,) for each client, zeros for one that was not in the last round


@record
class Guidance:
    """What a client receives."""

    base: Tree  # the message of the base method
    prototypes: Prototypes


@record
class Published(Guidance):
    """What the public model predicts with."""

    exemplars: Prototypes


@record
class Kept:
    base: Tree  # the memory of the base method
    params: Params  # the weights trained last; nothing in the global variant


@record
class SampledUpload:
    base: Tree  # the upload of the base method
    prototypes: Slots
