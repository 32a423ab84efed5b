"""Steps per second of a script, where the time goes, and the ratio to a baseline, measured side by side.

    python benchmark/speed.py ppo_procgen
    python benchmark/speed.py ppo_procgen --against eager -- --num-envs 64 --num-steps 256 --minibatch-size 2048

What follows `--` goes to the script. Every measurement is a process of its own: `--warmup` iterations, which are
discarded, then `--iterations` of the same work. With --against, script and baseline alternate A B A B, and
the ratio of each pair is printed: on a machine whose speed drifts the ratio means something, a single figure does not.
Run it with nothing else running. CPU seconds are those of all threads; peak memory is the largest resident set.

The baseline "eager" does the same update the common way: float32 observations in the rollout, contiguous layout, a
padded max-pool, a whole minibatch in one forward and backward, no compilation. It stands for CleanRL too, whose package
in the registry is too old. "sync" is an asynchronous script without overlap, "rnd" the sibling at equal sizes, "ppo"
ppo_procgen with the same network, else at its own defaults, "fp32" the script without the --precision bf16 or --compile
of the flags. Peers run with a python of their own, --peer-python (benchmark/peers.sh makes them): "sample-factory"
(2.1.1) and "sb3" (Stable-Baselines3 2.9.2, its own Atari wrappers, the same sizes), both for appo_atari.
"""

import argparse
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


class Stopwatch:
    """Wall and CPU seconds of every iteration, and seconds a phase."""

    batch_size = 0  # agent steps of an iteration: `child` sets it, a baseline with another size its own

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


def measure_script(script, args) -> Stopwatch:
    """Run the script's own `train`, with a stopwatch on its log line."""
    watch, log = Stopwatch(), script.Run.log

    def timed_log(run, step, metrics):
        laps = {name.removeprefix("time/").removesuffix("_s"): seconds for name, seconds in run.laps.items()}
        result = log(run, step, metrics)
        watch.row(**laps)
        return result

    script.Run.log = timed_log
    goes_on = script.Run.goes_on

    def timed_goes_on(run, *rest):
        if not watch.rows:
            watch.mark = (time.perf_counter(), time.process_time())
        return goes_on(run, *rest)

    script.Run.goes_on = timed_goes_on
    script.train(args)
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


def eager_ppo_procgen(script, args) -> Stopwatch:
    """PPO the common way: what `ppo_procgen.train` computes, without any of its care for speed."""
    import numpy as np
    import torch
    from torch import nn
    from torch.distributions import Categorical

    device = plain_device(args)
    torch.manual_seed(args.seed)
    envs = script.make_envs(args, "training", args.num_envs)
    T, N, shape = args.num_steps, args.num_envs, envs.single_observation_space.shape
    net = impala_net(args, shape, envs.single_action_space.n).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=script.schedule(0, args.lr))
    obs_rows = torch.zeros(T, N, *shape, device=device)
    actions, logps, rewards, dones = (torch.zeros(T, N, device=device) for _ in range(4))
    logits_rows, values = torch.zeros(T, N, envs.single_action_space.n, device=device), torch.zeros(T, N, device=device)
    obs = torch.Tensor(envs.reset()[0].copy()).to(device)
    watch = Stopwatch()
    for _ in range(args.iterations):
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


def eager_ppo_atari_rnd(script, args) -> Stopwatch:
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
    envs = script.make_envs(args, "training", args.num_envs)
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

    def normalised(frames):
        scale = torch.from_numpy(np.sqrt(var)).to(device)
        return ((frames[:, -1:] - torch.from_numpy(mean).to(device)) / scale).clamp(-5, 5).float()

    for _ in range(args.iterations):
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
                loss = -surrogate + args.vf_coef * value_loss - args.ent_coef * policy.entropy().mean() + auxiliary
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(weights, args.max_grad_norm or float("inf"))
                optimizer.step()
                loss.item()
        watch.lap("learn")
        watch.row(**watch.phases)
    envs.close()
    return watch


def eager_ppo_atari_snd(script, args) -> Stopwatch:
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
    envs = script.make_envs(args, "training", args.num_envs)
    T, N, shape = args.num_steps, args.num_envs, envs.single_observation_space.shape
    net, sizes = Net(shape, envs.single_action_space.n).to(device), script.SND_NETS["elu4"][1:]
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
    share, pairs, watch = args.predictor_share or min(1, 32 / N), args.minibatch_size // 8, Stopwatch()

    def normalised(frames):
        scale = torch.from_numpy(np.sqrt(var)).to(device)
        return ((frames[:, -1:] - torch.from_numpy(mean).to(device)) / scale).clamp(-1, 1).float()

    for _ in range(args.iterations):
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
                loss = loss - args.ent_coef * policy.entropy().mean()
                x = normalised(seen)
                error = (predictor(x) - target(x).detach()).pow(2)
                mask = (torch.rand_like(error) < share).float()
                loss = loss + (error * mask).sum() / mask.sum().clamp(min=1)
                one, other = np.random.randint(T * N, size=(2, pairs))
                far = torch.rand(pairs, device=device) < 0.5
                second = torch.where(far[:, None, None, None], rows[0][other], rows[0][one])
                a, b = (target(script.distort(normalised(frames), "tiles")) for frames in (rows[0][one], second))
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


