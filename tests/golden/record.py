"""Records the golden states: `make golden`, at a commit whose numbers are right. Name the reason in the commit.

With the names of cases, only these are recorded anew. Each state names the kind of processor that made it."""

import json
import sys
from dataclasses import asdict
from typing import Any

from golden.states import CASES, FILE, TASKS, golden, processor, recorded


def main(names: list[str]) -> None:
    if unknown := set(names) - set(CASES):
        sys.exit(f"there is no case {', '.join(sorted(unknown))}")
    states: dict[str, Any] = recorded() if names else {}
    for task in TASKS:
        for case in names or CASES:
            states[f"{task}: {case}"] = {**asdict(golden(case, task)), "processor": processor()}
            print(f"{task}: {case}", flush=True)
    FILE.write_text(json.dumps(states, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
