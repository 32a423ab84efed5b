"""The algorithm of appo_atari.py against independent oracles; its threads are tested in test_actors.py."""

import csv

import appo_atari
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from appo_atari import Agent, Args, UsageError, ppo_terms, train, vtrace

from conftest import NEXT_STEP, SAME_STEP, FakeVecEnv, random_episodes

SHAPE = (4, 44, 44)
SMALL = dict(num_envs=4, num_groups=1, num_steps=16, minibatch_size=32, num_minibatches=2, update_epochs=1, sync=True)
SMALL |= dict(eval_episodes=0, quiet=True, torch_threads=1, device="cpu")


def run(tmp_path, envs, iterations=1, name="run", **changes):
    """Train -> the last metrics, the checkpoint."""
    args = Args(**(SMALL | dict(run_dir=str(tmp_path), run_name=name) | changes))
    args.total_timesteps = iterations * args.minibatch_size * args.num_minibatches
    metrics = train(args, envs)
    return metrics, torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)


def fake(num_envs=4, cls=FakeVecEnv, **options):
    """Next-step episodes of one to six steps, with all kinds of ends."""
    episodes = random_episodes(num_envs, ends=("terminated", "truncated", "life"))
    return cls(episodes, NEXT_STEP, shape=SHAPE, **options)


class Noise(FakeVecEnv):
    """Every frame looks different, so that values vary."""

    def frame(self, env):
        seeds = [env, int(self.episode[env]), int(self.t[env])]
        return np.random.default_rng(seeds).integers(0, 256, self.shape, np.uint8)


