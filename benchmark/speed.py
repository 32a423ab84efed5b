"""Steps per second of a script, where the time goes, and the ratio to a baseline, measured side by side.

    python benchmark/speed.py ppo_procgen
    python benchmark/speed.py ppo_procgen --against eager -- --num-envs 64 --num-steps 256 --minibatch-size 2048
    python benchmark/speed.py --against HEAD~1 --script ppo_procgen appo_atari     # this tree beside another revision

What follows `--` goes to the script. Every measurement is a process of its own; with --against, script and baseline
alternate A B A B, and the ratio of each pair is printed: on a machine whose speed drifts the ratio means something, a
single figure does not. Run it with nothing else running. CPU seconds are those of all threads.

Beside a baseline `--warmup` iterations are discarded, then `--iterations` of the same work are measured. The baseline
"eager" does the same update the common way: float32 observations in the rollout, contiguous layout, a padded max-pool,
a whole minibatch in one forward and backward, no compilation. "sync" is an asynchronous script without overlap, "ppo"
ppo_procgen with the same network, else at its own defaults, "fp32" the script without the --precision bf16 or --compile
of the flags. Peers run with a python of their own, --peer-python (benchmark/peers.sh makes them): "sample-factory"
(2.1.1) and "sb3" (Stable-Baselines3 2.9.2, its own Atari wrappers, the same sizes), both for appo_atari.

Beside another revision, which is checked out into a temporary git worktree, whole processes are timed, from the start
of Python to its end, nothing subtracted (but steps/s of metrics.csv without the first iteration are printed too), each
script with the flags in PROCESSES and those after `--`, which both versions must know.
"""

import argparse
import csv
import importlib.util
import inspect
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def load(script: str):
    spec = importlib.util.spec_from_file_location(script, ROOT / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[script] = module
    spec.loader.exec_module(module)
    return module


class Enough(BaseException):
    """Ends a training once enough of it is measured."""


class Stopwatch:
    """Wall and CPU seconds of every iteration, and seconds a phase."""

    batch_size = 0  # agent steps of an iteration

    def __init__(self):
        self.mark, self.rows = (time.perf_counter(), time.process_time()), []
        self.phases, self.lapped = {}, self.mark[0]  # of a baseline's iteration

    def lap(self, phase: str):
        """Book the time since the last lap, or since the iteration's start."""
        now = time.perf_counter()
        self.phases[phase], self.lapped = self.phases.get(phase, 0.0) + now - self.lapped, now

    def row(self, **phases):
        now = (time.perf_counter(), time.process_time())
        self.rows.append(dict(wall=now[0] - self.mark[0], cpu=now[1] - self.mark[1], **phases))
        self.mark, self.phases, self.lapped = now, {}, now[0]


def measure_script(script, args, iterations: int) -> Stopwatch:
    """Run the script's own `train`, with a stopwatch on its log line."""
    watch, log = Stopwatch(), script.Logger.log

    def timed_log(logger, metrics):
        laps = {name.removeprefix("time/").removesuffix("_s"): seconds for name, seconds in logger.laps.items()}
        row = log(logger, metrics)
        watch.row(**laps)
        watch.batch_size = row["step"] // len(watch.rows)
        if len(watch.rows) == iterations:
            raise Enough
        return row

    script.Logger.log = timed_log
    args.total_timesteps = 10**9  # so that asynchronous actors go on to the last measured iteration
    try:
        script.train(args)
    except Enough:
        return watch


def plain_device(args):
    """The device and PyTorch's threads as args say, its memory allocator as it comes."""
    import torch

    device = torch.device(("cpu", "cuda")[torch.cuda.is_available()] if args.device == "auto" else args.device)
    torch.set_num_threads(args.torch_threads or (len(os.sched_getaffinity(0)) if device.type == "cpu" else 1))
    return device


def impala_net(args, shape, num_actions):
    """The network of both Procgen scripts, in PyTorch's own layout and with a padded max-pool."""
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.conv0, self.conv1 = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1)

        def forward(self, x):
            return self.conv1(F.relu(self.conv0(F.relu(x)))) + x

    def stage(a, b):
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.MaxPool2d(3, 2, padding=1), Block(b), Block(b))

    class Net(nn.Module):
        def __init__(self, shape, num_actions):
            super().__init__()
            widths = (shape[0], *args.channels)
            self.stages = nn.Sequential(*(stage(a, b) for a, b in zip(widths, widths[1:], strict=False)))
            size = args.channels[2] * (1 if args.pool == "avg" else (shape[1] // 8) * (shape[2] // 8))
            self.hidden, self.actor, self.critic = nn.Linear(size, 256), nn.Linear(256, num_actions), nn.Linear(256, 1)

        def forward(self, x):
            x = self.stages((x - 128) / 255)
            x = F.relu(x.mean((2, 3)) if args.pool == "avg" else x.flatten(1))
            x = F.relu(self.hidden(x))
            return self.actor(x), self.critic(x).squeeze(-1)

    return Net(shape, num_actions)


def eager_ppo_procgen(script, args, iterations: int) -> Stopwatch:
    """PPO the common way: what `ppo_procgen.train` computes, without any of its care for speed."""
    import numpy as np
    import torch
    from torch import nn
    from torch.distributions import Categorical

    device = plain_device(args)
    torch.manual_seed(args.seed)
    envs = script.make_envs(args, args.num_envs, "training")
    T, N, shape = args.num_steps, args.num_envs, envs.single_observation_space.shape
    net = impala_net(args, shape, envs.single_action_space.n).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=script.schedule(0, args.lr))
    obs_rows = torch.zeros(T, N, *shape, device=device)
    actions, logps, rewards, dones = (torch.zeros(T, N, device=device) for _ in range(4))
    logits_rows, values = torch.zeros(T, N, envs.single_action_space.n, device=device), torch.zeros(T, N, device=device)
    obs = torch.Tensor(envs.reset()[0].copy()).to(device)
    watch = Stopwatch()
    watch.batch_size = T * N
    for _ in range(iterations):
        for t in range(T):
            obs_rows[t] = obs
            with torch.no_grad():
                logits_rows[t], values[t] = net(obs)
                policy = Categorical(logits=logits_rows[t])
                action = policy.sample()
            actions[t], logps[t] = action, policy.log_prob(action)
            action = action.cpu().numpy()
            watch.lap("policy")
            obs, reward, terminated, _, _ = envs.step(action)
            rewards[t], dones[t] = torch.Tensor(reward).to(device), torch.Tensor(terminated).to(device)
            obs = torch.Tensor(obs.copy()).to(device)
            watch.lap("env")
        with torch.no_grad():
            next_value, trace, advantages = net(obs)[1], 0.0, torch.zeros_like(rewards)
            for t in reversed(range(T)):
                following = next_value if t == T - 1 else values[t + 1]
                delta = rewards[t] + args.gamma * following * (1 - dones[t]) - values[t]
                advantages[t] = trace = delta + args.gamma * args.gae_lambda * (1 - dones[t]) * trace
            returns = advantages + values
        watch.lap("policy")
        rows = [x.flatten(0, 1) for x in (obs_rows, actions, logps, logits_rows, values, advantages, returns)]
        rows[5] = (rows[5] - rows[5].mean()) / (rows[5].std() + 1e-8)
        order = np.random.permutation(T * N)
        for _ in range(args.update_epochs):
            np.random.shuffle(order)
            for start in range(0, T * N - args.minibatch_size + 1, args.minibatch_size):
                index = order[start : start + args.minibatch_size]
                frames, action, logp, old_logits, old_value, advantage, target = (x[index] for x in rows)
                logits, value = net(frames)
                policy, old = Categorical(logits=logits), Categorical(logits=old_logits)
                ratio = (policy.log_prob(action) - logp).exp()
                surrogate = torch.min(ratio * advantage, ratio.clamp(1 - args.clip, 1 + args.clip) * advantage).mean()
                near = old_value + (value - old_value).clamp(-args.vf_clip, args.vf_clip)
                value_loss = torch.max((value - target) ** 2, (near - target) ** 2).mean()
                kl = torch.distributions.kl_divergence(old, policy).mean()
                loss = (
                    -surrogate + args.vf_coef * value_loss - script.schedule(0, args.ent_coef) * policy.entropy().mean()
                )
                loss = loss + args.kl_coef * kl
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), args.max_grad_norm or float("inf"))
                optimizer.step()
                loss.item()
        watch.lap("learn")
        watch.row(**watch.phases)
    envs.close()
    return watch