def eager_impala_procgen(script, args) -> Stopwatch:
    """IMPALA the common way, one after the other: all environments act, then batches of whole fragments are learned."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.distributions import Categorical

    device = plain_device(args)
    torch.manual_seed(args.seed)
    envs = script.make_envs(args, "training", args.num_envs)
    T, N, shape = args.num_steps, args.num_envs, envs.single_observation_space.shape
    net = impala_net(args, shape, envs.single_action_space.n).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=script.schedule(0, args.lr))
    obs_rows = torch.zeros(T + 1, N, *shape, device=device)
    actions, logps, rewards, dones = (torch.zeros(T, N, device=device) for _ in range(4))
    obs = torch.Tensor(envs.reset()[0].copy()).to(device)
    watch, fragments = Stopwatch(), args.minibatch_size // T
    watch.batch_size = T * N
    for _ in range(args.iterations):
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


def eager_appo_atari(script, args) -> Stopwatch:
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
    envs = script.make_envs(args, "training", args.num_envs)
    T, N, shape = args.num_steps, args.num_envs, envs.single_observation_space.shape
    net = Net(shape, envs.single_action_space.n).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=script.schedule(0, args.lr), eps=args.adam_eps)
    obs_rows = torch.zeros(T, N, *shape, device=device)
    actions, logps, rewards, dones, values = (torch.zeros(T, N, device=device) for _ in range(5))
    obs, watch = torch.Tensor(envs.reset()[0]).to(device), Stopwatch()
    watch.batch_size = T * N
    for _ in range(args.iterations):
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
                loss = -surrogate + args.vf_coef * value_loss - args.ent_coef * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), args.max_grad_norm or float("inf"))
                optimizer.step()
                loss.item()
        watch.lap("learn")
        watch.row(**watch.phases)
    envs.close()
    return watch


def ppo(script, args) -> Stopwatch:
    """ppo_procgen.py at its own defaults, on the same game with the same network."""
    other = load("ppo_procgen")
    theirs = other.Args(env_id=args.env_id, channels=args.channels, pool=args.pool, stack=args.stack)
    theirs.run_dir, theirs.quiet, theirs.eval_episodes, theirs.device = args.run_dir, True, 0, args.device
    theirs.torch_threads, theirs.env_threads = args.torch_threads, args.env_threads
    theirs.total_timesteps = args.total_timesteps // args.batch_size * theirs.batch_size  # as many iterations
    watch = measure_script(other, theirs)
    watch.batch_size = theirs.batch_size
    return watch


def sync(script, args) -> Stopwatch:
    """The script itself without overlap."""
    args.sync = True
    return measure_script(script, args)


def fp32(script, args) -> Stopwatch:
    """The script itself in plain float32, beside its --precision bf16 or --compile."""
    args.precision, args.compile = "fp32", False
    return measure_script(script, args)


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


def rnd(script, args) -> Stopwatch:
    """ppo_atari_rnd.py with the same policy, rows and passes, and target and predictor of the same size."""
    other = load("ppo_atari_rnd")
    same = {name: value for name, value in vars(args).items() if name in other.Args.__dataclass_fields__}
    same |= dict(net="c", rnd_net="elu4", obs_norm="std", predictor_mask="element", int_norm="none")
    return measure_script(other, other.Args(**same | dict(rnd_features=args.snd_features)))


BASELINES = {
    "ppo_procgen": {"eager": eager_ppo_procgen, "fp32": fp32},
    "ppo_atari_rnd": {"eager": eager_ppo_atari_rnd, "fp32": fp32},
    "ppo_atari_snd": {"eager": eager_ppo_atari_snd, "rnd": rnd, "fp32": fp32},
    "impala_procgen": {"eager": eager_impala_procgen, "ppo": ppo, "sync": sync, "fp32": fp32},
    "appo_atari": {"eager": eager_appo_atari, "sync": sync, "sample-factory": sample_factory, "sb3": sb3, "fp32": fp32},
}


# Flags that change how fast the same work is done, not how much of it, or that `child` sets itself.
NEUTRAL = set(
    """seed device torch_threads env_threads micro_batch precision compile sync num_groups total_timesteps
