"""How far exploration gets in Montezuma's Revenge: distinct (room, x / 8, y / 8) cells the player has been in.

    python benchmark/explore.py --steps 400000 --seed 1 --json cells.json -- --num-envs 16 --minibatch-size 512

What follows `--` goes to ppo_atari_rnd.py; compare with `--int-coef 0`. Rows of the file: agent steps of the rollouts,
cells, rooms. The player's position is read from the console's RAM (bytes 42 and 43, the room in byte 3). Cells that
random play saw in the warm-up count too, alike for both.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import gymnasium as gym
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


class Cells(gym.vector.VectorWrapper):
    """Books the cells that any of the environments was in."""

    def __init__(self, envs):
        super().__init__(envs)
        self.cells = set()

    def step(self, actions):
        result = self.env.step(actions)
        ram = result[4]["ram"]
        self.cells |= set(zip(ram[:, 3].tolist(), (ram[:, 42] // 8).tolist(), (ram[:, 43] // 8).tolist(), strict=True))
        return result


def main(argv=None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    flags = argv[argv.index("--") + 1 :] if "--" in argv else []
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400_000, help="agent steps of all environments")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, required=True, help="result, rewritten after each iteration")
    options = parser.parse_args(argv[: argv.index("--")] if "--" in argv else argv)
    import ppo_atari_rnd as script

    make_envs, log = script.make_envs, script.Logger.log
    made, rows = [], []
    git = subprocess.getoutput(f"git -C '{ROOT}' describe --always --dirty --abbrev=40")
    found = {"command": " ".join(["python", "benchmark/explore.py", *argv]), "git": git, "rows": rows}

    def make_cells(*args):
        made.append(Cells(make_envs(*args)))
        return made[-1]

    def book(logger, metrics):
        cells = made[0].cells
        rows.append((metrics["step"], len(cells), len({cell[0] for cell in cells})))
        options.json.write_text(json.dumps(found) + "\n")
        return log(logger, metrics)

    script.make_envs, script.Logger.log = make_cells, book
    with tempfile.TemporaryDirectory() as folder:
        fixed = ["--run-dir", folder, "--eval-episodes", "0", "--seed", str(options.seed), "--checkpoint-every", "1e9"]
        script.train(tyro.cli(script.Args, args=[*fixed, "--total-timesteps", str(options.steps), *flags]))
    print(f"{rows[-1][1]} cells in {rows[-1][2]} rooms after {rows[-1][0]:,} steps; warm-up included")
    return 0


if __name__ == "__main__":
    sys.exit(main())
