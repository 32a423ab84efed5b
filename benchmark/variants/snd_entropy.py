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
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ppo_atari_snd as script

learn_two, gae_of_one, loss_of_two = script.learn, script.gae, script.ppo_loss
ends = []  # of the rollout: terminated and done, (T, N)


@dataclass(config=script.CONFIG)
class Args(script.Args):
    episodic_steps: Annotated[int, Field(ge=2)] = 128
    """the episode's last observations whose spread is the second bonus"""
    eta_episodic: NonNegativeFloat = 0.5  # second bonus = this x the mean std of the features
    gamma_episodic: script.Share = 0.99  # its discount
    episodic_coef: NonNegativeFloat = 1  # weight of its advantages; 0 = off


class Agent(script.Agent):
    """With a third value, of the second bonus. `train` knows two; the rollout's third are kept."""

    def __init__(self, obs_shape: tuple[int, int, int], num_actions: int, args: Args):
        super().__init__(obs_shape, num_actions, args)
        self.value = script.layer(nn.Linear(512, 3), 0.01)
        self.third = []  # of the observations of the rollout and the one after it, (N,) each

    def forward(self, obs):
        logits, values = super().forward(obs)
        if torch.is_grad_enabled():
            return logits, values
        if self.training:
            self.keep(values[:, 2])
        return logits, values[:, :2]

    @torch.compiler.disable
    def keep(self, value):
        self.third.append(value.clone())  # the next CUDA graph overwrites it


class Networks(nn.Module):
    """The target and the encoder, which learn together."""

    def __init__(self, target: nn.Module, encoder: nn.Module):
        super().__init__()
        self.target = target
        self.encoder = encoder

    def forward(self, x):
        return self.target(x)


class SND(script.SND):
    def __init__(self, frame_shape: tuple[int, int, int], args: Args):
        super().__init__(frame_shape, args)
        self.eta_episodic = args.eta_episodic
        encoder = script.conv_layers(frame_shape[0], script.SND_CONVS, nn.ELU)
        width = encoder(torch.zeros(1, *frame_shape)).shape[1]
        encoder.append(script.layer(nn.Linear(width, 256)))
        self.target = Networks(self.target, encoder)
        self.to(memory_format=torch.channels_last)
        # The last features of each environment's episode, (steps, N, 256), in any order
        recent = torch.zeros(args.episodic_steps, args.num_envs, 256)
        self.register_buffer("recent", recent, persistent=False)
        self.register_buffer("begins", torch.ones(args.num_envs, dtype=torch.bool), False)
        self.position = 0  # of the oldest features

    def encode(self, x):
        """Frames (B, C, H, W), divided by 255 but not standardized -> features (B, 256)."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            return self.target.encoder(x).float()

    def target_loss(self, pairs: dict):
        """Both losses: of SND's target, and of the encoder by the same pairs."""
        a = self.encode(script.augment(pairs["first"].float() / 255, self.tiles))
        b = self.encode(script.augment(pairs["second"].float() / 255, self.tiles))
        losses, _ = super().target_loss(pairs)
        losses = losses + script.contrastive(a, b, pairs["far"])
        return losses, {"loss/target": losses}

    @torch.no_grad()
    def spread(self, frames, valid, micro_batch: int):
        """The std of features within an episode, of frames (T * N, C, H, W) -> (T, N)."""
        features = [self.encode(piece.float() / 255) for piece in frames.split(micro_batch)]
        features = torch.cat(features).view(*valid.shape, 256)
        spreads = []
        for row, is_valid in zip(features, valid, strict=True):
            self.recent[self.position] = row
            self.position = (self.position + 1) % len(self.recent)
            # As if the episode's first observation had been seen all the time before
            self.recent = torch.where(self.begins[:, None], row, self.recent)
            spreads.append(self.recent.std(0).mean(1))
            self.begins = is_valid == 0  # the row after the last observation
        return torch.stack(spreads)


def gae(reward, value, terminated, done, gamma: float, lam: float):
    """As in the script; keep the ends of episodes for `learn`."""
    ends[:] = terminated, done
    return gae_of_one(reward, value, terminated, done, gamma, lam)


def ppo_loss(agent, rows: dict, ent_coef: float, args: Args) -> tuple:
    """As in the script, with the third value's loss."""
    logits, values = agent(rows["obs"])
    two = rows | {"target": rows["target"][:, :2]}
    loss, terms = loss_of_two(lambda obs: (logits, values[:, :2]), two, ent_coef, args)
    error = 0.5 * (args.episodic_coef > 0) * (values[:, 2] - rows["target"][:, 2]) ** 2
    return loss + args.vf_coef * error, terms | {"loss/value": terms["loss/value"] + error}


def learn(agent, snd, optimizer, batch: dict, ent_coef: float, args: Args) -> dict:
    """As in the script, with the second bonus's advantages and values."""
    frames, device = batch["obs"][:, -args.frame_channels :], batch["obs"].device
    valid = batch["valid"].view(-1, args.num_envs)
    spread = snd.spread(frames, valid, args.micro_batch or script.ROWS_ON_CPU)
    bonus = (args.eta_episodic * spread).clamp(max=snd.int_clip).cpu()
    values = torch.stack(agent.third).cpu()
    agent.third.clear()
    advantages = gae_of_one(bonus, values, *ends, args.gamma_episodic, args.gae_lambda)
    targets = (advantages + values[:-1]).flatten().to(device)
    batch = batch | {"target": torch.cat([batch["target"], targets[:, None]], 1)}
    batch["advantage"] = batch["advantage"] + args.episodic_coef * advantages.flatten().to(device)
    means = learn_two(agent, snd, optimizer, batch, ent_coef, args)
    return means | {"int/episodic_raw": spread.mean().item()}


script.SCRIPT = "snd_entropy"
script.__doc__ = __doc__
script.Args = Args
script.Agent = Agent
script.SND = SND
script.gae = gae
script.ppo_loss = ppo_loss
script.learn = learn

if __name__ == "__main__":
    sys.exit(script.main())