run_dir run_name quiet eval_episodes eval_every checkpoint_every keep_checkpoints max_minutes warmup_steps
num_minibatches num_batches_to_accumulate""".split()
)


def unknown(script, args, baseline) -> list[str]:
    """Flags off their defaults that an eager baseline does not follow: it would do other work than the script."""
    known = "".join(map(inspect.getsource, (baseline, impala_net, script.make_envs)))
    changed = [name for name, value in vars(args).items() if value != getattr(script.Args(), name)]
    return [name for name in changed if name not in NEUTRAL and not re.search(rf"\bargs\.{name}\b", known)]


def env_rate(script, args, steps: int = 200) -> float:
    """Steps per second of the environments alone under random actions: the ceiling of any script."""
    import numpy as np

    envs, rng = script.make_envs(args, "training", args.num_envs), np.random.default_rng(0)
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
        fixed = ["--run-dir", folder, "--quiet", "--eval-episodes", "0", "--total-timesteps", str(10**9)]
        args = tyro.cli(script.Args, args=fixed + flags)
        variant, warmup = options.child, options.warmup
        if variant == "sample-factory":
            return sample_factory(variant, args, options.seconds, options.peer_python)
        if variant == "sb3":
            return sb3(variant, args, options)
        # Asynchronous actors begin nothing beyond the run's end: its last iterations have no acting to wait for.
        ahead = getattr(args, "num_batches_to_accumulate", -1) + 1 if variant in ("script", "fp32") else 0
        if options.against == "eager" and (others := unknown(script, args, BASELINES[name]["eager"])):
            flags = ", ".join(f"--{other.replace('_', '-')}" for other in others)
            raise script.UsageError(f"--against eager: the baseline does not follow {flags}")
        args.total_timesteps = (options.iterations + warmup + ahead) * args.batch_size
        rate = env_rate(script, args)
        Stopwatch.batch_size = args.batch_size
        if variant == "script":
            watch = measure_script(script, args)
        else:
            watch = BASELINES[name][variant](script, args)
    rows = watch.rows[warmup : warmup + options.iterations]
    steps = watch.batch_size * len(rows)
    result = {key: sum(row[key] for row in rows) / steps for key in rows[0]}  # seconds a step
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return dict(variant=variant, sps=1 / result.pop("wall"), peak_gib=peak, env_only_sps=rate, seconds_a_step=result)


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
    parser.add_argument("script", choices=sorted(BASELINES), help="name of a script, without .py")
    baselines = sorted({name for own in BASELINES.values() for name in own})
    parser.add_argument("--against", choices=[*baselines, "cleanrl"], help="alternate with this baseline")
    parser.add_argument("--peer-python", default="python", help="the python that has sample-factory or sb3")
    parser.add_argument("--seconds", type=float, default=180, help="length of a run of Sample Factory")
    parser.add_argument("--pairs", type=int, default=2, help="measurements of each (A B A B = 2)")
    parser.add_argument("--iterations", type=int, default=2, help="iterations measured in each process")
    parser.add_argument("--warmup", type=int, default=1, help="iterations discarded before them")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(argv[: argv.index("--")] if "--" in argv else argv)
    for name, least in (("pairs", 1), ("iterations", 1), ("warmup", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name} {getattr(options, name)}: must be at least {least}")
    if options.child:
        try:
            print(json.dumps(child(options.script, options, flags)))
        except ValueError as error:
            if type(error).__name__ != "UsageError":  # of the script's own copy of that class
                raise
            parser.error(str(error))
        return 0
    if options.against == "cleanrl":
        parser.error(
            "--against cleanrl: its newest version for Python 3.11, 0.4.8, has none of the scripts; take eager"
        )
    if options.against and options.against not in BASELINES[options.script]:
        parser.error(f"--against: {options.script} has only {', '.join(BASELINES[options.script])}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)  # rather now than after all measurements
    print(f"{options.script} {' '.join(flags)}\n{hardware()}")
    results = {"script": []} | ({options.against: []} if options.against else {})
    for _ in range(options.pairs):
        for variant, list_of_results in results.items():
            command = [sys.executable, __file__, options.script, "--child", variant]
            command += ["--iterations", str(options.iterations), "--warmup", str(options.warmup)]
            command += ["--against", options.against] if options.against else []
            command += ["--peer-python", options.peer_python, "--seconds", str(options.seconds), "--", *flags]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(done.stderr or done.stdout, file=sys.stderr)
                return 1
            list_of_results.append(json.loads(done.stdout.splitlines()[-1]))
            show(list_of_results[-1])
    revision = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    revision = subprocess.run(revision, capture_output=True, text=True).stdout.strip()
    command = " ".join(["python", "benchmark/speed.py", *argv])
    summary = dict(command=command, git=revision, hardware=hardware(), results=results)
    if options.against:
        pairs = list(zip(results["script"], results[options.against], strict=True))
        wall = [ours["sps"] / theirs["sps"] for ours, theirs in pairs]
        cpu = [theirs["seconds_a_step"]["cpu"] / ours["seconds_a_step"]["cpu"] for ours, theirs in pairs]
        for name, ratios in (("wall time", wall), ("CPU time", cpu)):
            print(f"{options.against} / script, {name}: {statistics.median(ratios):.2f} ", end="")
            print(f"({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} pairs)")
        summary |= dict(wall_ratios=wall, cpu_ratios=cpu)
    if options.json:
        options.json.write_text(json.dumps(summary, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
