"""What all tests share: a fake vector env that can falsify a training loop."""

import contextlib
import csv
import importlib
import signal
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import tyro
from gymnasium.vector import AutoresetMode

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell starts with it ignored
ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmark" / "variants"
STEMS = [path.stem for path in (*ROOT.glob("*.py"), *FOLDER.glob("*.py"))]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark"), str(ROOT / "docs")]

NEXT_STEP, SAME_STEP = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP
LOSSES = ("loss/policy", "loss/value", "loss/entropy", "train/approx_kl", "train/clip_frac", "train/grad_norm")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes")


def pytest_runtest_setup(item):
    if "slow" in item.keywords and not item.config.getoption("--slow"):
        pytest.skip("takes minutes: run with --slow")


@pytest.fixture(autouse=True)
def one_thread():
    """The fastest for tiny networks, and the same on every machine."""
    torch.set_num_threads(1)


@pytest.fixture
def variant(monkeypatch):
    """variant(name): its module, imported anew with its script, which it finds itself; all others keep theirs."""
    before = {name: sys.modules.pop(name) for name in STEMS if name in sys.modules}
    monkeypatch.setattr(sys, "path", [str(FOLDER), *(path for path in sys.path if Path(path).resolve() != ROOT)])
    yield importlib.import_module
    for name in STEMS:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@contextlib.contextmanager
def float64():
    """Scripts compute in float64. In fp32 a ReLU's input near 0 has another sign on another processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.fixture
def in_float64():
    with float64():
        yield


def rows(folder):
    """The rows of a run's metrics.csv."""
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


read = rows  # where `rows` are those of a rollout


def giving(envs):
    """A make_envs that returns these: a VectorEnv, or a list of them, one after the other."""
    left = list(envs) if isinstance(envs, list) else [envs]
    return lambda args, num_envs, seed, test=False: left.pop(0)


def runner(module, small):
    """run(tmp_path, envs, iterations, name, **changes), which trains -> the last metrics, the checkpoint."""

    def run(tmp_path, envs, iterations=1, name="run", **changes):
        flags = small | dict(run_dir=str(tmp_path), run_name=name) | changes
        total = iterations * flags["num_envs"] * flags["num_steps"]
        args = module.Args(**flags | dict(total_timesteps=total))
        metrics = module.train(args, giving(envs))
        return metrics, torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)

    return run


def timeless(folder):
    """What runs of one seed agree on, with evaluations in between or without."""
    return [{name: x for name, x in row.items() if not name.startswith(("time/", "eval/"))} for row in rows(folder)]


