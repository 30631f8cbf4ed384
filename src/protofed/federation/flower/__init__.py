"""The federation over Flower: bytes from the server to its sites and back, by a SuperLink. Nothing else imports flwr.

Flower carries, authenticates nodes, and says who is there. It sees signed bytes only: what they mean is decided at both
ends, and no bundle of code is ever fetched or run.
"""

import os

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
os.environ["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] = "1"