def read(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def calls_of(monkeypatch, name):
    """The calls of a function of the script, as (arguments, result)."""
    calls, function = [], getattr(appo_atari, name)

    def recorded(*args):
        calls.append((args, function(*args)))
        return calls[-1][1]

    monkeypatch.setattr(appo_atari, name, recorded)
    return calls


def test_defaults_match_reference_table():
    """The card's setting, as far as it can run."""
    expected = dict(num_steps=128, minibatch_size=1024, num_minibatches=8, update_epochs=4, gamma=0.99, num_envs=32)
    expected |= dict(gae_lambda=0.95, clip=0.1, vf_clip=1, vf_coef=0.5, lr=(0.0003033891184,), anneal_lr=True)
    expected |= dict(ent_coef=(0.0004677351413,), adam_eps=1e-5, max_grad_norm=0, num_batches_to_accumulate=2)
    expected |= dict(max_policy_lag=1000, vtrace=False, noop_max=30, stack=4, frame_size=84, total_timesteps=25_000_000)
    expected |= dict(episodic_life=True, fire_reset=True, repeat_action_probability=0)
    assert {name: getattr(Args(), name) for name in expected} == expected


# ------------------------------------------------------------------------------------------------------------- maths


def plain_targets(reward, value, ended, cut, gamma, lam, rho=None):
    """Advantages and targets of one trajectory by the definitions' sums over each game, O(T^2); rho: V-trace."""
    T, target, advantage = len(reward), np.zeros(len(reward)), np.zeros(len(reward))
    weight = np.ones(T) if rho is None else np.minimum(rho, 1)
    for t in range(T):
        factor, target[t] = 1.0, value[t]
        for k in range(t, T):
            following = 0.0 if ended[k] else value[k + 1]
            target[t] += factor * weight[k] * (reward[k] + gamma * following - value[k])
            factor *= gamma * (lam if rho is None else weight[k])
            if ended[k] or cut[k]:
                break
    if rho is None:
        return target - value[:-1], target
    for t in range(T):
        following = 0.0 if ended[t] else value[t + 1] if cut[t] or t == T - 1 else target[t + 1]
        advantage[t] = weight[t] * (reward[t] + gamma * following - value[t])
    return advantage, target


@pytest.mark.parametrize("seed", range(5))
def test_gae_and_vtrace_are_the_definitions_sums(seed):
    """With both kinds of ends at once too: a termination has no future value, each end cuts the trace."""
    rng = np.random.default_rng(seed)
    T, N = 30, 3
    reward, value, rho = rng.normal(size=(T, N)), rng.normal(size=(T + 1, N)), rng.exponential(size=(T, N))
    ended, cut = rng.random((2, T, N)) < 0.15
    plain = [(reward[:, n], value[:, n], ended[:, n], cut[:, n], 0.95) for n in range(N)]
    columns = [torch.tensor(x, dtype=torch.float64) for x in (reward, value, ended, ended | cut, rho)]
    expected = np.stack([plain_targets(*plain[n], 0.9)[0] for n in range(N)], 1)
    np.testing.assert_allclose(appo_atari.gae(*columns[:4], 0.95, 0.9), expected, rtol=1e-12, atol=1e-12)
    expected = np.stack([plain_targets(*plain[n], None, rho[:, n]) for n in range(N)], 2)
    vs, advantage = vtrace(*columns, 0.95)
    np.testing.assert_allclose(advantage, expected[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(vs, expected[1], rtol=1e-12, atol=1e-12)


def test_last_step_reward_matters():
    """Sample Factory's V-trace loses the last reward; here it changes the last advantage by rho."""
    zeros, value, rho = torch.zeros(3, 1), torch.ones(4, 1), torch.full((3, 1), 0.6)
    reward = torch.zeros(3, 1)
    before = vtrace(reward, value, zeros, zeros, rho, 0.9)[1]
    reward[-1] = 2
    assert (vtrace(reward, value, zeros, zeros, rho, 0.9)[1] - before)[-1].item() == pytest.approx(1.2)


def test_vtrace_clamps_the_ratio_like_the_loss():
    """To 0.05 from below, as Sample Factory does before V-trace limits it to 1 from above."""
    columns = dict(action=torch.zeros(2, 1, dtype=torch.int64), logp=torch.tensor([[0.0], [-20.0]]))
    columns |= dict(reward=torch.ones(2, 1), terminated=torch.ones(2, 1), done=torch.ones(2, 1))
    logits = torch.tensor([-20.0, 0.0]).expand(3, 1, 2)  # log pi of action 0 is -20
    columns = appo_atari.vtrace_columns(columns, logits, torch.zeros(3, 1), 0.9)
    assert columns["advantage"].flatten().tolist() == pytest.approx([0.05, 1])


def test_ppo_clip_interval_by_hand():
    """[1 / 1.1, 1.1], not [0.9, 1.1]; the ratio never leaves [0.05, 20]; the worse value error counts."""
    cases = [(1.05, 2, 1.05 * 2), (1.5, 2, 1.1 * 2), (0.5, -2, -2 / 1.1), (0.905, -2, -2 / 1.1)]
    for ratio, advantage, surrogate in [*cases, (50, -1, -20), (1e-4, 1, 0.05)]:
        p = 0.3
        logits = torch.tensor([[np.log(p), np.log(1 - p)]], dtype=torch.float64)
        rows = dict(advantage=float(advantage), target=3.0, logp=np.log(p / ratio), value=0.0)
        rows = {name: torch.tensor([x]) for name, x in rows.items()} | dict(action=torch.tensor([0]))
        terms = ppo_terms(logits, torch.tensor([2.0]), rows, 0.1, 1.0)
        assert terms["policy"].item() == pytest.approx(-surrogate, rel=1e-6)
        assert terms["value"].item() == pytest.approx(max((2 - 3) ** 2, (1 - 3) ** 2))
        assert bool(terms["clip_frac"]) == (not 1 / 1.1 <= ratio <= 1.1)


def test_normalizer_begins_with_a_row_and_bounds_the_deviation():
    """Of mean 0 and variance 1, and by 1e-5, in units: noise on pixels that hardly change is not blown up."""
    normalizer = appo_atari.Normalizer((2,), unit=255)
    rng = np.random.default_rng(0)
    x = np.stack([np.full(100_000, 7.0), rng.normal(90, 30, 100_000)], 1)
    assert normalizer.std.flatten().tolist() == pytest.approx([255 * (1 + 1e-5) ** 0.5] * 2)
    normalizer.update(torch.from_numpy(x))
    mean = x.sum(0) / 100_001
    std = np.sqrt((255**2 + np.square(x).sum(0)) / 100_001 - mean**2 + 1e-5 * 255**2)
    expected = ((x[:9] - mean) / std).clip(-5, 5)
    np.testing.assert_allclose(normalizer.normalize(torch.from_numpy(x[:9])), expected, rtol=1e-5, atol=1e-6)
    back = normalizer.denormalize(torch.tensor([[1.0, -2.0], [7.0, -7.0]]))
    np.testing.assert_allclose(back, [mean + [1, -2] * std, mean + [5, -5] * std], rtol=1e-5)


# ------------------------------------------------------------------------------------------------------ a training run


def test_bandit_credit(tmp_path, monkeypatch):
    """With gamma 0 every advantage is r(a_t) - V(o_t): nothing is shifted by one."""
    calls = calls_of(monkeypatch, "gae")
    envs = fake(learn=True)
    run(tmp_path, [envs], gamma=0.0)
    (reward, value, *_), advantage = calls[0]
    assert torch.equal(advantage, reward - value[:-1])
    for t, (paid, _, _, before) in enumerate(envs.log):
        right = envs.actions[t] == envs.seen[t][:, 0, 0, 3]  # the frame that was shown tells the rewarded action
        assert np.array_equal(reward[t].numpy(), paid) and np.array_equal(paid == 1, right & ~before)


@pytest.mark.filterwarnings("ignore:var")  # of no row
def test_old_rows_are_masked(tmp_path, monkeypatch):
    """Rows five SGD steps old count with --max-policy-lag 6; with 5 none does, and no weight moves."""
    publish = appo_atari.Actors.publish

    def publish_older(self, agent):
        publish(self, agent)
        self.agent.version -= 5

    monkeypatch.setattr(appo_atari.Actors, "publish", publish_older)
    saved = []
    for limit in (6, 5):
        metrics, end = run(tmp_path, [fake()], 1, str(limit), max_policy_lag=limit)
        assert (metrics["train/valid_frac"] > 0) == (limit == 6) and metrics["async/policy_lag_max"] == 5
        saved.append(end["agent"]["policy.weight"])
    torch.manual_seed(1)
    start = Agent(SHAPE, 4, Args()).state_dict()["policy.weight"]
    assert torch.equal(saved[1], start) and not torch.equal(saved[0], start)


@pytest.mark.parametrize("vtrace", [False, True])
def test_wasted_rows_have_zero_gradient(tmp_path, vtrace):
    """What the ignored action after an end pays is nowhere, not even in a statistic."""
    saved = []
    for dummy_reward in (0.0, -1e6):
        saved.append(run(tmp_path, [fake(dummy_reward=dummy_reward)], 3, str(dummy_reward), vtrace=vtrace)[1]["agent"])
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


def test_the_value_clip_is_centred_on_the_prediction_when_acting(tmp_path, monkeypatch):
    """And not on what returns from rewards, into which old statistics led and from which new ones lead back: rewards
    of 1e3 set them far apart, and the clip would leave hardly a row its gradient."""
    calls = calls_of(monkeypatch, "ppo_terms")
    episodes = [[(rewards * np.float32(1e3), end) for rewards, end in env] for env in random_episodes(4)]
    run(tmp_path, [FakeVecEnv(episodes, NEXT_STEP, shape=SHAPE)], lr=(0.0,))
    torch.manual_seed(1)
    acting = Agent(SHAPE, 4, Args())
    for (_, value, rows, *_), _ in calls:
        with torch.no_grad():
            torch.testing.assert_close(rows["value"], acting(rows["obs"])[1], rtol=1e-4, atol=1e-5)
        assert (value - rows["value"]).abs().max() < 1  # so that nothing is clipped, whatever the statistics say


def test_scaling_all_rewards_changes_little(tmp_path):
    """Learning with normalised returns does not depend on the unit of rewards; nor do the critic's outputs."""
    saved = []
    for scale in (1.0, 64.0):
        episodes = random_episodes(4, ends=("terminated",))
        episodes = [[(rewards * np.float32(scale), end) for rewards, end in env] for env in episodes]
        envs = FakeVecEnv(episodes, NEXT_STEP, shape=SHAPE)
        saved.append(run(tmp_path, [envs], 3, str(scale), lr=(1e-4,), adam_eps=1e-3)[1]["agent"])
    for name in saved[0]:
        if not name.startswith("returns"):
            torch.testing.assert_close(saved[0][name], saved[1][name], rtol=0.05, atol=2e-4, msg=name)


@pytest.mark.parametrize("sync", [True, False])
def test_learns_the_rewarded_action(tmp_path, sync):
    """On the fake env that pays for the action a frame tells: chance is 0.25, one action for two of four signs 0.5.

    How far an asynchronous run gets depends on how the machine shares its cores: the best 20 iterations count.
    """
    envs = [FakeVecEnv([[([0.0] * 8, "terminated")]] * 4, NEXT_STEP, shape=SHAPE, learn=True) for _ in range(2)]
    options = dict(num_envs=8, num_groups=2, num_steps=32, minibatch_size=128, num_minibatches=2, update_epochs=2)
    options |= dict(lr=(1e-3,), anneal_lr=False, gamma=0.5, ent_coef=(0.02,), sync=sync, num_batches_to_accumulate=1)
    run(tmp_path, envs, 80, **options)
    returns = [float(row["episode/return"]) for row in read(tmp_path / "run")]
    assert max(np.mean(returns[i : i + 20]) for i in range(0, 80, 20)) > 0.65 * 8


@pytest.mark.parametrize("vtrace", [False, True])
def test_statistics_are_updated_once_a_dataset(tmp_path, vtrace):
    """Frames: all rows but T + 1. Returns: the valid rows' targets, of the first epoch with V-trace."""
    envs = fake()
    metrics, saved = run(tmp_path, [envs], vtrace=vtrace, update_epochs=3)
    frames = np.concatenate(envs.seen[:16]).astype(float)
    sums = saved["agent"]["frames.sums"]
    np.testing.assert_allclose(sums[1], frames.sum(0))
    np.testing.assert_allclose(sums[2], 255**2 + (frames**2).sum(0))
    valid = sum((~before).sum() for *_, before in envs.log[:16])
    assert metrics["train/valid_frac"] == valid / 64 and saved["agent"]["returns.sums"][0] == 1 + valid


def test_learning_rate(tmp_path):
    """It falls to 0 at --total-timesteps, at a new one after a resume; --no-anneal-lr leaves --lr as it is."""
    args = Args(**(SMALL | dict(run_dir=str(tmp_path), run_name="run", total_timesteps=2 * 64, lr=(1e-3,))))
    train(args, [fake()])
    args.resume, args.total_timesteps = str(tmp_path / "run"), 8 * 64
    train(args, [fake()])
    rates = [float(row["train/lr"]) for row in read(tmp_path / "run")]
    np.testing.assert_allclose(rates, [1e-3, 5e-4] + [1e-3 * (1 - i / 8) for i in range(2, 8)], rtol=1e-5)
    run(tmp_path, [fake()], 3, "knots", lr=(0, 1e-3, 128, 2e-3), ent_coef=(0, 0, 128, 1), anneal_lr=False)
    rows = [(float(row["train/lr"]), float(row["train/ent_coef"])) for row in read(tmp_path / "knots")]
    np.testing.assert_allclose(rows, [(1e-3, 0), (1.5e-3, 0.5), (2e-3, 1)], rtol=1e-5)


BAD = [dict(num_groups=3), dict(minibatch_size=24), dict(num_groups=2, num_minibatches=3, minibatch_size=16)]


@pytest.mark.parametrize("changes", [*BAD, dict(num_minibatches=0), dict(num_batches_to_accumulate=-1)])
def test_bad_sizes(tmp_path, changes):
    """Groups that do not divide, parts of trajectories, parts of rollouts, and what would wait for ever."""
    with pytest.raises(UsageError, match="--num-groups|--minibatch-size|--num-minibatches|--num-batches"):
        run(tmp_path, None, **changes)
    assert not list(tmp_path.iterdir())


def test_environments_that_do_not_fit(tmp_path):
    same_step = FakeVecEnv(random_episodes(4), SAME_STEP, shape=SHAPE)
    for envs in ([same_step], [fake(3)], [fake(), fake()]):
        with pytest.raises(UsageError, match="--num-envs, --num-groups: need 1 groups of 4"):
            run(tmp_path, envs)


# --------------------------------------------------------------------------------------------------- one whole update


class Plain:
    """The network in float64, and its normalisers as sums of 1, x and x^2."""

    def __init__(self):
        torch.manual_seed(1)
        named = Agent(SHAPE, 4, Args()).named_parameters()
        self.w = {name: x.detach().double().requires_grad_() for name, x in named}
        self.frames = [torch.ones((), dtype=torch.float64), torch.zeros(SHAPE).double(), torch.ones(SHAPE).double()]
        self.returns = [1.0, 0.0, 1.0]

    def __call__(self, obs):
        """uint8 (B, ...) -> logits, normalised values."""
        n, total, squares = self.frames
        mean, w = total / n, self.w
        x = ((obs.double() / 255 - mean) / (squares / n - mean**2 + 1e-5).sqrt()).clamp(-5, 5)
        for i, stride in ((0, 4), (2, 2), (4, 1)):
            x = F.relu(F.conv2d(x, w[f"convs.{i}.weight"], w[f"convs.{i}.bias"], stride))
        x = F.relu(F.linear(x.permute(0, 2, 3, 1).flatten(1), w["hidden.weight"], w["hidden.bias"]))
        return F.linear(x, w["policy.weight"], w["policy.bias"]), F.linear(x, w["value.weight"], w["value.bias"])[:, 0]

    def moments(self):
        n, total, squares = self.returns
        return total / n, np.sqrt(squares / n - (total / n) ** 2 + 1e-5)

    def in_rewards(self, value):
        mean, std = self.moments()
        return value.detach().numpy().clip(-5, 5) * std + mean

    def normalized(self, x):
        mean, std = self.moments()
        return ((torch.tensor(x) - mean) / std).clamp(-5, 5)

    def add_returns(self, x):
        self.returns = [self.returns[0] + len(x), self.returns[1] + x.sum(), self.returns[2] + np.square(x).sum()]

    def add_frames(self, x):
        x = x.double() / 255
        self.frames = [self.frames[0] + len(x), self.frames[1] + x.sum(0), self.frames[2] + x.square().sum(0)]


@pytest.mark.parametrize("vtrace", [False, True])
def test_two_iterations_match_plain_float64(tmp_path, vtrace):
    """Rollout, statistics, targets, losses, Adam, from frames and actions alone, with dummy rows and all ends."""
    envs = fake(cls=Noise, dummy_reward=7.0)
    args = dict(vtrace=vtrace, update_epochs=2, adam_eps=1e-3, ent_coef=(0.01,), vf_clip=0.05, lr=(1e-3,))
    metrics, saved = run(tmp_path, [envs], 2, **args)
    plain, gamma = Plain(), 0.99
    adam = torch.optim.Adam(plain.w.values(), eps=1e-3)
    for first in (0, 16):
        seen = torch.from_numpy(np.stack(envs.seen[first : first + 17]))  # (T + 1, N, ...)
        action = torch.from_numpy(np.stack(envs.actions[first : first + 16])).long()
        reward, ended, cut, dummy = (np.stack(x) for x in zip(*envs.log[first : first + 16], strict=True))
        logits, predicted = (x.detach() for x in plain(seen[:16].flatten(0, 1)))
        logp = logits.log_softmax(-1).gather(-1, action.view(-1, 1)).view(16, 4)
        predicted = predicted.view(16, 4)
        plain.add_frames(seen[:16].flatten(0, 1))
        value = np.concatenate([plain.in_rewards(predicted), plain.in_rewards(plain(seen[16])[1])[None]])
        advantage, target = np.zeros((2, 16, 4))
        for n in range(4):
            rows = (reward[:, n], value[:, n], ended[:, n], cut[:, n])
            advantage[:, n], target[:, n] = plain_targets(*rows, gamma, 0.95)
        explained = 1 - advantage[~dummy].var(ddof=1) / target[~dummy].var(ddof=1)  # of GAE's targets, V-trace or not
        if not vtrace:
            plain.add_returns(target[~dummy])
        losses = []
        for epoch in range(2):
            goals = []
            for some in (slice(0, 2), slice(2, 4)):
                if vtrace:
                    new_logits, now = plain(seen[:, some].flatten(0, 1))
                    new_logp = new_logits[:32].detach().log_softmax(-1).gather(-1, action[:, some].reshape(-1, 1))
                    rho = (new_logp.view(16, 2) - logp[:, some]).exp().clamp(0.05, 20).numpy()
                    now = plain.in_rewards(now).reshape(17, 2)
                    for i, n in enumerate(range(some.start, some.stop)):
                        rows = (reward[:, n], now[:, i], ended[:, n], cut[:, n])
                        advantage[:, n], target[:, n] = plain_targets(*rows, gamma, None, rho[:, i])
                    goals.append(target[:, some][~dummy[:, some]])
                kept = torch.from_numpy(~dummy[:, some])
                new_logits, new_value = plain(seen[:16, some].flatten(0, 1))
                new = new_logits.log_softmax(-1).view(16, 2, 4)[kept]
                ratio = (new.gather(-1, action[:, some][kept][:, None])[:, 0] - logp[:, some][kept]).exp()
                better = torch.tensor(advantage[:, some])[kept]
                better = (better - better.mean()) / better.std(correction=0)
                approx_kl, ratio = (ratio - 1 - ratio.log()).mean(), ratio.clamp(0.05, 20)
                outside = ((ratio < 1 / 1.1) | (ratio > 1.1)).double().mean()
                surrogate = torch.min(ratio * better, ratio.clamp(1 / 1.1, 1.1) * better).mean()
                old, goal = predicted[:, some][kept], plain.normalized(target[:, some])[kept]
                new_value = new_value.view(16, 2)[kept]
                near = old + (new_value - old).clamp(-0.05, 0.05)
                value_loss = torch.max((new_value - goal) ** 2, (near - goal) ** 2).mean()
                entropy = -(new.exp() * new).sum(-1).mean()
                adam.zero_grad()
                (-surrogate + 0.5 * value_loss - 0.01 * entropy).backward()
                adam.param_groups[0]["lr"] = 1e-3 * (1 - first / 32)
                adam.step()
                norm = sum(x.grad.square().sum() for x in plain.w.values()) ** 0.5
                losses.append([x.item() for x in (-surrogate, value_loss, entropy, approx_kl, outside, norm)])
            if vtrace and epoch == 0:
                plain.add_returns(np.concatenate(goals))
    names = "loss/policy loss/value loss/entropy train/approx_kl train/clip_frac train/grad_norm".split()
    np.testing.assert_allclose([metrics[name] for name in names], np.mean(losses, 0), rtol=1e-4, atol=1e-5)
    assert metrics["train/explained_variance"] == pytest.approx(explained, rel=1e-3, abs=1e-4)
    assert metrics["train/valid_frac"] == pytest.approx(1 - dummy.mean())
    assert metrics["train/lr"] == pytest.approx(0.5e-3)
    moments = [metrics["train/return_mean"], metrics["train/return_std"]]
    np.testing.assert_allclose(moments, plain.moments(), rtol=1e-4)
    np.testing.assert_allclose(saved["agent"]["returns.sums"], plain.returns, rtol=1e-5)
    for name, x in plain.w.items():
        torch.testing.assert_close(saved["agent"][name].double(), x.detach(), rtol=1e-3, atol=2e-6, msg=name)