def eager_ppo_atari_rnd(script, args, iterations: int) -> Stopwatch:
    """PPO with RND the common way: the bonus step by step, every row through target and predictor in every epoch."""
    import numpy as np
    import torch
    from torch import nn
    from torch.distributions import Categorical

    def convolutions(channels, last, activation):
        sizes = ((channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, last, 1))
        return [part for size in sizes for part in (nn.Conv2d(*size), activation())] + [nn.Flatten()]

    class Net(nn.Module):
        def __init__(self, shape, num_actions):
            super().__init__()
            trunk = nn.Sequential(*convolutions(shape[0], 4, nn.ReLU))
            size = trunk(torch.zeros(1, *shape)).shape[1]
            self.trunk = nn.Sequential(trunk, nn.Linear(size, 256), nn.ReLU(), nn.Linear(256, 448), nn.ReLU())
            self.extra = nn.ModuleList(nn.Sequential(nn.Linear(448, 448), nn.ReLU()) for _ in range(2))
            self.actor, self.critic = nn.Linear(448, num_actions), nn.Linear(448, 2)

        def forward(self, x):
            x = self.trunk(x / 255)
            return self.actor(x + self.extra[0](x)), self.critic(x + self.extra[1](x))

    device, features = plain_device(args), args.rnd_features
    torch.manual_seed(args.seed)
    envs = script.make_envs(args, args.num_envs, "training")
    T, N, shape = args.num_steps, args.num_envs, envs.single_observation_space.shape
    net = Net(shape, envs.single_action_space.n).to(device)
    parts, size = [convolutions(1, 3, nn.LeakyReLU) for _ in range(2)], ((shape[-1] - 8) // 4 + 1 - 4) // 2 + 1 - 2
    hidden = [nn.Linear(64 * size**2, features), nn.ReLU(), nn.Linear(features, features), nn.ReLU()]
    target = nn.Sequential(*parts[0], nn.Linear(64 * size**2, features)).to(device)
    predictor = nn.Sequential(*parts[1], *hidden, nn.Linear(features, features)).to(device)
    weights = [*net.parameters(), *predictor.parameters()]
    optimizer = torch.optim.Adam(weights, lr=script.schedule(0, args.lr))
    obs_rows = torch.zeros(T, N, *shape, device=device)
    actions, logps, rewards, dones, bonuses = (torch.zeros(T, N, device=device) for _ in range(5))
    values = torch.zeros(T, N, 2, device=device)
    mean, var, count = np.zeros(shape[1:]), np.ones(shape[1:]), 1e-4
    filtered, returns_var = np.zeros(N), 1.0
    obs = torch.Tensor(envs.reset()[0]).to(device)
    share, watch = args.predictor_share or min(1, 32 / N), Stopwatch()
    watch.batch_size = T * N

    def normalised(frames):
        scale = torch.from_numpy(np.sqrt(var)).to(device)
        return ((frames[:, -1:] - torch.from_numpy(mean).to(device)) / scale).clamp(-5, 5).float()

    for _ in range(iterations):
        next_rows = torch.zeros(T, N, *shape, device=device)
        for t in range(T):
            obs_rows[t] = obs
            with torch.no_grad():
                logits, values[t] = net(obs)
                policy = Categorical(logits=logits)
                action = policy.sample()
            actions[t], logps[t] = action, policy.log_prob(action)
            action = action.cpu().numpy()
            watch.lap("policy")
            obs, reward, ended, cut, _ = envs.step(action)
            rewards[t], dones[t] = torch.Tensor(reward).to(device), torch.Tensor(ended | cut).to(device)
            next_rows[t] = obs = torch.Tensor(obs).to(device)
            watch.lap("env")
            with torch.no_grad():
                x = normalised(obs)
                bonuses[t] = (predictor(x) - target(x)).pow(2).mean(1)
            watch.lap("bonus")
        for row in bonuses.cpu().numpy():
            filtered = args.gamma_int * filtered + row
        returns_var = 0.9 * returns_var + 0.1 * filtered.var()
        bonus = bonuses / returns_var**0.5
        frames = next_rows[:, :, -1].flatten(0, 1).cpu().numpy()
        batch_mean, batch_var, total = frames.mean(0), frames.var(0), count + len(frames)
        delta = batch_mean - mean
        var = (var * count + batch_var * len(frames) + delta**2 * count * len(frames) / total) / total
        mean, count = mean + delta * len(frames) / total, total
        watch.lap("bonus")
        with torch.no_grad():
            last, trace, advantages = net(obs)[1], torch.zeros(N, 2, device=device), torch.zeros_like(values)
            gammas = torch.tensor([args.gamma, args.gamma_int], device=device)
            for t in reversed(range(T)):
                following = last if t == T - 1 else values[t + 1]
                alive = torch.stack([1 - dones[t], torch.ones(N, device=device)], -1)
                delta = torch.stack([rewards[t], bonus[t]], -1) + gammas * following * alive - values[t]
                advantages[t] = trace = delta + gammas * args.gae_lambda * alive * trace
            returns = advantages + values
            combined = advantages @ torch.tensor([args.ext_coef, args.int_coef], device=device, dtype=torch.float32)
        watch.lap("policy")
        rows = [x.flatten(0, 1) for x in (obs_rows, next_rows, actions, logps, combined, returns)]
        order = np.arange(T * N)
        for _ in range(args.update_epochs):
            np.random.shuffle(order)
            for start in range(0, T * N, args.minibatch_size):
                index = order[start : start + args.minibatch_size]
                seen, following, action, logp, advantage, goal = (x[index] for x in rows)
                x = normalised(following)
                error = (predictor(x) - target(x).detach()).pow(2).mean(1)
                mask = (torch.rand(len(error), device=device) < share).float()
                auxiliary = (error * mask).sum() / mask.sum().clamp(min=1)
                logits, value = net(seen)
                policy = Categorical(logits=logits)
                ratio = (policy.log_prob(action) - logp).exp()
                surrogate = torch.min(ratio * advantage, ratio.clamp(1 - args.clip, 1 + args.clip) * advantage).mean()
                value_loss = 0.5 * (value - goal).pow(2).sum(1).mean()
                loss = (
                    -surrogate
                    + args.vf_coef * value_loss
                    - script.schedule(0, args.ent_coef) * policy.entropy().mean()
                    + auxiliary
                )
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(weights, float("inf"))
                optimizer.step()
                loss.item()
        watch.lap("learn")
        watch.row(**watch.phases)
    envs.close()
    return watch


def eager_ppo_atari_snd(script, args, iterations: int) -> Stopwatch:
    """PPO with SND-V the common way: float32 rows, contiguous layout, bonus step by step, whole minibatches at once."""
    import numpy as np
    import torch
    from torch import nn
    from torch.distributions import Categorical

    def convolutions(channels, sizes, activation):
        sizes = zip([channels, *(size[0] for size in sizes)], sizes, strict=False)
        return [part for a, (b, *rest) in sizes for part in (nn.Conv2d(a, b, *rest), activation())] + [nn.Flatten()]

    class Net(nn.Module):
        def __init__(self, shape, num_actions):
            super().__init__()
            sizes = ((32, 3, 2, 1), (64, 3, 2, 1), (64, 3, 2, 1), (128, 3, 1, 1))
            trunk = nn.Sequential(*convolutions(shape[0], sizes, nn.ReLU))
            width = trunk(torch.zeros(1, *shape)).shape[1]
            self.trunk = nn.Sequential(trunk, nn.Linear(width, 512), nn.ReLU())
            self.hidden_actor, self.hidden_critic = nn.Linear(512, 512), nn.Linear(512, 512)
            self.actor, self.critic = nn.Linear(512, num_actions), nn.Linear(512, 2)

        def forward(self, x):
            x = self.trunk(x / 255)
            return self.actor(self.hidden_actor(x).relu()), self.critic(self.hidden_critic(x).relu())

    device, features = plain_device(args), args.snd_features
    torch.manual_seed(args.seed)
    envs = script.make_envs(args, args.num_envs, "training")
    T, N, shape = args.num_steps, args.num_envs, envs.single_observation_space.shape
    net = Net(shape, envs.single_action_space.n).to(device)
    sizes = ((16, 3, 2, 1), (32, 3, 2, 1), (64, 3, 2, 1), (64, 3, 1, 1))
    parts = [nn.Sequential(*convolutions(1, sizes, nn.ELU)) for _ in range(2)]
    width = parts[0](torch.zeros(1, 1, *shape[1:])).shape[1]
    target = nn.Sequential(parts[0], nn.Linear(width, features)).to(device)
    hidden = [nn.Linear(width, features), nn.ELU(), nn.Linear(features, features), nn.ELU()]
    predictor = nn.Sequential(parts[1], *hidden, nn.Linear(features, features)).to(device)
    weights = [*net.parameters(), *predictor.parameters(), *target.parameters()]
    optimizer = torch.optim.Adam(weights, lr=script.schedule(0, args.lr))
    obs_rows = torch.zeros(T, N, *shape, device=device)
    actions, logps, rewards, dones, bonus = (torch.zeros(T, N, device=device) for _ in range(5))
    values = torch.zeros(T, N, 2, device=device)
    mean, var, count = np.zeros(shape[1:]), np.ones(shape[1:]), 1e-4
    obs = torch.Tensor(envs.reset()[0]).to(device)
    share, pairs, watch = args.predictor_share or min(1, 32 / N), args.pairs, Stopwatch()
    watch.batch_size = T * N

    def normalised(frames):
        scale = torch.from_numpy(np.sqrt(var)).to(device)
        return ((frames[:, -1:] - torch.from_numpy(mean).to(device)) / scale).clamp(-1, 1).float()

    for _ in range(iterations):
        for t in range(T):
            obs_rows[t] = obs
            with torch.no_grad():
                logits, values[t] = net(obs)
                policy = Categorical(logits=logits)
                action = policy.sample()
            actions[t], logps[t] = action, policy.log_prob(action)
            action = action.cpu().numpy()
            watch.lap("policy")
            with torch.no_grad():
                x = normalised(obs)
                bonus[t] = (args.eta * (predictor(x) - target(x)).pow(2).mean(1)).clamp(max=1)
            watch.lap("bonus")
            obs, reward, ended, cut, _ = envs.step(action)
            rewards[t], dones[t] = torch.Tensor(reward).to(device), torch.Tensor(ended | cut).to(device)
            obs = torch.Tensor(obs).to(device)
            watch.lap("env")
        frames = obs_rows[:, :, -1].flatten(0, 1).cpu().numpy()
        batch_mean, batch_var, total = frames.mean(0), frames.var(0), count + len(frames)
        delta = batch_mean - mean
        var = (var * count + batch_var * len(frames) + delta**2 * count * len(frames) / total) / total
        mean, count = mean + delta * len(frames) / total, total
        watch.lap("bonus")
        with torch.no_grad():
            following, trace, advantages = net(obs)[1], torch.zeros(N, 2, device=device), torch.zeros_like(values)
            gammas = torch.tensor([args.gamma, args.gamma_int], device=device)
            for t in reversed(range(T)):
                alive = (1 - dones[t])[:, None]
                delta = torch.stack([rewards[t], bonus[t]], -1) + gammas * following * alive - values[t]
                advantages[t] = trace = delta + gammas * args.gae_lambda * alive * trace
                following = values[t]
            returns = advantages + values
            combined = advantages @ torch.tensor([args.ext_coef, args.int_coef], device=device, dtype=torch.float32)
        watch.lap("policy")
        rows = [x.flatten(0, 1) for x in (obs_rows, actions, logps, combined, returns)]
        for _ in range(args.update_epochs):
            for _ in range(T * N // args.minibatch_size):
                index = np.random.randint(T * N, size=args.minibatch_size)
                seen, action, logp, advantage, goal = (x[index] for x in rows)
                logits, value = net(seen)
                policy = Categorical(logits=logits)
                ratio = (policy.log_prob(action) - logp).exp()
                surrogate = torch.min(ratio * advantage, ratio.clamp(1 - args.clip, 1 + args.clip) * advantage).mean()
                loss = 0.5 * args.vf_coef * (value - goal).pow(2).sum(1).mean() - surrogate
                loss = loss - script.schedule(0, args.ent_coef) * policy.entropy().mean()
                x = normalised(seen)
                error = (predictor(x) - target(x).detach()).pow(2)
                mask = (torch.rand_like(error) < share).float()
                loss = loss + (error * mask).sum() / mask.sum().clamp(min=1)
                one, other = np.random.randint(T * N, size=(2, pairs))
                far = torch.rand(pairs, device=device) < 0.5
                second = torch.where(far[:, None, None, None], rows[0][other], rows[0][one])
                a, b = (target(script.hide_tiles(normalised(frames))) for frames in (rows[0][one], second))
                loss = loss + script.contrastive(a, b, far.float())
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), args.max_grad_norm or float("inf"))
                optimizer.step()
                loss.item()
        watch.lap("learn")
        watch.row(**watch.phases)
    envs.close()
    return watch


