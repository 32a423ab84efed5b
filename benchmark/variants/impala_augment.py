"""impala_procgen.py with random augmentation of the frames, in updates only.

    python benchmark/variants/impala_augment.py --env-id bigfish --augment flip translate

Actors act on the frames as they are; V-trace's values and probabilities are those of moved ones,
the frame that bootstraps a fragment included. Source, moves and departures: procgen_augment.py.

Not measured; the entry gives no score of IMPALA with and without.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from procgen_augment import Augmented, Flags

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import impala_procgen as script


@dataclass
class Args(Flags, script.Args):
    pass


class Agent(Augmented, script.Agent):
    pass


script.SCRIPT = "impala_augment"
script.__doc__ = __doc__
script.Args = Args
script.Agent = Agent

if __name__ == "__main__":
    sys.exit(script.main())
