"""Two probes of exploration.

    python benchmark/explore.py cells --steps 400000 --json cells.json -- --num-envs 16 --minibatch-size 512
    python benchmark/explore.py novelty --seeds 3 --json novelty.json
    python benchmark/explore.py novelty --target std --sgd-steps 384 1536 6144 --json std.json  # variants/snd_paper.py

What follows `--` goes to the script.

cells: how far ppo_atari_rnd.py gets in Montezuma's Revenge, as the number of distinct cells (room, x / 8, y / 8) that
the player has been in; compare with `--int-coef 0`. Rows of the file: environment steps of the rollouts, cells, rooms.
The player's position is bytes 42 and 43 of the console's RAM, the room is byte 3. Cells that random play visits in the
warm-up count as well, with and without a bonus.

novelty: does SND's bonus grow on frames that its predictor has not seen? The frames are of Pitfall. Random play on the
first screen, cut when the player leaves it, is replayed to ppo_atari_snd.py as an environment, so that its own loop
trains target and predictor. Then the bonus is measured on episodes of that screen that were not replayed, and on the
screens to its left and right. There is one mean per episode, so standard errors are over episodes.
Standardized frames of another screen give a larger bonus even with untrained networks, so the same ratio is measured
with untrained networks under the same statistics; the difference is due to learning.
Rows of the file, one per seed and number of SGD steps: both means with their standard errors, their ratio, their
distance in standard errors, the ratio of untrained networks, by what factor the bonus on the replayed frames has
fallen since the first iteration, squared mean and variance of the target's features on both kinds of frames, and the
target's loss.
"""

import argparse
import csv
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import ppo_atari_rnd  # noqa: E402
import ppo_atari_snd  # noqa: E402


def revision() -> str:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


# --- cells ---