def eager_impala_procgen(script, args, iterations: int) -> Stopwatch:
    """IMPALA the common way, one after the other: all environments act, then batches of whole fragments are learned."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.distributions import Categorical

    device = plain_device(args)
    torch.manual_seed(args.seed)
    envs = script.make_envs(args, args.num_envs, "training")
    T, N, shape = args.num_steps, args.num_envs, envs.single_observation_space.shape
    net = impala_net(args, shape, envs.single_action_space.n).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=script.schedule(0, args.lr))
    obs_rows = torch.zeros(T + 1, N, *shape, device=device)
    actions, logps, rewards, dones = (torch.zeros(T, N, device=device) for _ in range(4))
    obs = torch.Tensor(envs.reset()[0].copy()).to(device)
    watch, fragments = Stopwatch(), args.minibatch_size // T
    watch.batch_size = T * N
    for _ in range(iterations):
        for t in range(T):
            obs_rows[t] = obs
            with torch.no_grad():
                policy = Categorical(logits=net(obs)[0])
                action = policy.sample()
            actions[t], logps[t] = action, policy.log_prob(action)
            action = action.cpu().numpy()
            watch.lap("policy")
            obs, reward, terminated, _, _ = envs.step(action)
            rewards[t], dones[t] = torch.Tensor(reward).to(device), torch.Tensor(terminated).to(device)
            obs = torch.Tensor(obs.copy()).to(device)
            watch.lap("env")
        obs_rows[T] = obs
        for start in range(0, N, fragments):
            some = slice(start, start + fragments)
            action, logp, reward, alive = actions[:, some], logps[:, some], rewards[:, some], 1 - dones[:, some]
            for _ in range(args.update_epochs):
                logits, value = (x.unflatten(0, (T + 1, -1)) for x in net(obs_rows[:, some].flatten(0, 1)))
                policy = Categorical(logits=logits[:-1])
                new_logp = policy.log_prob(action)
                with torch.no_grad():
                    rho = (new_logp - logp).exp().clamp(max=1)
                    vs, trace = value.clone(), torch.zeros_like(value[0])
                    for t in reversed(range(T)):
                        delta = rho[t] * (reward[t] + args.gamma * alive[t] * value[t + 1] - value[t])
                        trace = delta + args.gamma * alive[t] * rho[t] * trace
                        vs[t] += trace
                    advantage = rho * (reward + args.gamma * alive * vs[1:] - value[:-1])
                loss = 0.5 * args.vf_coef * F.mse_loss(value[:-1], vs[:-1]) - (new_logp * advantage).mean()
                loss = loss - script.schedule(0, args.ent_coef) * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), args.max_grad_norm or float("inf"))
                optimizer.step()
                loss.item()
        watch.lap("learn")
        watch.row(**watch.phases)
    envs.close()
    return watch


def eager_appo_atari(script, args, iterations: int) -> Stopwatch:
    """PPO on EnvPool Atari the common way: act, then learn; frames in [0, 1], nothing else normalised."""
    import numpy as np
    import torch
    from torch import nn
    from torch.distributions import Categorical

    class Net(nn.Module):
        def __init__(self, shape, num_actions):
            super().__init__()
            sizes = ((shape[0], 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1))
            trunk = nn.Sequential(*(part for size in sizes for part in (nn.Conv2d(*size), nn.ReLU())), nn.Flatten())
            size = trunk(torch.zeros(1, *shape)).shape[1]
            self.trunk = nn.Sequential(trunk, nn.Linear(size, 512), nn.ReLU())
            self.actor, self.critic = nn.Linear(512, num_actions), nn.Linear(512, 1)

        def forward(self, x):
            x = self.trunk(x / 255)
            return self.actor(x), self.critic(x).squeeze(-1)

    device = plain_device(args)
    torch.manual_seed(args.seed)
    envs = script.make_envs(args, args.num_envs, "training")
    T, N, shape = args.num_steps, args.num_envs, envs.single_observation_space.shape
    net = Net(shape, envs.single_action_space.n).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=script.schedule(0, args.lr), eps=args.adam_eps)
    obs_rows = torch.zeros(T, N, *shape, device=device)
    actions, logps, rewards, dones, values = (torch.zeros(T, N, device=device) for _ in range(5))
    obs, watch = torch.Tensor(envs.reset()[0]).to(device), Stopwatch()
    watch.batch_size = T * N
    for _ in range(iterations):
        for t in range(T):
            obs_rows[t] = obs
            with torch.no_grad():
                logits, values[t] = net(obs)
                policy = Categorical(logits=logits)
                action = policy.sample()
            actions[t], logps[t] = action, policy.log_prob(action)
            action = action.cpu().numpy()
            watch.lap("policy")
            obs, reward, ended, cut, _ = envs.step(action)
            rewards[t], dones[t] = torch.Tensor(reward).to(device), torch.Tensor(ended | cut).to(device)
            obs = torch.Tensor(obs).to(device)
            watch.lap("env")
        with torch.no_grad():
            following, trace, advantages = net(obs)[1], 0.0, torch.zeros_like(rewards)
            for t in reversed(range(T)):
                delta = rewards[t] + args.gamma * following * (1 - dones[t]) - values[t]
                advantages[t] = trace = delta + args.gamma * args.gae_lambda * (1 - dones[t]) * trace
                following = values[t]
            returns = advantages + values
        watch.lap("policy")
        rows = [x.flatten(0, 1) for x in (obs_rows, actions, logps, values, advantages, returns)]
        order = np.arange(T * N)
        for _ in range(args.update_epochs):
            np.random.shuffle(order)
            for start in range(0, T * N, args.minibatch_size):
                index = order[start : start + args.minibatch_size]
                frames, action, logp, old_value, advantage, target = (x[index] for x in rows)
                logits, value = net(frames)
                policy = Categorical(logits=logits)
                ratio = (policy.log_prob(action) - logp).exp()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                surrogate = torch.min(ratio * advantage, ratio.clamp(1 - args.clip, 1 + args.clip) * advantage).mean()
                near = old_value + (value - old_value).clamp(-args.clip, args.clip)
                value_loss = torch.max((value - target) ** 2, (near - target) ** 2).mean()
                loss = (
                    -surrogate + args.vf_coef * value_loss - script.schedule(0, args.ent_coef) * policy.entropy().mean()
                )
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), args.max_grad_norm or float("inf"))
                optimizer.step()
                loss.item()
        watch.lap("learn")
        watch.row(**watch.phases)
    envs.close()
    return watch


def ppo(script, args, iterations: int) -> Stopwatch:
    """ppo_procgen.py at its own defaults, on the same game with the same network."""
    other = load("ppo_procgen")
    theirs = other.Args(env_id=args.env_id, channels=args.channels, pool=args.pool, stack=args.stack)
    theirs.run_dir, theirs.quiet, theirs.eval_episodes, theirs.device = args.run_dir, True, 0, args.device
    theirs.torch_threads, theirs.env_threads = args.torch_threads, args.env_threads
    return measure_script(other, theirs, iterations)


def sync(script, args, iterations: int) -> Stopwatch:
    """The script itself without overlap."""
    args.sync = True
    return measure_script(script, args, iterations)


def fp32(script, args, iterations: int) -> Stopwatch:
    """The script itself in plain float32, beside its --precision bf16 or --compile."""
    args.precision, args.compile = "fp32", False
    return measure_script(script, args, iterations)


def sample_factory(name: str, args, seconds: float, python: str) -> dict:
    """Sample Factory's own command with the same sizes, from its own log: the first report and what was before it are
    discarded, and so is what came after the last dataset."""
    game = args.env_id.removesuffix("-v5").lower()
    flags = dict(algo="APPO", env=f"atari_{game}", device="cpu", serial_mode=False, async_rl=True, num_workers=2)
    flags |= dict(num_envs_per_worker=args.num_envs // 2, worker_num_splits=2, rollout=args.num_steps, recurrence=1)
    flags |= dict(batch_size=args.minibatch_size, num_batches_per_epoch=args.num_minibatches)
    flags |= dict(num_batches_to_accumulate=args.num_batches_to_accumulate, num_epochs=args.update_epochs)
    flags |= dict(max_grad_norm=args.max_grad_norm, train_for_env_steps=10**9)
    flags |= dict(train_dir=args.run_dir, experiment="x", restart_behavior="overwrite")
    start = Path(args.run_dir, "start.py")  # a file, which its spawned processes can import
    text = "import ale_py, sys\nfrom sf_examples.atari.train_atari import main\n"
    start.write_text(f"{text}if __name__ == '__main__':\n    sys.exit(main())\n")
    command = [python, str(start), *(f"--{key}={value}" for key, value in flags.items())]
    piped = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    process, until = subprocess.Popen(command, **piped), time.perf_counter() + seconds
    reports, lines = [], []  # (time, agent steps)
    for line in process.stdout:
        lines.append(line)
        if time.perf_counter() > until:
            os.killpg(process.pid, signal.SIGKILL)
        if found := re.search(r"Total num frames: (\d+)", line):
            reports.append((time.perf_counter(), int(found[1]) / args.frame_skip))
    changes = [now for before, now in zip(reports, reports[1:], strict=False) if now[1] > before[1]]
    process.wait()
    if len(changes) < 3:
        raise RuntimeError("".join(lines[-30:]))
    (begin, first), (end, last) = changes[0], changes[-1]
    # Its processes are children of its own, whose CPU time and memory are not told to this one.
    unknown, sps = float("nan"), (last - first) / (end - begin)
    return dict(variant=name, sps=sps, peak_gib=unknown, env_only_sps=unknown, seconds_a_step=dict(cpu=unknown))


SB3 = """
import json, resource, sys, time
import ale_py, gymnasium
gymnasium.register_envs(ale_py)
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecFrameStack

