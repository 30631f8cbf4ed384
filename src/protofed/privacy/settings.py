"""`[privacy]`: what is promised to the people whose records clients train on."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval, Le

Level = Literal["none", "record", "client"]
NoiseKind = Literal["simulated", "secret"]


@dataclass(frozen=True)
class PrivacySettings:
    """Differential privacy: clipping and noise. None by default, as without this section."""

    level: Level = "none"
    """Whose presence is hidden: that of each record, by noise at each client, or that of each client, by noise in the
    sum over all (`secure.sums`). With fedsgd, which goes around methods with
    prototypes, noise is in the sum for records too."""
    epsilon: Annotated[float, Gt(0), Le(1000)] = 3.0
    """ε for the whole run, all releases together. Smaller is more private."""
    delta: Annotated[float, Gt(0), Le(0.01)] = 1e-5
    """δ for the whole run. It must be well below one in the number of records of a client."""
    clip_features: Annotated[float, Gt(0)] = 4.0
    """R: longer feature vectors are scaled down to this length before they are added to a class sum."""
    clip_gradients: Annotated[float, Gt(0)] = 1.0
    """C: longer gradients of single records are scaled down to this length before they are added up."""
    clip_client: Annotated[float, Gt(0)] = 1.0
    """B: at level "client", what a client changes is scaled down to this length, all numbers together."""
    allow_useless: bool = False
    """At level "client": whether a run may begin whose noise is longer than the sum of all clients' changes."""
    releases: Annotated[int, Ge(1)] = 2
    """In how many rounds clients release class sums, if the method has prototypes. Never in the first round."""
    prototype_share: Annotated[float, Interval(gt=0, lt=1)] = 0.2
    """Which part of μ² is for class sums, if the method has prototypes; the rest is for gradients."""
    noise: NoiseKind = "simulated"
    """Where noise comes from: the run's seed, so that a run can be repeated and nobody is protected, or the system's
    entropy."""

    @property
    def is_on(self) -> bool:
        return self.level != "none"
