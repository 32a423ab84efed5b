"""Play a stored run of any of the five scripts, or of a variant: returns of its splits, greedy play, a film.

    python benchmark/evaluate.py runs/NAME --episodes 1000
    python benchmark/evaluate.py runs/NAME --checkpoint best.pt --greedy --split test --video film.mp4

Script and args come from the run's config.json, games from the script's own `make_envs` and `play`: with as many
episodes as in the run's own evaluation it plays the same games with the same random numbers. The run's folder is only
read. A run of an older version is played with the defaults of the flags that it did not have yet. The film shows the
first game of the first environment, of the first split that is played; it needs imageio and av (requirements-dev.txt).
"""

import argparse
import importlib
import json
import math
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = ROOT / "benchmark" / "variants"
sys.path[:0] = [str(ROOT), str(VARIANTS)]


class Film(gym.vector.VectorWrapper):
    """Keeps the newest frame, (H, W, channels), of each step of the first environment's first game."""

    def __init__(self, envs, channels: int):
        super().__init__(envs)
        self.channels = channels
        self.frames = []
        self.over = False

    def reset(self, **options):
        obs, info = super().reset(**options)
        self.frames.append(obs[0, -self.channels :].transpose(1, 2, 0))
        return obs, info

    def step(self, actions):
        obs, reward, terminated, truncated, info = super().step(actions)
        if not self.over:
            self.frames.append(obs[0, -self.channels :].transpose(1, 2, 0))
        if "episode" in info and info["_episode"][0]:  # a whole game, not a life
            self.over = True
        return obs, reward, terminated, truncated, info


def load(run: Path, checkpoint: str):
    """The script's module, the run's args as its Args, and what the checkpoint holds."""
    try:
        config = json.loads((run / "config.json").read_text())
        name, flags = config["script"], config["args"]
        saved = torch.load(run / checkpoint, map_location="cpu", weights_only=True)
        saved["step"], saved["agent"]
    except Exception as error:  # a damaged or foreign file raises nearly anything
        raise ValueError(f"{run}: no readable config.json and {checkpoint}, {error!r}") from None
    if not (ROOT / f"{name}.py").exists() and not (VARIANTS / f"{name}.py").exists():
        raise ValueError(f"{run}: made by {name}.py, which is not here")
    script = importlib.import_module(name)
    script = getattr(script, "script", script)  # what a variant has imported and replaced parts of
    unknown = flags.keys() - vars(script.Args()).keys()
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ValueError(f"{run}: made by another version of {name}.py, with flags that are gone: {names}")
    if flags["env_id"] not in getattr(script, "GAMES", [flags["env_id"]]):  # procgen would abort
        raise ValueError(f"{run}: of {flags['env_id']}, an environment of its own; {name}.play can play it")
    flags = {key: tuple(value) if isinstance(value, list) else value for key, value in flags.items()}
    return script, script.Args(**flags | {"device": "auto", "resume": ""}), saved


def evaluate(script, args, weights: dict, options) -> dict:
    """{split: {mean, stderr, returns, lengths}}, each printed; the first one filmed."""
    splits = ["game"]
    if hasattr(args, "num_levels"):
        splits = ["train", "test"] if args.num_levels else ["test"]
    if options.split not in (None, *splits):
        raise ValueError(f"--split {options.split}: this run has {', '.join(splits)}")
    device = script.set_up(args)
    games = math.ceil(options.episodes / 64)  # an environment, as in the script's own evaluation
    results = {}
    for split in [options.split] if options.split else splits:
        envs = script.make_envs(args, math.ceil(options.episodes / games), split)
        if options.video and not results:
            envs = film = Film(envs, 3 if hasattr(args, "num_levels") else 1)
        agent = script.Agent(envs.single_observation_space.shape, envs.single_action_space.n, args).to(device)
        agent.load_state_dict(weights)
        seed = script.stream_seed(args.seed, f"{split} actions")
        returns, lengths = script.play(agent, envs, games, seed, options.greedy)
        envs.close()
        mean = float(np.mean(returns))
        stderr = float(np.std(returns) / max(len(returns) - 1, 1) ** 0.5)
        results[split] = {"mean": mean, "stderr": stderr, "returns": returns, "lengths": lengths}
        print(f"{split}: return {mean:.2f} +- {stderr:.2f} (standard error, {len(returns)} games)", flush=True)
    if options.video:
        import imageio.v3 as imageio

        frames = np.stack(film.frames).repeat(3 // film.channels, 3).repeat(4, 1).repeat(4, 2)
        imageio.imwrite(options.video, frames, plugin="pyav", fps=15, codec="libx264")
    return results


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--checkpoint", default="checkpoint.pt", help="or best.pt")
    parser.add_argument("--episodes", type=int, default=100, help="games a split, the same number an environment")
    parser.add_argument("--greedy", action="store_true", help="the most probable action, not a drawn one")
    parser.add_argument("--split", help="train or test (Procgen), game (Atari); all of them if not given")
    parser.add_argument("--video", type=Path, help="film of the first game, such as film.mp4")
    parser.add_argument("--out", type=Path, help="JSON file to write: {step, splits}, like the run's eval.json")
    options = parser.parse_args(argv)
    try:
        if options.episodes < 1:
            raise ValueError(f"--episodes {options.episodes}: must be at least 1")
        for path in (options.video, options.out):  # rather now than after the games
            if path and (not path.absolute().parent.is_dir() or path.resolve().parent == options.run.resolve()):
                raise ValueError(f"{path}: its folder must exist, and must not be the run's own")
        script, args, saved = load(options.run, options.checkpoint)
        print(f"{options.run}: {script.SCRIPT}.py, {args.env_id}, step {saved['step']:,}", flush=True)
        results = evaluate(script, args, saved["agent"], options)
        if options.out:
            options.out.write_text(json.dumps({"step": saved["step"], "splits": results}, indent=1) + "\n")
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        print("evaluate.py:", " ".join(str(error).split())[:300], file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
