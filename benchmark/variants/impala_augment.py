"""impala_procgen.py with random augmentation of the frames, only in updates.

    python benchmark/variants/impala_augment.py --env-id bigfish --augment flip translate

Actors act on the unchanged frames. V-trace's values and probabilities are those of moved frames,
including the frame that bootstraps a fragment. Source, moves and departures: procgen_augment.py.

Not measured; the entry has no score of IMPALA with or without it.
"""

import sys
from pathlib import Path

from pydantic.dataclasses import dataclass

from procgen_augment import Augmented, Flags

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import impala_procgen as script


@dataclass(config=script.CONFIG)
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
