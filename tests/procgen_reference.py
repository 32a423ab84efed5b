"""Plays OpenAI's procgen package: what EnvPool's Procgen is compared with in test_envs.py.

    python3.11 -m venv .venv && .venv/bin/pip install -r tests/requirements-procgen.txt
    .venv/bin/python tests/procgen_reference.py tests/procgen_reference.json

The package needs NumPy 1 and Python below 3.13, so it cannot be installed next to the scripts. Writes a digest of
rewards, ends and frames for each game, mode and number of levels; with a second argument also the frames, in a folder.
"""

import hashlib
import itertools
import json
import sys
from pathlib import Path

import numpy as np

GAMES = """bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot heist jumper leaper
maze miner ninja plunder starpilot""".split()
EXPLORATION = "caveflyer climber coinrun heist jumper leaper maze ninja".split()  # games that have this mode
SETTINGS = list(itertools.product(GAMES, ("easy", "hard"), (0, 200)))
SETTINGS += [(game, "exploration", 0) for game in EXPLORATION]
RAND_SEED = 430174204  # ppo_procgen.stream_seed(1, "training")
NUM_ENVS, NUM_STEPS = 8, 300
ACTIONS = np.random.RandomState(0).randint(15, size=(NUM_STEPS, NUM_ENVS))


def digest(x) -> str:
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:16]


def play(game: str, mode: str, num_levels: int):
    """Rewards (T, N), ends (T, N), frames (T + 1, N, 64, 64, 3)."""
    from procgen import ProcgenGym3Env

    options = dict(distribution_mode=mode, rand_seed=RAND_SEED)
    if mode != "exploration":  # it has a level of its own
        options |= dict(num_levels=num_levels, start_level=0)
    env = ProcgenGym3Env(num=NUM_ENVS, env_name=game, num_threads=1, **options)
    rewards, ends, frames = [], [], [env.observe()[1]["rgb"]]
    for action in ACTIONS:
        env.act(action.astype(np.int32))
        reward, obs, first = env.observe()
        rewards.append(reward.copy())
        ends.append(first.copy())
        frames.append(obs["rgb"].copy())
    env.close()
    return np.float32(rewards), np.array(ends, bool), np.array(frames)


if __name__ == "__main__":
    digests = {}
    for setting in SETTINGS:
        rewards, ends, frames = play(*setting)
        name = "-".join(map(str, setting))
        digests[name] = [digest(rewards), digest(ends), digest(frames)]
        if len(sys.argv) > 2:
            np.save(Path(sys.argv[2], f"{name}.npy"), frames)
    lines = [f" {json.dumps(name)}: {json.dumps(values)}" for name, values in digests.items()]
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(lines) + "\n}\n")