def equal(a, b):
    """Bit-equality of nested states."""
    if hasattr(a, "equal"):  # a tensor
        return a.equal(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


class FakeVecEnv(gym.vector.VectorEnv):
    """A scripted vector env with EnvPool's or Procgen's autoreset and nothing random in it.

    episodes: for each env a list of (rewards, end), played in turn forever; end is "terminated", "truncated" or
    "life" (a lost life: `terminated` is set, info["terminated"] is not). A frame shows env, episode and step in its
    first three pixels. With next-step autoreset the step after an end ignores its action, pays `dummy_reward` (a real
    env: 0) and shows the next episode's first frame; with same-step the end's step shows it.
    learn: pay 1 where the action equals the frame's fourth pixel, else 0, in place of the scripted rewards.
    """

    def __init__(self, episodes, autoreset=NEXT_STEP, num_actions=4, shape=(3, 16, 16), learn=False, dummy_reward=0.0):
        self.num_envs, self.episodes, self.learn, self.dummy_reward = len(episodes), episodes, learn, dummy_reward
        self.metadata = {"autoreset_mode": autoreset}
        self.same_step, self.shape, self.num_actions = autoreset == SAME_STEP, shape, num_actions
        self.single_observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        self.single_action_space = gym.spaces.Discrete(num_actions)
        self.episode, self.t = np.zeros(self.num_envs, int), np.zeros(self.num_envs, int)
        self.over = np.zeros(self.num_envs, bool)
        self.returns, self.lengths = np.zeros(self.num_envs), np.zeros(self.num_envs, int)
        # Actions received, frames shown, (reward, ended, cut, over before).
        self.actions, self.seen, self.log = [], [], []

    def frame(self, env):
        frame = np.zeros(self.shape, np.uint8)
        frame[:, 0, :3] = env, self.episode[env] % 256, self.t[env]
        if self.learn:  # the whole frame tells the rewarded action, which a network can see through any pooling
            frame[:] = self.target(env) * (255 // self.num_actions)
            frame[:, 0, 3] = self.target(env)
        return frame

    def target(self, env):
        return (7 * env + 3 * self.episode[env] + self.t[env] * self.t[env]) % self.num_actions

    def frames(self):
        self.seen.append(np.stack([self.frame(env) for env in range(self.num_envs)]))
        return self.seen[-1].copy()

    def reset(self, *, seed=None, options=None):
        return self.frames(), {}

    def step(self, actions):
        assert isinstance(actions, np.ndarray) and actions.shape == (self.num_envs,) and actions.dtype.kind == "i"
        assert (0 <= actions).all() and (actions < self.num_actions).all()
        self.actions.append(actions.copy())
        reward, ended, cut = np.zeros(self.num_envs, np.float32), *np.zeros((2, self.num_envs), bool)
        game_over, before = np.zeros(self.num_envs, np.int32), self.over.copy()
        for env in range(self.num_envs):
            if self.over[env]:  # next-step autoreset: the dummy row
                self.begin(env)
                reward[env] = self.dummy_reward
                continue
            rewards, end = self.episodes[env][self.episode[env] % len(self.episodes[env])]
            right = float(actions[env] == self.target(env))
            reward[env] = right if self.learn else rewards[self.t[env]]
            self.t[env] += 1
            self.returns[env] += reward[env]
            self.lengths[env] += 1
            if self.t[env] == len(rewards):
                ended[env], cut[env], self.over[env] = end != "truncated", end == "truncated", True
                game_over[env] = end == "terminated"
                if self.same_step:
                    self.begin(env)
        lives = np.full(self.num_envs, 3, np.int32)
        info = dict(reward=reward.copy(), terminated=game_over, lives=lives, elapsed_step=self.t.astype(np.int32))
        reported = (game_over > 0) | cut
        if reported.any():
            info |= {"episode": {"r": self.returns.copy(), "l": self.lengths.copy()}, "_episode": reported}
            self.returns[reported], self.lengths[reported] = 0, 0
        self.log.append((reward.copy(), ended.copy(), cut.copy(), before))
        return self.frames(), reward, ended, cut, info

    def begin(self, env):
        self.episode[env] += 1
        self.t[env], self.over[env] = 0, False


def random_episodes(num_envs, seed=0, count=6, ends=("terminated", "truncated"), longest=7):
    rng = np.random.default_rng(seed)
    return [
        [(rng.normal(size=rng.integers(1, longest)).astype(np.float32), str(rng.choice(ends))) for _ in range(count)]
        for _ in range(num_envs)
    ]


class RareDoor(FakeVecEnv):
    """A corridor, next-step autoreset, with its door at the far end, which random play hardly ever reaches.

    Odd actions walk on, even ones back. The only reward is behind the door; a game is cut after `limit` steps.
    """

    depth, limit, reached = 20, 60, 0

    def __init__(self, num_envs=8):
        super().__init__([[]] * num_envs, shape=(4, 44, 44))
        self.position = np.zeros(num_envs, int)

    def frame(self, env):
        frame = np.zeros(self.shape, np.uint8)
        y, x = divmod(int(self.position[env]), 5)
        frame[:, 8 * y : 8 * y + 8, 8 * x : 8 * x + 8] = 255
        return frame

    def step(self, actions):
        fresh, self.t = self.over, np.where(self.over, 0, self.t + 1)
        walked = np.maximum(self.position + np.where(actions % 2 == 1, 1, -1), 0)
        self.position = np.where(fresh, 0, walked)
        ended = (self.position == self.depth) & ~fresh
        cut = (self.t >= self.limit) & ~ended & ~fresh
        self.over, self.reached = ended | cut, self.reached + int(ended.sum())
        episode = {"r": ended.astype(float), "l": self.t}
        return self.frames(), ended.astype(np.float32), ended, cut, {"episode": episode, "_episode": self.over}


class Games(FakeVecEnv):
    """Frames differ much, also those of a stack; a reset begins new games, as every real environment's does."""

    noise = 0  # shown in the final frame of an episode, which only the dummy row holds

    def frames(self):
        frames = super().frames()
        frames[self.over] ^= self.noise
        return frames

    def reset(self, *, seed=None, options=None):
        for env in np.flatnonzero((self.t > 0) | self.over):
            self.begin(env)
        return super().reset()

    def frame(self, env):
        frame = super().frame(env)
        if not self.learn:
            frame[:, 1:] = (50 * env + 37 * self.episode[env] + 11 * self.t[env]) % 256
        frame[:-1] //= 2
        return frame


def spy_on(monkeypatch, owner, name, note):
    """Call `note` with the result and the arguments of each call of owner.name."""
    real = getattr(owner, name)

    def spy(*args, **options):
        result = real(*args, **options)
        note(result, *args)
        return result

    monkeypatch.setattr(owner, name, spy)


def larger(monkeypatch, cls, *names):
    """First weights of these layers times 30, so that it matters which frame an output is of."""

    def note(result, self, *rest):
        for name in names:
            getattr(self, name).weight.data *= 30

    spy_on(monkeypatch, cls, "__init__", note)


def num_weights(module):
    return sum(weight.numel() for weight in module.parameters())


def assert_initial(module, gains):
    """Zero biases; orthogonal weights, of the gain of the part they are in."""
    for name, weight in module.named_parameters():
        if "bias" in name:
            assert not weight.any(), name
            continue
        rows = weight.flatten(1)
        gram = rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows
        gain = gains.get(name.split(".")[0], 2**0.5)
        torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)), rtol=1e-3, atol=1e-5)


