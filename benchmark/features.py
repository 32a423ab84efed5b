"""What a target network sees: its features of the frames that a run's policy meets, in 2-D, coloured by room.

    python benchmark/features.py runs/NAME --png features.png

For runs of ppo_atari_rnd.py and ppo_atari_snd.py. The policy plays --steps steps in --envs games; the target's features
of the newest frames are projected on their two principal components, whose share of the variance is printed. The
colour is the room from the console's RAM (Montezuma's Revenge, Pitfall), elsewhere the step. Needs matplotlib.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def load(run: Path):
    """Script, args, policy and motivation of a run's checkpoint."""
    name = json.loads((run / "config.json").read_text())["script"]
    if name not in ("ppo_atari_rnd", "ppo_atari_snd"):
        raise SystemExit(f"{run}: a run of {name}.py, which has no target network")
    script = importlib.import_module(name)
    saved = script.load_checkpoint(script.Args(evaluate=str(run)))
    args = script.Args(**saved["args"])
    envs = script.make_envs(args, "features", 1)
    shape, actions, size = envs.single_observation_space.shape, envs.single_action_space.n, args.frame_size
    if name == "ppo_atari_snd":
        agent, novelty = script.Agent(shape, actions, 2 + args.entropy_bonus), script.SND(size, args)
    else:
        kind, choice = (script.Agent, args.memory == "gru") if args.net == "openai" else (script.Variant, args.net)
        agent = kind(shape, actions, choice, args.critic_init)
        novelty = script.RND(size, args.num_envs, args.rnd_features, args.obs_norm, args.rnd_net)
    agent.load_state_dict(saved["agent"])
    novelty.load_state_dict(saved[name[-3:]])
    return script, args, agent, novelty


@torch.no_grad()
def collect(script, args, agent, novelty, num_envs: int, steps: int):
    """Features (steps x envs, D) of the frames that the policy meets, and the room, or step, of each."""
    envs, features, labels = script.make_envs(args, "features", num_envs), [], []
    (obs, _), memory, fresh = envs.reset(), torch.zeros(num_envs, getattr(agent, "memory", 0)), torch.ones(num_envs)
    over, byte = np.zeros(num_envs, bool), envs.room_byte
    for step in range(steps):
        frames = torch.from_numpy(obs)
        logits, _, *rest = agent(frames, memory, fresh) if memory.shape[1] else agent(frames)
        memory = rest[0] if memory.shape[1] else memory
        is_valid = ~over
        obs, _, ended, cut, info = envs.step(script.sample(logits).numpy())
        over, fresh = ended | cut, torch.from_numpy(~is_valid).float()
        features.append(novelty.target(novelty.preprocess(torch.from_numpy(obs[:, -1:].copy()))))
        labels.append(info["ram"][:, byte].astype(int) if byte is not None else np.full(num_envs, step))
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
    except (OSError, ValueError) as error:
        print(f"{options.run}: {str(error).splitlines()[0]}", file=sys.stderr)
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
    rank = f"effective rank {script.effective_rank(features):.1f}, " if hasattr(script, "effective_rank") else ""
    print(
        f"{len(features)} frames, {len(rooms) or 'unknown'} rooms, {rank}{share:.1%} of the variance in two dimensions"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
