"""Play a stored run of one of the five scripts or of a variant: returns, greedy play, a film.

    python benchmark/evaluate.py runs/NAME --episodes 1000
    python benchmark/evaluate.py runs/NAME --checkpoint best.pt --greedy --split test --video film.mp4

The run's config.json names the script, which is looked for in the root of the repository and in benchmark/variants
(elsewhere: --script FILE). Environments and seeds are those of the script's own evaluation, so the same number of
episodes gives the same returns on the same kind of device. The run's folder is only read. Flags that are newer than the
run have their defaults. A run of the first edition is played too, if its network has not changed. A warning tells when
the script has changed.

The film shows the first episode of the first environment, of the first split; it needs imageio and av
(requirements-dev.txt). A run on environments of your own is played from Python: the script's `evaluate(agent, args,
make_envs)`.
"""

import argparse
import importlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = ROOT / "benchmark" / "variants"
sys.path[:0] = [str(ROOT), str(VARIANTS)]


class UsageError(ValueError):
    """A mistake the user can fix: `main` prints it in one line and returns 2."""


class Film(gym.vector.VectorWrapper):
    """Keeps the newest frame (H, W, channels) of every step of the first environment's first episode."""

    def __init__(self, envs, channels: int, unpack=None):
        super().__init__(envs)
        self.channels = channels
        self.unpack = unpack  # of a variant that packs its frames
        self.frames = []
        self.over = False

    def show(self, obs):
        if self.unpack:
            obs = self.unpack(torch.from_numpy(obs)).numpy()
        self.frames.append(obs[0, -self.channels :].transpose(1, 2, 0))

    def reset(self, **options):
        obs, info = super().reset(**options)
        self.show(obs)
        return obs, info

    def step(self, actions):
        obs, reward, terminated, truncated, info = super().step(actions)
        if not self.over:
            self.show(obs)
        if "episode" in info and info["_episode"][0]:  # a whole game, not a life
            self.over = True
        return obs, reward, terminated, truncated, info

    def write(self, path: Path):
        import imageio.v3 as imageio

        frames = np.stack(self.frames).repeat(3 // self.channels, 3).repeat(4, 1).repeat(4, 2)
        imageio.imwrite(path, frames, plugin="pyav", fps=15, codec="libx264")


def check_options(options):
    """Raise UsageError before anything is played."""
    if options.episodes < 1:
        raise UsageError(f"--episodes {options.episodes}: must be at least 1")
    for path in filter(None, (options.video, options.out)):
        folder = path.resolve().parent
        if not os.access(folder, os.W_OK) or path.is_dir():
            raise UsageError(f"{path}: must be a file in an existing folder")
        if folder == options.run.resolve():
            raise UsageError(f"{path}: must not be in the run's own folder")
    if options.video and options.video.suffix != ".mp4":
        raise UsageError(f"--video {options.video}: must end in .mp4")
    if options.video:
        try:
            importlib.import_module("imageio.v3")
            importlib.import_module("av")
        except ImportError as error:
            raise UsageError(f"--video: needs imageio and av (requirements-dev.txt), {error}") from None


def parts_of(config) -> list[dict]:
    """The parts of a config.json, one per start or resume; the first edition wrote a single one."""
    return config if isinstance(config, list) else [config]


def read_run(run: Path, checkpoint: str) -> tuple[dict, dict]:
    """The last part of config.json, and the checkpoint."""
    try:
        part = parts_of(json.loads((run / "config.json").read_text()))[-1]
        part["script"], part["args"]
        saved = torch.load(run / checkpoint, map_location="cpu", weights_only=True)
        saved["step"], saved["agent"]
    except Exception as error:  # a damaged or foreign file can raise nearly anything
        raise UsageError(f"{run}: no readable config.json and {checkpoint}, {error!r}") from None
    return part, saved


def load(name: str, file: Path | None):
    """The module of a script, and the module that it changes if it is a variant (else the same)."""
    if file:
        sys.path.insert(0, str(file.resolve().parent))
        name = file.stem
    elif not any((folder / f"{name}.py").exists() for folder in (ROOT, VARIANTS)):
        raise UsageError(f"made by {name}.py, which is not here: --script FILE")
    module = importlib.import_module(name)
    return module, getattr(module, "script", module)


def args_of(script, flags: dict):
    """The flags of a run -> the script's Args."""
    flags = dict(flags)
    if "torch_threads" in flags:  # the first edition
        flags["threads"] = flags.pop("torch_threads")
        del flags["env_threads"]
    unknown = flags.keys() - vars(script.Args()).keys()
    if unknown:
        raise UsageError(f"config.json has flags that {script.SCRIPT}.py does not know: {', '.join(sorted(unknown))}")
    args, _ = script.prepare(script.Args(**flags | {"device": "auto", "resume": ""}), None)
    return args


def is_changed(revision: str | None, files: list[str]) -> bool:
    """Whether files may differ from those of a revision; False without a revision or without git."""
    known = (revision or "").removesuffix("-dirty")
    if not re.fullmatch(r"\w[\w.-]*", known):
        return False
    try:
        git = ["git", "-C", ROOT, "diff", "--quiet", known, "--", *files]
        return revision != known or subprocess.run(git, capture_output=True).returncode != 0
    except OSError:
        return False


def evaluate(module, script, args, weights: dict, options) -> tuple[dict, Film | None]:
    """Play and print every split -> {split: {mean, stderr, returns, lengths}}, and the film of the first one."""
    is_procgen = hasattr(args, "num_levels")
    splits = ["game"]
    if is_procgen:
        splits = ["train", "test"] if args.num_levels else ["test"]
    if options.split not in (None, *splits):
        raise UsageError(f"--split {options.split}: this run has {', '.join(splits)}")
    device = script.set_up(args)
    make_envs = getattr(module, "make_envs", script.make_envs)
    per_env = math.ceil(options.episodes / 64)  # as in the script's own evaluation
    results, film = {}, None
    for split in [options.split] if options.split else splits:
        envs = make_envs(args, math.ceil(options.episodes / per_env), split)
        if options.video and not film:
            unpack = getattr(module, "unpack", None)
            envs = film = Film(envs, 3 if is_procgen or unpack else 1, unpack)
        agent = script.Agent(envs.single_observation_space.shape, envs.single_action_space.n, args).to(device)
        try:
            agent.load_state_dict(weights)
        except RuntimeError as error:
            raise UsageError(f"the checkpoint does not fit the flags of config.json: {error}") from None
        seed = script.stream_seed(args.seed, f"{split} actions")
        returns, lengths = script.play(agent, envs, per_env, seed, options.greedy)
        envs.close()
        mean = float(np.mean(returns))
        stderr = float(np.std(returns) / max(len(returns) - 1, 1) ** 0.5)
        results[split] = {"mean": mean, "stderr": stderr, "returns": returns, "lengths": lengths}
        print(f"{split}: return {mean:.2f} ± {stderr:.2f} (standard error, {len(returns)} episodes)", flush=True)
    return results, film


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--checkpoint", default="checkpoint.pt", help="or best.pt")
    parser.add_argument("--episodes", type=int, default=100, help="episodes per split, the same number per environment")
    parser.add_argument("--greedy", action="store_true", help="always take the most probable action")
    parser.add_argument("--split", help="only train or test (Procgen); default: every split of the run")
    parser.add_argument("--video", type=Path, help="film of the first episode to write, such as film.mp4")
    parser.add_argument("--out", type=Path, help="JSON file to write: {step, splits}, like the run's eval.json")
    parser.add_argument("--script", type=Path, help="the script, if it is in no usual place")
    options = parser.parse_args(argv)
    try:
        check_options(options)
        part, saved = read_run(options.run, options.checkpoint)
        module, script = load(part["script"], options.script)
        args = args_of(script, part["args"])
        print(f"{options.run}: {script.SCRIPT}.py, {args.env_id}, step {saved['step']:,}", flush=True)
        if is_changed(part.get("git"), sorted({module.__file__, script.__file__})):
            print(
                f"warning: {script.SCRIPT}.py may have changed since the run's revision, {part['git']}", file=sys.stderr
            )
        results, film = evaluate(module, script, args, saved["agent"], options)
    except ValueError as error:
        if type(error).__name__ != "UsageError":  # the script has its own class of that name
            raise
        print("evaluate.py:", " ".join(f"{options.run}: {error}".split())[:300], file=sys.stderr)
        return 2
    if options.out:
        options.out.write_text(json.dumps({"step": saved["step"], "splits": results}, indent=1) + "\n")
    if film:
        film.write(options.video)
    return 0


if __name__ == "__main__":
    sys.exit(main())