def plain_gae(reward, value, ended, cut, gamma, lam):
    """By the definition, (T, N) in float64: a sum over the rest of each game, or of the rollout."""
    advantage = np.zeros(reward.shape)
    for t, n in np.ndindex(*reward.shape):
        factor = 1.0
        for k in range(t, len(reward)):
            following = 0.0 if ended[k, n] else value[k + 1, n]
            advantage[t, n] += factor * (reward[k, n] + gamma * following - value[k, n])
            factor *= gamma * lam
            if ended[k, n] or cut[k, n]:
                break
    return advantage


def plain_ppo(logits, value_error, action, advantage, old_logp, low, high):
    """Means over the rows: losses of the policy and of the values, entropy, KL, share of ratios clipped."""
    ratio = (logits.log_softmax(-1).gather(1, action[:, None])[:, 0] - old_logp).exp()
    clipped = ratio.clamp(max=high).where(advantage > 0, ratio.clamp(min=low))
    probabilities = logits.softmax(-1)
    entropy = -(probabilities * probabilities.log()).sum(1).mean()
    outside = ((ratio < low) | (ratio > high)).double().mean()
    return -(clipped * advantage).mean(), value_error.mean(), entropy, (ratio - 1 - ratio.log()).mean(), outside


def plain_step(optimizer, loss, weights, limit=0):
    """An SGD step, with the gradient of `weights` clipped at `limit` if that is not 0 -> its norm before."""
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(weights, limit or np.inf)
    optimizer.step()
    return norm


def assert_metrics(metrics, losses, advantages, goals, valid, raw, bonus):
    """losses: of each SGD step, plain_ppo's and the norm of the gradient; advantages: two (T, N); goals: (T, N, 2)."""
    for name, mean in zip(LOSSES, np.mean(losses, axis=0), strict=True):
        assert metrics[name] == pytest.approx(mean, rel=1e-9), (name, mean)
    assert metrics["train/lr"] == pytest.approx(1e-3)
    assert metrics["int/reward_raw"] == pytest.approx(raw.mean(), rel=1e-9)
    assert metrics["int/reward"] == pytest.approx(bonus.mean(), rel=1e-9)
    assert 0 < metrics["train/clip_frac"] < 1
    for head, name in enumerate(("train", "int")):
        explained = 1 - advantages[head][valid].var() / goals[valid][:, head].var()
        assert metrics[f"{name}/explained_variance"] == pytest.approx(explained, rel=1e-9)


def assert_learned(start, plain, ours):
    """Weights from `start`: the error is small beside what was learned."""
    for name, weight in plain.items():
        learned = (weight - start[name]).norm().item()
        assert (weight - ours[name]).norm() <= 1e-8 * learned + 1e-12, name


def random_play(envs, steps):
    """Yields obs, reward, terminated, truncated, info, valid of each step of random actions."""
    rng, done = np.random.default_rng(0), np.zeros(envs.num_envs, bool)
    envs.reset()
    for _ in range(steps):
        valid = ~done
        obs, reward, ended, cut, info = envs.step(rng.integers(envs.single_action_space.n, size=envs.num_envs))
        done = ended | cut
        yield obs, reward, ended, cut, info, valid


def plain_deviation(values):
    """Of all values and of 1e-4 of an observation with mean 0 and variance 1, from which OpenAI's statistics start."""
    n = len(values) + 1e-4
    return np.sqrt((np.sum(np.square(values), axis=0) + 1e-4) / n - (np.sum(values, axis=0) / n) ** 2)


