"""Is what the predictor has not seen novel? The bonus on unseen screens of a game over that on the screen it learned.

    python benchmark/novelty.py --seeds 3 --json novelty.json

Frames of Pitfall: random play on the first screen, cut where it leaves, is replayed to ppo_atari_snd.py as an
environment, so that its own loop trains target and predictor on it. Then the bonus is taken on frames of that screen
from games that were not replayed, and on the screens to its left and right. One mean a game, so that standard errors
are over games. Standardised frames of another screen are novel even to networks that learned nothing, so the same
ratio is taken with fresh ones, under the same statistics: learning is what lies between. Rows of the file: target,
seed, both means with their errors, their ratio, how many errors apart they are, the ratio of untrained networks, and
how far the bonus on the replayed frames has fallen since the first iteration.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import ppo_atari_snd as script  # noqa: E402

STD = dict(target="std", snd_net="relu4", target_gain=0.5, predictor_gain=0.5, predictor_sum=True)
VARIANTS = {  # the published settings; equal rows and steps for all
    "v": dict(),
    "std": dict(**STD, snd_preprocess="none", predictor_share=1),
    "vic": dict(target="vic", snd_net="relu4", target_gain=0.5, snd_preprocess="none", predictor_share=1),
}
ROOM = 1  # where the RAM keeps the number of the screen
LEFT, RIGHT, JUMP_LEFT, JUMP_RIGHT = 4, 3, 12, 11


class Replay(gym.vector.VectorEnv):
    """Shows recorded games, whatever the actions, each to its last frame; next-step autoreset."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}

    def __init__(self, games, num_envs: int):
        self.games, self.num_envs = games, num_envs
        self.single_observation_space = gym.spaces.Box(0, 255, games[0].shape[1:], np.uint8)
        self.single_action_space = gym.spaces.Discrete(18)
        self.game, self.t = np.arange(num_envs) % len(games), np.zeros(num_envs, int)
        self.over = np.zeros(num_envs, bool)

    def frames(self):
        return np.stack([self.games[game][t] for game, t in zip(self.game, self.t, strict=True)])

    def reset(self, **options):
        return self.frames(), {}

    def step(self, actions):
        self.game = np.where(self.over, (self.game + self.num_envs) % len(self.games), self.game)
        self.t = np.where(self.over, 0, self.t + 1)
        self.over = self.t == [len(self.games[game]) - 1 for game in self.game]
        return self.frames(), np.zeros(self.num_envs, np.float32), self.over.copy(), np.zeros(self.num_envs, bool), {}


def record(args, num_envs: int, steps: int, walk: bool, seed: int):
    """Games of `num_envs` envs: random play on the first screen, or (walk) walking off it and what came then."""
    envs, rng = script.make_envs(args, num_envs, "walking" if walk else "training"), np.random.default_rng(seed)
    obs, _ = envs.reset()
    room = envs.step(np.zeros(num_envs, int))[4]["ram"][:, ROOM]
    games, home, gone = [[] for _ in range(num_envs)], room[0], np.zeros(num_envs, bool)
    for _ in range(steps):
        actions = rng.integers(18, size=num_envs)
        if walk:
            left, jump = np.arange(num_envs) % 2 == 0, rng.random(num_envs) < 0.1
            actions = np.where(left, np.where(jump, JUMP_LEFT, LEFT), np.where(jump, JUMP_RIGHT, RIGHT))
        obs, _, ended, cut, info = envs.step(actions)
        away = info["ram"][:, ROOM] != home
        gone |= ended | cut | (away & (not walk))
        for i in np.flatnonzero((away == walk) & ~gone):
            games[i].append(obs[i].copy())
    return [np.stack(game) for game in games if len(game) > 20]


def by_game(snd, games):
    """Mean bonus of each game, its mean over games, its standard error."""
    with torch.no_grad():
        means = [snd.errors(torch.from_numpy(game[:, -1:])).mean().item() for game in games]
    return float(np.mean(means)), float(np.std(means, ddof=1) / len(means) ** 0.5), len(means)


def measure(variant: str, seed: int, iterations: int = 12, num_envs: int = 8, folder: str | None = None) -> dict:
    """Train on the replay, then judge both kinds of frames."""
    with tempfile.TemporaryDirectory() as temporary:
        args = script.Args(env_id="Pitfall", seed=seed, num_envs=num_envs, num_steps=64, minibatch_size=64, quiet=True)
        args.eval_episodes, args.warmup_steps, args.device, args.run_dir = 0, 32, "cpu", folder or temporary
        batch_size = args.num_envs * args.num_steps
        args.run_name, args.total_timesteps = f"{variant}-{seed}", iterations * batch_size
        for name, value in VARIANTS[variant].items():
            setattr(args, name, value)
        seen, unseen = record(args, 32, 160, False, seed), record(args, 32, 400, True, seed)
        script.train(args, Replay(seen[: len(seen) // 2], num_envs))
        run = Path(args.run_dir, args.run_name)
        snd = script.SND(96, args)
        snd.load_state_dict(torch.load(run / "checkpoint.pt", weights_only=True)["snd"])
        with open(run / "metrics.csv", newline="") as file:
            raw = [float(row["int/reward_raw"]) for row in csv.DictReader(file)]
    (home, home_error, known), (away, away_error, fresh) = by_game(snd, seen[len(seen) // 2 :]), by_game(snd, unseen)
    torch.manual_seed(seed)
    fresh_snd = script.SND(96, args)
    fresh_snd.frames.load_state_dict(snd.frames.state_dict())
    untrained = by_game(fresh_snd, unseen)[0] / by_game(fresh_snd, seen[len(seen) // 2 :])[0]
    apart = (away - home) / (home_error**2 + away_error**2) ** 0.5
    result = dict(target=variant, seed=seed, seen=home, seen_error=home_error, seen_games=known, unseen=away)
    result |= dict(unseen_error=away_error, unseen_games=fresh, ratio=away / home, errors_apart=apart)
    result |= dict(untrained_ratio=untrained)
    return result | dict(decay=raw[0] / raw[-1], steps=iterations * 4 * batch_size // args.minibatch_size)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--targets", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(argv)
    found = dict(command=" ".join(["python", "benchmark/novelty.py", *(sys.argv[1:] if argv is None else argv)]))
    found |= dict(git=subprocess.getoutput(f"git -C '{ROOT}' describe --always --dirty --abbrev=40"), rows=[])
    for seed in range(1, options.seeds + 1):
        for variant in options.targets:
            found["rows"].append(row := measure(variant, seed))
            print(json.dumps(row), flush=True)
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
