"""appo_atari.py with V-trace in the place of GAE, as the model card of its settings has it.

    python benchmark/variants/appo_vtrace.py --env-id Breakout

V-trace: Espeholt et al. 2018, arXiv:1802.01561. Each minibatch computes its targets and advantages
with the current policy and critic. The advantages contain rho = min(1, ratio), and the surrogate
multiplies by the ratio a second time, as in Sample Factory. The statistics that normalize returns
are updated once per dataset, after the first epoch.

Departures from Sample Factory: it refuses V-trace with normalized returns, and it leaves out the
observation after the last row, so that the last reward of a rollout is lost. Not measured.
--gae-lambda only matters to train/explained_variance, which is that of GAE's targets.
"""

import math
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import appo_atari as script


def vtrace(reward, value, terminated, done, rho, gamma: float):
    """V-trace (4.1, 4.2, rho-bar = c-bar = 1, lambda = 1) -> vs, rho * advantage: (T, N).

    reward, terminated, done: (T, N), of the step taken in row t. value: (T + 1, N), of row t's
    observation, by the current critic. rho: (T, N), pi(a_t|x_t) / mu(a_t|x_t), of the current
    policy and the acting one. There is no value after a termination, and any end cuts the sum.
    """
    discount = gamma * (1 - terminated)
    rho = rho.clamp(max=1)
    c = rho * (1 - done)
    delta = rho * (reward + discount * value[1:] - value[:-1])
    correction = torch.zeros_like(value)  # vs - V; stays 0 in the last row, whose target is V
    for t in reversed(range(len(reward))):
        correction[t] = delta[t] + discount[t] * c[t] * correction[t + 1]
    vs = value + correction
    next_vs = torch.where(done > 0, value[1:], vs[1:])  # at a time limit vs is the next episode's
    rho_advantage = rho * (reward + discount * next_vs - value[:-1])
    return vs[:-1], rho_advantage


@torch.no_grad()
def targets_of(agent, minibatch: dict, args: script.Args):
    """Targets and advantages (T, n) in units of return, by the current policy and critic."""
    obs = minibatch["obs"].flatten(0, 1)
    default = script.ROWS_ON_CPU if obs.device.type == "cpu" else len(obs)
    outputs = [agent(rows) for rows in obs.split(args.micro_batch or default)]
    logits, value = (torch.cat(column) for column in zip(*outputs, strict=True))
    shape = minibatch["obs"].shape[:2]
    value = value.clamp(-5, 5) * agent.returns.std + agent.returns.mean
    logp = logits.unflatten(0, shape)[:-1].log_softmax(-1)
    logp = logp.gather(-1, minibatch["action"][..., None]).squeeze(-1)
    rho = (logp - minibatch["logp"]).exp().clamp(0.05, 20)  # Sample Factory's safety limits
    columns = (minibatch[name] for name in ("terminated", "done"))
    return vtrace(minibatch["reward"], value.view(shape), *columns, rho, args.gamma)


def learn(agent, optimizer, actors, batch: dict, ent_coef: float, args: script.Args) -> dict:
    """As the script's, with new targets and advantages in each minibatch."""
    width = args.minibatch_size // args.num_steps  # trajectories per minibatch
    updates = []  # the means of each SGD step

    def loss(rows):
        return script.ppo_loss(agent, rows, ent_coef, args)

    for epoch in range(args.update_epochs):
        targets = []
        for start in range(0, width * args.num_minibatches, width):  # in a fixed order
            trajectories = slice(start, start + width)
            minibatch = {name: x[:, trajectories] for name, x in batch.items()}
            target, minibatch["advantage"] = targets_of(agent, minibatch, args)
            targets.append(target)
            target = (target - agent.returns.mean) / agent.returns.std
            minibatch["target"] = target.clamp(-5, 5)
            minibatch["obs"] = minibatch["obs"][:-1]
            minibatch = {name: x.flatten(0, 1) for name, x in minibatch.items()}
            valid = minibatch["valid"]
            minibatch["advantage"] = script.standardize(minibatch["advantage"], valid)
            means = script.gradient(agent, loss, minibatch, args.micro_batch, valid)
            limit = args.max_grad_norm or math.inf  # inf: only measures the norm
            means["train/grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), limit)
            optimizer.step()
            agent.version += 1
            actors.publish(agent)
            updates.append(means)
        if epoch == 0:
            agent.returns.update(torch.cat(targets, 1)[batch["valid"].bool()])
    return script.mean_of(updates)


script.SCRIPT = "appo_vtrace"
script.__doc__ = __doc__
script.learn = learn

if __name__ == "__main__":
    sys.exit(script.main())