o = json.loads(sys.argv[1])
marks = []

class Clock(BaseCallback):
    def _on_rollout_start(self):
        used = resource.getrusage(resource.RUSAGE_SELF)
        marks.append((time.perf_counter(), used.ru_utime + used.ru_stime))

    def _on_step(self):
        return True

envs = VecFrameStack(make_atari_env(f"{o['game']}NoFrameskip-v4", n_envs=o["num_envs"], seed=1), 4)
options = dict(n_steps=o["num_steps"], batch_size=o["minibatch_size"], n_epochs=o["update_epochs"], device=o["device"])
model = PPO("CnnPolicy", envs, **options, learning_rate=2.5e-4, clip_range=0.1, ent_coef=0.01, normalize_advantage=True)
batch = o["num_steps"] * o["num_envs"]
model.learn(batch * (o["warmup"] + o["iterations"] + 1), callback=Clock())
(begin, cpu), (end, last) = marks[o["warmup"]], marks[o["warmup"] + o["iterations"]]
steps, peak = batch * o["iterations"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps(dict(sps=steps / (end - begin), cpu=(last - cpu) / steps, peak=peak)))
"""


def sb3(name: str, args, options) -> dict:
    """Stable-Baselines3's PPO with the same sizes; its environments are emulated one after the other."""
    names = ("num_envs", "num_steps", "minibatch_size", "update_epochs")
    sizes = {name: getattr(args, name) for name in names} | dict(warmup=options.warmup, iterations=options.iterations)
    sizes |= dict(game=args.env_id.removesuffix("-v5"), device="cpu" if args.device == "cpu" else "auto")
    command = [options.peer_python, "-c", SB3, json.dumps(sizes)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    unknown = float("nan")
    return dict(variant=name, sps=found["sps"], peak_gib=found["peak"], env_only_sps=unknown) | dict(
        seconds_a_step=dict(cpu=found["cpu"])
    )


BASELINES = {
    "ppo_procgen": {"eager": eager_ppo_procgen, "fp32": fp32},
    "ppo_atari_rnd": {"eager": eager_ppo_atari_rnd, "fp32": fp32},
    "ppo_atari_snd": {"eager": eager_ppo_atari_snd, "fp32": fp32},
    "impala_procgen": {"eager": eager_impala_procgen, "ppo": ppo, "sync": sync, "fp32": fp32},
    "appo_atari": {"eager": eager_appo_atari, "sync": sync, "sample-factory": sample_factory, "sb3": sb3, "fp32": fp32},
}


# Flags that change how fast the same work is done, not how much of it, or that `child` sets itself.
NEUTRAL = set(
    """seed device torch_threads env_threads micro_batch precision compile sync num_groups total_timesteps
run_dir run_name quiet eval_episodes eval_every checkpoint_every warmup_steps num_minibatches
num_batches_to_accumulate""".split()
)


def unknown(script, args, baseline) -> list[str]:
    """Flags off their defaults that an eager baseline does not follow: it would do other work than the script."""
    known = "".join(map(inspect.getsource, (baseline, impala_net, script.make_envs)))
    changed = [name for name, value in vars(args).items() if value != getattr(script.Args(), name)]
    return [name for name in changed if name not in NEUTRAL and not re.search(rf"\bargs\.{name}\b", known)]


def env_rate(script, args, steps: int = 200) -> float:
    """Steps per second of the environments alone under random actions: the ceiling of any script."""
    import numpy as np

    envs, rng = script.make_envs(args, args.num_envs, "training"), np.random.default_rng(0)
    envs.reset()
    actions = rng.integers(envs.single_action_space.n, size=(steps + 20, args.num_envs))
    for action in actions[:20]:
        envs.step(action)
    start = time.perf_counter()
    for action in actions[20:]:
        envs.step(action)
    rate = steps * args.num_envs / (time.perf_counter() - start)
    envs.close()
    return rate


def child(name: str, options, flags: list[str]) -> dict:
    import tyro

    script = load(name)
    with tempfile.TemporaryDirectory() as folder:
        fixed = ["--run-dir", folder, "--quiet", "--eval-episodes", "0"]
        args = tyro.cli(script.Args, args=fixed + flags)
        variant, warmup = options.child, options.warmup
        if variant == "sample-factory":
            return sample_factory(variant, args, options.seconds, options.peer_python)
        if variant == "sb3":
            return sb3(variant, args, options)
        if options.against == "eager" and (others := unknown(script, args, BASELINES[name]["eager"])):
            flags = ", ".join(f"--{other.replace('_', '-')}" for other in others)
            raise script.UsageError(f"--against eager: the baseline does not follow {flags}")
        rate = env_rate(script, args)
        measure = measure_script if variant == "script" else BASELINES[name][variant]
        watch = measure(script, args, warmup + options.iterations)
    rows = watch.rows[warmup:]
    steps = watch.batch_size * len(rows)
    result = {key: sum(row[key] for row in rows) / steps for key in rows[0]}  # seconds a step
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return dict(variant=variant, sps=1 / result.pop("wall"), peak_gib=peak, env_only_sps=rate, seconds_a_step=result)


PROCESSES = {  # whole processes beside those of another revision: some iterations, about a minute on one core
    "ppo_procgen": "--env-id starpilot --channels 16 32 32 --num-envs 64 --num-steps 32 --minibatch-size 1024 "
    "--total-timesteps 8192",
    "impala_procgen": "--env-id starpilot --channels 16 32 32 --num-steps 50 --minibatch-size 400 "
    "--total-timesteps 6400",
    "ppo_atari_rnd": "--env-id MontezumaRevenge --num-envs 16 --num-steps 128 --minibatch-size 512 "
    "--predictor-share 0.25 --warmup-steps 50 --total-timesteps 8192",
    "ppo_atari_snd": "--env-id MontezumaRevenge --num-envs 16 --num-steps 64 --minibatch-size 256 "
    "--predictor-share 0.25 --warmup-steps 20 --total-timesteps 3072",
    "appo_atari": "--env-id Pong --num-envs 16 --minibatch-size 256 --num-minibatches 8 --total-timesteps 10240",
}


def process(source: Path, name: str, flags: list[str]) -> dict:
    """A whole run of a script of `source`: seconds of the process, steps/s of its metrics.csv after iteration 1."""
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "output"), "w+") as output:
        fixed = ["--run-dir", folder, "--run-name", "run", "--quiet", "--eval-episodes", "0"]
        command = [sys.executable, str(source / f"{name}.py"), *flags, *fixed]
        start = time.perf_counter()
        running = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            _, status, used = os.wait4(running.pid, 0)
            running.returncode = os.waitstatus_to_exitcode(status)
        finally:
            if running.returncode is None:
                running.kill()
        wall = time.perf_counter() - start
        if running.returncode:
            output.seek(0)
            lines = [line for line in output.read().splitlines() if line.strip(" │╭╮╰╯─")]
            raise RuntimeError(f"{source}/{name}.py: exit code {running.returncode}: {lines[-1]}")
        with open(Path(folder, "run", "metrics.csv"), newline="") as file:
            rows = [(int(row["step"]), float(row["time/sps"])) for row in csv.DictReader(file)]
    before = [step for step, _ in rows[:-1]]
    later = sum((step - last) / sps for last, (step, sps) in zip(before, rows[1:], strict=True))
    rate = (rows[-1][0] - rows[0][0]) / later if later else float("nan")
    found = dict(wall=wall, cpu=used.ru_utime + used.ru_stime, peak_gib=used.ru_maxrss / 2**20)
    return found | dict(steps=rows[-1][0], sps=rows[-1][0] / wall, later_sps=rate)


