"""Play a stored run of one of the five scripts or of a variant: returns, greedy play, a film.

    python benchmark/evaluate.py runs/NAME --episodes 1000
    python benchmark/evaluate.py runs/NAME --checkpoint best.pt --greedy --split test --video film.mp4

The run's command names the script, which is looked for in the root of the repository and in benchmark/variants
(elsewhere: --script FILE). Environments and seeds are those of the script's own evaluation, so the same number of
episodes gives the same returns on the same kind of device. The run's folder is only read. Flags that are newer than the
run have their defaults. A warning tells when the script differs from the run's copy of it.

The film shows the first episode of the first environment, of the first split. A run on environments of your own is
played from Python: the script's `evaluate(agent, args, make_envs)`.
"""

import argparse
import importlib.util
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
GONE = ("quiet", "resume")  # flags of the run in results/trained


class UsageError(ValueError):
    """A mistake the user can fix: `main` prints it in one line and returns 2."""


class Film(gym.vector.VectorWrapper):
    """Keeps the newest frame (H, W, channels) of every step of the first environment's first episode."""

    def __init__(self, envs, channels: int):
        super().__init__(envs)
        self.channels = channels
        self.frames = []
        self.over = False

    def show(self, obs):
        self.frames.append(obs[0, -self.channels :].transpose(1, 2, 0))

    def reset(self, **options):
        obs, info = super().reset(**options)
        self.show(obs)
        return obs, info

    def step(self, actions):
        obs, reward, terminated, truncated, info = super().step(actions)
        if not self.over:
            self.show(obs)
        if "episode" in info and info["_episode"][0]:  # a whole episode, not a life
            self.over = True
        return obs, reward, terminated, truncated, info

    def write(self, path: Path):
        import imageio.v3 as imageio

        frames = np.stack(self.frames).repeat(3 // self.channels, 3).repeat(4, 1).repeat(4, 2)
        imageio.imwrite(path, frames, plugin="pyav", fps=15, codec="libx264")


def check(options):
    """Raise UsageError before anything is played."""
    if options.episodes < 1:
        raise UsageError(f"--episodes {options.episodes}: must be at least 1")
    for path in filter(None, (options.video, options.out)):
        if not path.resolve().parent.is_dir() or path.is_dir():
            raise UsageError(f"{path}: must be a file in an existing folder")
    has_packages = importlib.util.find_spec("imageio") and importlib.util.find_spec("av")
    if options.video and not (options.video.suffix == ".mp4" and has_packages):
        raise UsageError(f"--video {options.video}: must end in .mp4; needs imageio and av (requirements-dev.txt)")


def read_run(run: Path, checkpoint: str) -> tuple[list[str], dict, dict]:
    """Names that the script may have, flags of the last start, checkpoint."""
    try:
        if (run / "config.json").exists():  # the run in results/trained
            config = json.loads((run / "config.json").read_text())[-1]
            names = [config["script"]]
        else:
            newest = max(run.glob("config-*.json"), key=lambda path: int(path.stem.removeprefix("config-")))
            config = json.loads(newest.read_text())
            # A run that was started from Python has only a copy of the script.
            names = [Path(config["command"][0]).stem, *(path.stem for path in run.glob("*.py"))]
        flags = {name: value for name, value in config["args"].items() if name not in GONE}
        saved = torch.load(run / checkpoint, map_location="cpu", weights_only=True)
        saved["step"], saved["agent"]
    except Exception as error:  # a damaged or foreign file can raise nearly anything
        raise UsageError(f"{run}: no readable config-<step>.json and {checkpoint}, {error!r}") from None
    return names, flags, saved


def load(names: list[str], file: Path | None):
    """The module of a script, and the module that it changes if it is a variant (else the same)."""
    known = [name for name in names if any((folder / f"{name}.py").exists() for folder in (ROOT, VARIANTS))]
    if file:
        sys.path.insert(0, str(file.resolve().parent))
        known = [file.stem]
    if not known:
        raise UsageError(f"made by {names[-1]}.py, which is not here: --script FILE")
    module = importlib.import_module(known[0])
    return module, getattr(module, "script", module)


def take_best(agent, inputs, output):
    """All probability on the most probable action: a forward hook of an agent."""
    logits, *rest = output
    best = logits.argmax(-1, keepdim=True)
    return torch.full_like(logits, -torch.inf).scatter(-1, best, 0), *rest


def evaluate(module, script, args, weights: dict, options) -> tuple[dict, Film | None]:
    """Play and print every split -> {split: {mean, stderr, returns, lengths}}, and the film of the first one."""
    is_procgen = hasattr(args, "num_levels")
    splits = ["game"]
    if is_procgen:
        splits = ["train", "test"] if args.num_levels else ["test"]
    if options.split not in (None, *splits):
        raise UsageError(f"--split {options.split}: this run has {', '.join(splits)}")
    args, _, device = script.set_up(args, None)
    make_envs = getattr(module, "make_envs", script.make_envs)
    per_env = math.ceil(options.episodes / 64)  # as in the script's own evaluation
    results, film = {}, None
    for split in [options.split] if options.split else splits:
        seed = script.stream_seed(args.seed, split)
        envs = make_envs(args, math.ceil(options.episodes / per_env), seed, test=split != "train")
        if options.video and not film:
            envs = film = Film(envs, 3 if is_procgen else getattr(args, "frame_channels", 1))
        agent = script.Agent(envs.single_observation_space.shape, envs.single_action_space.n, args).to(device)
        try:
            agent.load_state_dict(weights)
        except RuntimeError as error:
            raise UsageError(f"the checkpoint does not fit the run's flags: {error}") from None
        if options.greedy:
            agent.register_forward_hook(take_best)
        episodes = script.play(agent, envs, per_env, script.stream_seed(args.seed, f"{split} actions"))
        envs.close()
        results[split] = script.summary(split, episodes)
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
        check(options)
        names, flags, saved = read_run(options.run, options.checkpoint)
        module, script = load(names, options.script)
        args = script.Args(**flags | {"device": "auto"})
        print(f"{options.run}: {script.SCRIPT}.py, {args.env_id}, step {saved['step']:,}", flush=True)
        copy = options.run / Path(script.__file__).name
        if copy.exists() and copy.read_bytes() != Path(script.__file__).read_bytes():
            print(f"warning: {script.__file__} is not the code that trained this run", file=sys.stderr)
        results, film = evaluate(module, script, args, saved["agent"], options)
    except ValueError as error:
        if type(error).__name__ not in ("UsageError", "ValidationError"):  # the script has its own UsageError
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
