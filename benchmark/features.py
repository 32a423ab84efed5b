"""What a target network sees: its features of the frames that a run's policy meets, in 2-D, coloured by room.

    python benchmark/features.py runs/NAME --png features.png

For runs of ppo_atari_rnd.py and ppo_atari_snd.py. The policy plays --steps steps in --envs games; the target's features
of the newest frames are projected on their two principal components, whose share of the variance is printed. The
colour is the room from the console's RAM (Montezuma's Revenge, Pitfall), elsewhere the step. Needs matplotlib.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import evaluate  # noqa: E402


def load(run: Path):
    """Script, args, policy and motivation of a run's checkpoint."""
    script, args, saved = evaluate.load(run, "checkpoint.pt")
    if script.__name__ not in ("ppo_atari_rnd", "ppo_atari_snd"):
        raise ValueError(f"{run}: a run of {script.__name__}.py, which has no target network")
    envs = script.make_envs(args, 1, "features")
    obs_shape = envs.single_observation_space.shape
    agent = script.Agent(obs_shape, envs.single_action_space.n, args)
    agent.load_state_dict(saved["agent"])
    if script.__name__ == "ppo_atari_snd":
        novelty = script.SND(args.frame_size, args)
        novelty.load_state_dict(saved["snd"])
    else:
        novelty = script.RND((1, *obs_shape[1:]), args.rnd_features)
        novelty.load_state_dict(saved["rnd"])
    return script, args, agent, novelty


@torch.no_grad()
def collect(script, args, agent, novelty, num_envs: int, steps: int):
    """Features (steps x envs, D) of the frames that the policy meets, and the room, or step, of each."""
    envs = script.make_envs(args, num_envs, "features")
    features, labels = [], []
    memory = torch.zeros(num_envs, getattr(agent, "memory_size", 0))
    done = np.zeros(num_envs, bool)
    obs, _ = envs.reset()
    for step in range(steps):
        frames = torch.from_numpy(obs)
        if hasattr(agent, "memory_size"):
            logits, _, memory = agent(frames, memory, torch.from_numpy(~done))
        else:
            logits, _ = agent(frames)
        obs, _, terminated, truncated, info = envs.step(script.sample(logits).numpy())
        done = terminated | truncated
        newest = torch.from_numpy(obs[:, -1:].copy())
        features.append(novelty.target(novelty.preprocess(newest)))
        if envs.room_byte is None:
            labels.append(np.full(num_envs, step))
        else:
            labels.append(info["ram"][:, envs.room_byte].astype(int))
    return torch.cat(features), np.concatenate(labels)


def project(features):
    """The two principal components (B, 2), and the share of the variance that they hold."""
    centred = features - features.mean(0)
    _, sizes, directions = torch.linalg.svd(centred, full_matrices=False)
    share = sizes[:2].square().sum() / sizes.square().sum().clamp(min=1e-12)
    return (centred @ directions[:2].T).numpy(), share.item()


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--png", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=500, help="steps a game")
    parser.add_argument("--envs", type=int, default=8, help="games side by side")
    parser.add_argument("--seed", type=int, default=1, help="of the actions")
    options = parser.parse_args(argv)
    try:
        script, args, agent, novelty = load(options.run)
    except (OSError, ValueError, RuntimeError) as error:
        print("features.py:", " ".join(str(error).split())[:300], file=sys.stderr)
        return 2
    torch.manual_seed(options.seed)
    features, labels = collect(script, args, agent, novelty, options.envs, options.steps)
    points, share = project(features)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 6), layout="constrained")
    rooms = np.unique(labels) if args.env_id.removesuffix("-v5") in script.ROOM_BYTE else []
    for room in rooms:
        part = points[labels == room]
        axes.scatter(*part.T, s=4, label=f"room {room}")
    if len(rooms):
        axes.legend(markerscale=3)
    else:
        figure.colorbar(axes.scatter(*points.T, s=4, c=labels), label="step")
    axes.set(title=f"{options.run.name}: {share:.0%} of the variance")
    figure.savefig(options.png, format="png", dpi=120)
    print(f"{len(features)} frames, {len(rooms) or 'unknown'} rooms, {share:.1%} of the variance in two dimensions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