RATIOS = {"wall": "wall time", "cpu": "CPU time", "later": "wall time after iteration 1"}


def revision(against: str, scripts: list[str], pairs: int, flags: list[str]) -> dict:
    """Whole processes of another revision's scripts and of this tree's in turn: {name: figures and ratios}."""
    results = {}
    git = ["git", "-C", str(ROOT), "worktree"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the worktree goes then, too
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder, "worktree")
        subprocess.run([*git, "add", "--detach", str(other), against], check=True, capture_output=True)
        try:
            for name in scripts:
                results[name] = beside_revision(name, [*PROCESSES[name].split(), *flags], other, pairs)
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], capture_output=True)
    return results


def beside_revision(name: str, flags: list[str], other: Path, pairs: int) -> dict:
    """One script: old and new in turn, printed, with the ratios old / new of each pair: above 1 the new is faster."""
    found = {"flags": " ".join(flags), "old": [], "new": []}
    print(f"{name}.py {found['flags']}: whole processes", flush=True)
    for _ in range(pairs):
        for side, source in (("old", other), ("new", ROOT)):
            one = process(source, name, flags)
            found[side].append(one)
            print(f"  {side} {one['steps']:,} steps: {one['wall']:.1f} s wall, {one['cpu']:.1f} s CPU, ", end="")
            print(f"{one['sps']:,.1f} steps/s; after iteration 1 {one['later_sps']:,.1f} steps/s", flush=True)
    for old, new in zip(found["old"], found["new"], strict=True):
        if old["steps"] != new["steps"]:
            raise RuntimeError(f"{name}.py: {old['steps']} and {new['steps']} steps are not the same work")
        found.setdefault("wall_ratios", []).append(old["wall"] / new["wall"])
        found.setdefault("cpu_ratios", []).append(old["cpu"] / new["cpu"])
        found.setdefault("later_ratios", []).append(new["later_sps"] / old["later_sps"])
    for kind, text in RATIOS.items():
        each = found[f"{kind}_ratios"]
        print(f"  old / new, {text}: {statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f})", flush=True)
    return found


