"""SND with a second bonus for variety within an episode: michalnand's SND + entropy.

    python benchmark/variants/snd_entropy.py --env-id MontezumaRevenge

Source: AgentPPOSNDEntropy.py of github.com/michalnand/reinforcement_learning_agents at 0554aea, the
last of its three forms. (The first paid the distance to earlier features of the episode, the second
the spread of the target's features.)

An encoder maps each frame to 256 features and learns as SND's target does, from the same pairs.
The second bonus of o_t is the standard deviation of each feature over the episode's last
--episodic-steps observations, averaged over features, scaled and clipped. In a younger episode,
copies of its first observation stand in for the missing ones. The bonus has its own value head,
discount and weight.

Guesses, never published: --episodic-steps, --eta-episodic, --gamma-episodic, --episodic-coef and
the encoder's layers, which are the target's. Departures: those of ppo_atari_snd.py, whose
augmentation and penalty of large features are newer than this source; the encoder sees the newest
frame (source: four); a run's first episodes begin as all others (source: with zeros). Not measured.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ppo_atari_snd as script


@dataclass
class Args(script.Args):
    episodic_steps: int = 128  # the episode's last observations whose spread is the second bonus
    eta_episodic: float = 0.5  # second bonus = this x the mean standard deviation of the features
    gamma_episodic: float = 0.99  # its discount
    episodic_coef: float = 1  # weight of its advantages; 0 = off


class Agent(script.Agent):
    def __init__(self, obs_shape: tuple[int, int, int], num_actions: int, args: Args):
        super().__init__(obs_shape, num_actions, args)
        self.value = script.layer(nn.Linear(512, 3), 0.01)
        self.gammas = [args.gamma, args.gamma_int, args.gamma_episodic]
        self.coefs = torch.tensor([args.ext_coef, args.int_coef, args.episodic_coef])


class SND(script.SND):
    def __init__(self, frame_shape: tuple[int, int, int], args: Args):
        super().__init__(frame_shape, args)
        self.eta_episodic = args.eta_episodic
        self.encoder = script.conv_layers(frame_shape[0], script.SND_CONVS, nn.ELU)
        width = self.encoder(torch.zeros(1, *frame_shape)).shape[1]
        self.encoder.append(script.layer(nn.Linear(width, 256)))
        self.to(memory_format=torch.channels_last)
        # The last features of each environment's episode, (steps, N, 256), in any order
        recent = torch.zeros(args.episodic_steps, args.num_envs, 256)
        self.register_buffer("recent", recent, persistent=False)
        self.register_buffer("begins", torch.ones(args.num_envs, dtype=torch.bool), False)
        self.position = 0  # of the oldest features

    def encode(self, x):
        """Frames (B, 1, H, W), divided by 255 but not standardized -> features (B, 256)."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            return self.encoder(x).float()

    def target_loss(self, frames, others, far):
        """Both losses: of SND's target, and of the encoder by the same pairs."""
        a = self.encode(script.augment(frames.float() / 255))
        b = self.encode(script.augment(others.float() / 255))
        return super().target_loss(frames, others, far) + script.contrastive(a, b, far)

    @torch.no_grad()
    def bonus(self, rollout: dict, micro_batch: int):
        """As SND, with the second bonus in a last column: (T, N), (T, N, 2)."""
        errors, bonus = super().bonus(rollout, micro_batch)
        frames = rollout["obs"][:-1, :, -1:]
        pieces = frames.flatten(0, 1).split(micro_batch)
        features = torch.cat([self.encode(piece.float() / 255) for piece in pieces])
        spreads = []
        for row, valid in zip(features.view(*errors.shape, 256), rollout["valid"], strict=True):
            self.recent[self.position] = row
            self.position = (self.position + 1) % len(self.recent)
            # As if the episode's first observation had been seen all the time before
            self.recent = torch.where(self.begins[:, None], row, self.recent)
            spreads.append(self.recent.std(0).mean(1))
            self.begins = valid == 0  # the row after the last observation
        spread = torch.stack(spreads)
        latest["int/episodic_raw"] = spread.mean().item()
        second = (self.eta_episodic * spread).clamp(max=self.int_clip)
        return errors, torch.cat([bonus, second[..., None]], -1)


latest = {}  # metrics of the last rollout


class Run(script.Run):
    def log(self, metrics: dict):
        super().log(metrics | latest)


check_others = script.check


def check(args: Args):
    check_others(args)
    if args.episodic_steps < 2:
        raise script.UsageError(f"--episodic-steps {args.episodic_steps}: must be at least 2")


script.SCRIPT = "snd_entropy"
script.__doc__ = __doc__
script.AT_MOST_1 += ["gamma_episodic"]
script.Args = Args
script.Agent = Agent
script.SND = SND
script.Run = Run
script.check = check

if __name__ == "__main__":
    sys.exit(script.main())