def plain_standardised(frames, shown, limit):
    """Under the statistics of all frames shown, a list of arrays."""
    everything = np.concatenate(shown)
    x = frames.double().numpy() - everything.sum(0) / (len(everything) + 1e-4)
    return frames.new_tensor(np.clip(x / plain_deviation(everything), -limit, limit), dtype=float)


class Snow(FakeVecEnv):
    """Every frame is its own noise, so that values vary. Environments `first`, first + 1, ... of a larger vector."""

    first = 0

    def frame(self, env):
        seeds = [env + self.first, int(self.episode[env]), int(self.t[env])]
        return np.random.default_rng(seeds).integers(0, 256, self.shape, np.uint8)


def impala_network(weights, obs, shift=128, pool="avg"):
    """The Procgen scripts' network in float64 from a dict of weights, with TensorFlow's SAME padding made explicit."""

    def conv(x, name):
        return F.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], padding=1)

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    x = (obs.double() - shift) / 255
    for i in range(3):
        x = F.max_pool2d(F.pad(conv(x, f"convs.{i}"), (0, 1, 0, 1), value=-np.inf), 3, stride=2)
        for j in range(2):
            x = x + conv(conv(x.relu(), f"blocks.{i}.{j}.conv1").relu(), f"blocks.{i}.{j}.conv2")
    x = (x.mean((2, 3)) if pool == "avg" else x.flatten(1)).relu()
    x = linear(x, "hidden").relu()
    return linear(x, "policy"), linear(x, "value")[:, 0]


COMMON = "--num-envs 4 --num-steps 16 --minibatch-size 32 --eval-episodes 2 --device cpu --threads 1"
PROCGEN = f"{COMMON} --env-id leaper --channels 4 4 4"
ATARI = f"{COMMON} --env-id Breakout --max-episode-steps 30"
KINDS = {  # the flags of a real run of a second or two
    "ppo_procgen": f"{PROCGEN} --norm-reward 0.99",
    "impala_procgen": f"{PROCGEN} --num-groups 2 --sync --minibatch-size 64",
    "ppo_atari_rnd": f"{ATARI} --warmup-steps 8 --rnd-features 8",
    "ppo_atari_snd": f"{ATARI} --warmup-steps 8 --snd-features 8 --update-epochs 1 --frame-size 84",
    "appo_atari": f"{ATARI} --num-groups 2 --num-minibatches 2 --sync",
}
ITERATION = 64  # steps


class Script:
    """A script in an empty folder: `main` with its flags, `train` on the fake environment."""

    def __init__(self, name, path):
        self.name, self.folder = name, path / "runs" / "a"
        self.module = importlib.import_module(name)
        procgen = "procgen" in name
        self.shape = (3, 16, 16) if procgen else (4, 44, 44)
        self.split, self.evaluated = ("test", "eval/return_test") if procgen else ("game", "eval/return")
        self.autoreset = SAME_STEP if procgen else NEXT_STEP

    def main(self, *flags, before=None):
        words = (KINDS[self.name] if before is None else before).split()
        try:
            return self.module.main([*words, *map(str, flags)])
        except SystemExit as error:  # tyro's own
            return error.code

    def resume(self, *flags):
        return self.main(*flags, before="--resume runs/a")

    def fake(self, num_envs=4, cls=FakeVecEnv, episodes=None, seed=0, **options):
        ends = ("terminated",) if self.autoreset == SAME_STEP else ("terminated", "truncated")
        return cls(episodes or random_episodes(num_envs, seed, ends=ends), self.autoreset, shape=self.shape, **options)

    def train(self, envs, iterations=1, saved=None, **changes):
        options = dict(eval_episodes=0, run_name="a", total_timesteps=iterations * ITERATION) | changes
        args = tyro.cli(self.module.Args, args=KINDS[self.name].split())
        if hasattr(args, "num_groups"):
            options.setdefault("num_groups", 1)
        return self.module.train(replace(args, **options), envs if callable(envs) else giving(envs), saved)

    def go_on(self, envs, iterations, **changes):
        saved = self.module.load("runs/a")
        flags = saved["args"] | dict(total_timesteps=iterations * ITERATION) | changes
        return self.module.train(self.module.Args(**flags), giving(envs), saved)


@pytest.fixture(params=["ppo_procgen"])  # one for what is the same text in all five
def script(request, tmp_path, monkeypatch):
    def quick(weight, gain=1):  # the true one's QR would be most of these runs
        return torch.nn.init.normal_(weight, 0, gain * weight[0].numel() ** -0.5)

    monkeypatch.setattr(torch.nn.init, "orthogonal_", quick)
    monkeypatch.chdir(tmp_path)
    return Script(request.param, tmp_path)