def hardware() -> str:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), "unknown CPU")
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores, {gpu}, torch {torch.__version__}"


def show(result: dict):
    seconds = result["seconds_a_step"]
    phases = {key: value for key, value in seconds.items() if key != "cpu"}
    split = ", ".join(f"{key} {100 * value * result['sps']:.1f} %" for key, value in phases.items())
    print(
        f"{result['variant']:8} {result['sps']:8,.0f} steps/s   {split}   CPU {1e3 * seconds['cpu']:.2f} ms/step   "
        f"peak {result['peak_gib']:.2f} GiB   env alone {result['env_only_sps']:,.0f} steps/s",
        flush=True,
    )


def main(argv=None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    flags = argv[argv.index("--") + 1 :] if "--" in argv else []
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=sorted(BASELINES), help="of a script, without .py")
    parser.add_argument("--against", help="alternate with this baseline; without a name, with this git revision")
    parser.add_argument("--script", nargs="+", choices=sorted(BASELINES), help="beside a revision; default: all")
    parser.add_argument("--peer-python", default="python", help="the python that has sample-factory or sb3")
    parser.add_argument("--seconds", type=float, default=180, help="length of a run of Sample Factory")
    parser.add_argument("--pairs", type=int, help="measurements of each, A B A B = 2; default 2, beside a revision 4")
    parser.add_argument("--iterations", type=int, default=2, help="iterations measured in each process")
    parser.add_argument("--warmup", type=int, default=1, help="iterations discarded before them")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(argv[: argv.index("--")] if "--" in argv else argv)
    if options.pairs is None:
        options.pairs = 2 if options.name else 4
    for name in ("pairs", "iterations", "warmup"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: must be at least 1")
    if (options.name and options.script) or not (options.name or options.against):
        parser.error("either the name of a script, or --against REVISION with --script NAME ...")
    if options.child:
        try:
            print(json.dumps(child(options.name, options, flags)))
        except ValueError as error:
            if type(error).__name__ != "UsageError":  # of the script's own copy of that class
                raise
            parser.error(str(error))
        return 0
    if options.name and options.against and options.against not in BASELINES[options.name]:
        parser.error(f"--against {options.against}: {options.name} has {', '.join(BASELINES[options.name])}")
    if not options.name:
        known = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{options.against}^{{commit}}"]
        if subprocess.run(known, capture_output=True).returncode:
            parser.error(f"--against {options.against}: no revision of this repository")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)  # rather now than after all measurements
    described = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    described = subprocess.run(described, capture_output=True, text=True).stdout.strip()
    command = " ".join(["python", "benchmark/speed.py", *argv])
    summary = dict(command=command, git=described, hardware=hardware())
    print(f"{command.removeprefix('python benchmark/')}\n{hardware()}", flush=True)
    try:
        if options.name:
            summary |= beside_baseline(options, flags)
        else:
            scripts = options.script or list(PROCESSES)
            summary["revisions"] = revision(options.against, scripts, options.pairs, flags)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if options.json:
        options.json.write_text(json.dumps(summary, indent=1) + "\n")
    return 0