class Cells(gym.vector.VectorWrapper):
    """Records the cells that the player was in, in any of the environments."""

    def __init__(self, envs):
        super().__init__(envs)
        self.cells = set()

    def step(self, actions):
        result = self.env.step(actions)
        ram = result[4]["ram"]
        self.cells |= set(zip(ram[:, 3].tolist(), (ram[:, 42] // 8).tolist(), (ram[:, 43] // 8).tolist(), strict=True))
        return result


def cells(options, flags: list[str], command: str):
    """Train; write the file after each iteration."""
    script = ppo_atari_rnd
    log = script.Run.log
    made, rows = [], []
    found = {"command": command, "git": revision(), "rows": rows}

    def make_cells(args, num_envs, seed, test=False):
        made.append(Cells(script.make_envs(args, num_envs, seed, test)))
        return made[-1]

    def record_row(run, metrics):
        reached = made[0].cells
        rows.append((metrics["step"], len(reached), len({cell[0] for cell in reached})))
        options.json.write_text(json.dumps(found) + "\n")
        log(run, metrics)

    script.Run.log = record_row
    with tempfile.TemporaryDirectory() as folder:
        fixed = ["--run-dir", folder, "--eval-episodes", "0", "--seed", str(options.seed), "--checkpoint-every", "1e9"]
        args = tyro.cli(script.Args, args=[*fixed, "--total-timesteps", str(options.steps), *flags])
        script.train(args, make_cells)
    print(f"{rows[-1][1]} cells in {rows[-1][2]} rooms after {rows[-1][0]:,} steps, including the warm-up")


# --- novelty ---

ROOM = 1  # byte of the RAM with the number of the screen
LEFT, RIGHT, JUMP_LEFT, JUMP_RIGHT = 4, 3, 12, 11


class Replay(gym.vector.VectorEnv):
    """Replays recorded episodes, whatever the actions; next-step autoreset."""

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
    """Record episodes: random play on the first screen or, with `walk`, what follows after walking off it."""
    env_seed = ppo_atari_snd.stream_seed(args.seed, "walking" if walk else "training")
    envs, rng = ppo_atari_snd.make_envs(args, num_envs, env_seed), np.random.default_rng(seed)
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
    """Mean over episodes of their mean error (the bonus without scale and clip), its standard error, their number."""
    with torch.no_grad():
        means = [snd.errors(torch.from_numpy(game[:, -1:])).mean().item() for game in games]
    return float(np.mean(means)), float(np.std(means, ddof=1) / len(means) ** 0.5), len(means)


def feature_moments(snd, games) -> tuple[float, float]:
    """Of the target's features, mean over features: the squared mean over frames, and the variance over frames.

    The variance is the error of the best constant prediction.
    """
    with torch.no_grad():
        features = torch.cat([snd.target(snd.preprocess(torch.from_numpy(game[:, -1:]))) for game in games])
    return features.mean(0).square().mean().item(), features.var(0).mean().item()


def measure(seed: int, target: str = "", sgd_steps=(384,), folder: str | None = None, flags=()):
    """Train on the replay, and yield a row with the bonus on both kinds of frames after each number of SGD steps."""
    script = ppo_atari_snd
    with tempfile.TemporaryDirectory() as temporary:
        args = script.Args(env_id="Pitfall", seed=seed, num_envs=8, num_steps=64, minibatch_size=64)
        args.eval_episodes, args.warmup_steps, args.device = 0, 32, "cpu"
        args.run_dir = folder or temporary
        if target:
            args.target, args.predictor_share, args.update_epochs = target, 0.25 if target == "v" else 1, 1
        args.run_name = f"snd-{seed}"
        args = tyro.cli(type(args), args=flags, default=args)
        batch_size = args.num_envs * args.num_steps
        sgd_steps_per_iteration = batch_size // args.minibatch_size
        if not target:  # snd_paper.py makes one pass, whatever --update-epochs
            sgd_steps_per_iteration *= args.update_epochs
        run = Path(args.run_dir, args.run_name)
        saved = script.load(run) if (run / "checkpoint.pt").exists() else None
        seen, unseen = record(args, 32, 160, False, seed), record(args, 32, 400, True, seed)
        for steps in sorted(set(sgd_steps)):
            args.total_timesteps = math.ceil(steps / sgd_steps_per_iteration) * batch_size
            script.train(args, lambda args, num_envs, *_: Replay(seen[: len(seen) // 2], num_envs), saved)
            saved = script.load(run)
            row = compare(args, run, seen, unseen)
            done = row.pop("step") // batch_size * sgd_steps_per_iteration
            yield dict(target=target or "snd", seed=seed, steps=done) | row


def compare(args, run: Path, seen, unseen) -> dict:
    """The bonus on both kinds of frames, with the networks of the run and with untrained ones."""
    script, seed = ppo_atari_snd, args.seed
    snd = script.SND((1, 96, 96), args)
    snd.load_state_dict(torch.load(run / "checkpoint.pt", weights_only=True)["snd"])
    with open(run / "metrics.csv", newline="") as file:
        metrics = list(csv.DictReader(file))
    raw = [float(row["int/reward_raw"]) for row in metrics]
    (home, home_error, known), (away, away_error, fresh) = by_game(snd, seen[len(seen) // 2 :]), by_game(snd, unseen)
    torch.manual_seed(seed)
    untrained = script.SND((1, 96, 96), args)
    untrained.frames.load_state_dict(snd.frames.state_dict())
    untrained_ratio = by_game(untrained, unseen)[0] / by_game(untrained, seen[len(seen) // 2 :])[0]
    apart = (away - home) / (home_error**2 + away_error**2) ** 0.5
    result = dict(seen=home, seen_error=home_error, seen_games=known, unseen=away)
    result |= dict(unseen_error=away_error, unseen_games=fresh, ratio=away / home, errors_apart=apart)
    result |= dict(untrained_ratio=untrained_ratio, decay=raw[0] / raw[-1])
    for name, games in (("seen", seen[len(seen) // 2 :]), ("unseen", unseen)):
        result[f"{name}_squared_mean"], result[f"{name}_variance"] = feature_moments(snd, games)
    return result | dict(target_loss=float(metrics[-1]["loss/target"]), step=int(metrics[-1]["step"]))


def no_loss(snd, pairs: dict) -> tuple:
    """In place of SND.target_loss."""
    loss = 0 * sum(weights.sum() for weights in snd.parameters())
    return loss, {"loss/target": loss}


def novelty(options, flags: list[str], command: str):
    if options.target:
        sys.path.insert(0, str(ROOT / "benchmark" / "variants"))
        import snd_paper  # noqa: F401 (it changes ppo_atari_snd)
    if options.freeze_target:
        ppo_atari_snd.SND.target_loss = no_loss
    found = dict(command=command, git=revision(), rows=[])
    for seed in range(1, options.seeds + 1):
        for row in measure(seed, options.target, options.sgd_steps, options.run_dir, flags):
            found["rows"].append(row)
            print(json.dumps(row), flush=True)
            options.json.write_text(json.dumps(found, indent=1) + "\n")


def main(argv=None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    end = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    probes = parser.add_subparsers(dest="probe", required=True)
    probe = probes.add_parser("cells")
    probe.add_argument("--steps", type=int, default=400_000, help="environment steps")
    probe.add_argument("--seed", type=int, default=1)
    probe.add_argument("--json", type=Path, required=True, help="result, rewritten after each iteration")
    probe = probes.add_parser("novelty")
    probe.add_argument("--seeds", type=int, default=3)
    probe.add_argument("--target", choices=["", "v", "std", "vic"], default="", help="of snd_paper.py")
    probe.add_argument("--sgd-steps", type=int, nargs="+", default=[384], metavar="N")
    probe.add_argument("--run-dir", help="keep the runs here; another command with more SGD steps continues them")
    probe.add_argument(
        "--freeze-target", action="store_true", help="train the predictor only (Adam's momentum fades out)"
    )
    probe.add_argument("--json", type=Path, required=True, help="result, rewritten after each row")
    options = parser.parse_args(argv[:end])
    if options.json.is_dir():
        parser.error(f"--json {options.json}: is a folder")
    options.json.parent.mkdir(parents=True, exist_ok=True)  # now, not after the warm-up
    command = " ".join(["python", "benchmark/explore.py", *argv])
    run = cells if options.probe == "cells" else novelty
    try:
        run(options, argv[end + 1 :], command)
    except ValueError as error:
        if type(error).__name__ != "UsageError":  # each script has its own class of that name
            raise
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