def beside_baseline(options, flags: list[str]) -> dict:
    """Script and baseline in turn, each measurement a process that runs `child`."""
    results = {"script": []} | ({options.against: []} if options.against else {})
    for _ in range(options.pairs):
        for variant, list_of_results in results.items():
            command = [sys.executable, __file__, options.name, "--child", variant]
            command += ["--iterations", str(options.iterations), "--warmup", str(options.warmup)]
            command += ["--against", options.against] if options.against else []
            command += ["--peer-python", options.peer_python, "--seconds", str(options.seconds), "--", *flags]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError((done.stderr or done.stdout).strip())
            list_of_results.append(json.loads(done.stdout.splitlines()[-1]))
            show(list_of_results[-1])
    if not options.against:
        return dict(results=results)
    pairs = list(zip(results["script"], results[options.against], strict=True))
    wall = [ours["sps"] / theirs["sps"] for ours, theirs in pairs]
    cpu = [theirs["seconds_a_step"]["cpu"] / ours["seconds_a_step"]["cpu"] for ours, theirs in pairs]
    for name, ratios in (("wall time", wall), ("CPU time", cpu)):
        print(f"{options.against} / script, {name}: {statistics.median(ratios):.2f} ", end="")
        print(f"({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} pairs)")
    return dict(results=results, wall_ratios=wall, cpu_ratios=cpu)


if __name__ == "__main__":
    sys.exit(main())
