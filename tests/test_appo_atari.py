"""The algorithm of appo_atari.py against independent oracles; its threads are tested in test_actors.py."""

import csv
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import NEXT_STEP, SAME_STEP, FakeVecEnv, random_episodes

import appo_atari
from appo_atari import Args, ppo_terms, train, vtrace

SHAPE, SMALL = (4, 44, 44), dict(num_envs=4, num_groups=1, num_steps=16, minibatch_size=32, num_minibatches=2)
SMALL |= dict(update_epochs=1, eval_episodes=0, quiet=True, torch_threads=1, device="cpu")


def run(tmp_path, envs, iterations=1, name="run", **changes):
    args = Args(**(SMALL | dict(run_dir=str(tmp_path), run_name=name) | changes))
    args.total_timesteps = iterations * args.batch_size
    metrics = train(args, envs)
    return metrics, torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)


def fake(autoreset=NEXT_STEP, ends=("terminated", "truncated", "life"), num_envs=4, cls=FakeVecEnv, **options):
    return cls(random_episodes(num_envs, ends=ends), autoreset, shape=SHAPE, **options)


def read(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def same(a, b):
    return all(torch.equal(a["agent"][name], b["agent"][name]) for name in a["agent"])


def test_defaults_match_reference_table():
    """The card's setting, as far as it can run."""
    expected = dict(num_envs=32, num_steps=128, minibatch_size=1024, num_minibatches=8, update_epochs=4, gamma=0.99)
    expected |= dict(gae_lambda=0.95, clip=0.1, vf_clip=1, vf_coef=0.5, ent_coef=0.000468, lr=("3.03e-4",))
    expected |= dict(lr_schedule="linear", adam_eps=1e-5, max_grad_norm=0, num_batches_to_accumulate=2)
    expected |= dict(max_policy_lag=1000, vtrace=False, normalize_obs=True, normalize_returns=True, noop_max=30)
    expected |= dict(episodic_life=True, fire_reset=True, repeat_action_probability=0, frame_skip=4, stack=4)
    assert {name: getattr(Args(), name) for name in expected} == expected


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rho_bar, c_bar, lam", [(1, 1, 1), (2, 0.7, 1), (1, 1, 0.9)])
def test_vtrace_oracle(seed, rho_bar, c_bar, lam):
    """The definition's double sum (Espeholt et al. 2018, eq. 1) over each game, in float64."""
    rng, gamma = np.random.default_rng(seed), 0.95
    T, N = 30, 3
    reward, value, rho = rng.normal(size=(T, N)), rng.normal(size=(T + 1, N)), rng.exponential(size=(T, N))
    terminated, truncated = rng.random((2, T, N)) < 0.1
    done, vs, advantage = terminated | truncated, np.zeros((T, N)), np.zeros((T, N))
    limited, c = np.minimum(rho, rho_bar), lam * np.minimum(rho, c_bar)
    for n in range(N):
        for t in range(T):
            total, weight = value[t, n], 1.0
            for k in range(t, T):
                following = 0.0 if terminated[k, n] else value[k + 1, n]
                total += weight * limited[k, n] * (reward[k, n] + gamma * following - value[k, n])
                weight *= gamma * c[k, n]
                if done[k, n]:
                    break
            vs[t, n] = total
        for t in range(T):
            last = t == T - 1 or done[t, n]
            following = 0.0 if terminated[t, n] else value[t + 1, n] if last else vs[t + 1, n]
            advantage[t, n] = limited[t, n] * (reward[t, n] + gamma * following - value[t, n])
    tensors = [torch.tensor(np.asarray(x), dtype=torch.float64) for x in (reward, value, terminated, done, rho)]
    got = vtrace(*tensors, gamma, rho_bar, c_bar, lam)
    np.testing.assert_allclose(got[0], vs, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(got[1], advantage, rtol=1e-12, atol=1e-12)


def test_vtrace_on_policy_is_the_n_step_return_and_off_policy_the_value():
    rng = np.random.default_rng(0)
    reward, value = torch.tensor(rng.normal(size=(5, 1))), torch.tensor(rng.normal(size=(6, 1)))
    zeros, ones = torch.zeros(5, 1), torch.ones(5, 1)
    vs, _ = vtrace(reward, value, zeros, zeros, ones, 0.9)
    expected = sum(0.9**k * reward[k, 0] for k in range(5)) + 0.9**5 * value[5, 0]
    assert vs[0, 0].item() == pytest.approx(expected.item())
    assert torch.equal(vtrace(reward, value, zeros, zeros, zeros, 0.9)[0], value[:5])


def test_last_step_reward_matters():
    """Sample Factory's V-trace loses the last reward; here it changes the last advantage by rho."""
    zeros, value, rho = torch.zeros(3, 1), torch.ones(4, 1), torch.full((3, 1), 0.6)
    reward = torch.zeros(3, 1)
    before = vtrace(reward, value, zeros, zeros, rho, 0.9)[1]
    reward[-1] = 2
    assert (vtrace(reward, value, zeros, zeros, rho, 0.9)[1] - before)[-1].item() == pytest.approx(1.2)


def test_ppo_clip_interval_by_hand():
    """[1 / 1.1, 1.1], not [0.9, 1.1]; the ratio never leaves [0.05, 20]; the worse value error counts."""
    cases = [(1.05, 2, 1.05 * 2), (1.5, 2, 1.1 * 2), (0.5, -2, -2 / 1.1), (0.905, -2, -2 / 1.1)]
    for ratio, advantage, surrogate in [*cases, (50, -1, -20), (1e-4, 1, 0.05)]:
        p = 0.3
        logits = torch.tensor([[np.log(p), np.log(1 - p)]], dtype=torch.float64)
        row = (torch.tensor([0]), torch.tensor([float(advantage)]), torch.tensor([3.0]))
        old = (torch.tensor([np.log(p / ratio)]), torch.tensor([0.0]))
        policy, value, _, _, clipped = ppo_terms(logits, torch.tensor([2.0]), *row, *old, 0.1, 1.0)
        assert policy.item() == pytest.approx(-surrogate, rel=1e-6)
        assert value.item() == pytest.approx(max((2 - 3) ** 2, (1 - 3) ** 2))
        assert bool(clipped) == (not 1 / 1.1 <= ratio <= 1.1)


def test_bandit_credit(tmp_path, monkeypatch):
    """With gamma 0 every advantage is r(a_t) - V(o_t): nothing is shifted by one."""
    calls, gae = [], appo_atari.gae
    monkeypatch.setattr(appo_atari, "gae", lambda *x: calls.append((x, gae(*x))) or calls[-1][1])
    envs = fake(learn=True)
    run(tmp_path, [envs], gamma=0.0, sync=True)
    (reward, value, *_), advantage = calls[0]
    assert torch.equal(advantage, reward - value[:-1])
    for t, (paid, _, _, before) in enumerate(envs.log):
        right = envs.actions[t] == envs.seen[t][:, 0, 0, 3]  # the frame that was shown tells the rewarded action
        assert np.array_equal(reward[t].numpy(), paid) and np.array_equal(paid == 1, right & ~before)


def test_old_rows_are_masked(tmp_path, monkeypatch):
    """Rows five SGD steps old count with --max-policy-lag 5; with 4 none does, and no weight moves."""
    act = appo_atari.Published.act
    monkeypatch.setattr(appo_atari.Published, "act", lambda self, obs: (*act(self, obs)[:2], self.version - 5))
    saved = []
    for limit in (5, 4):
        metrics, end = run(tmp_path, [fake()], 1, str(limit), max_policy_lag=limit, sync=True, lr_schedule="constant")
        assert (metrics["train/valid_frac"] > 0) == (limit == 5) and metrics["async/policy_lag_max"] == 5
        saved.append(end["agent"]["policy.weight"])
    torch.manual_seed(1)
    start = appo_atari.Agent(SHAPE, 4, Args()).state_dict()["policy.weight"]
    assert torch.equal(saved[1], start) and not torch.equal(saved[0], start)


def test_wasted_rows_have_zero_gradient(tmp_path):
    saved = []
    for dummy_reward in (0.0, -1e6):
        saved.append(run(tmp_path, [fake(dummy_reward=dummy_reward)], 3, str(dummy_reward), sync=True)[1])
    assert same(*saved)


def test_scaling_all_rewards_changes_little(tmp_path):
    """Learning with normalised returns does not depend on the unit of rewards; nor do the critic's outputs."""
    saved = []
    for scale in (1.0, 64.0):
        episodes = random_episodes(4, ends=("terminated",))
        episodes = [[(rewards * np.float32(scale), end) for rewards, end in env] for env in episodes]
        envs = FakeVecEnv(episodes, SAME_STEP, shape=SHAPE)
        saved.append(run(tmp_path, [envs], 3, str(scale), sync=True, lr=("1e-4",), adam_eps=1e-3)[1]["agent"])
    for name in saved[0]:
        if not name.startswith("return_moments"):
            torch.testing.assert_close(saved[0][name], saved[1][name], rtol=0.05, atol=2e-4, msg=name)


@pytest.mark.parametrize("sync", [True, False])
def test_learns_the_rewarded_action(tmp_path, sync):
    """On the fake env that pays for the action a frame tells: chance is 0.25, one action for two of four signs 0.5.

    How far an asynchronous run gets depends on how the machine shares its cores: the best 20 iterations count, against
    a bar well under what was seen (6.0, and 6.5 to 7.7).
    """
    envs = [FakeVecEnv([[([0.0] * 8, "terminated")]] * 4, NEXT_STEP, shape=SHAPE, learn=True) for _ in range(2)]
    options = dict(num_envs=8, num_groups=2, num_steps=32, minibatch_size=128, num_minibatches=2, update_epochs=2)
    options |= dict(lr=("5e-4",), lr_schedule="constant", gamma=0.5, ent_coef=0.02, sync=sync)
    run(tmp_path, envs, 160, **options)
    returns = [float(row["episode/return"]) for row in read(tmp_path / "run")]
    assert max(np.mean(returns[i : i + 20]) for i in range(0, 160, 20)) > 0.65 * 8


def test_the_bootstrap_is_of_the_last_observation(tmp_path, monkeypatch):
    """Row T of the values is V(obs_T): a critic that reads a frame's step number shows which frame each value is of."""
    calls, gae, forward = [], appo_atari.gae, appo_atari.Agent.forward

    def reads_steps(self, obs):
        logits, value = forward(self, obs)
        return logits, 0 * value + obs[:, 0, 0, 2].float() + 1

    monkeypatch.setattr(appo_atari.Agent, "forward", reads_steps)
    monkeypatch.setattr(appo_atari, "gae", lambda *x: calls.append(x) or gae(*x))
    envs = fake()
    run(tmp_path, [envs], sync=True, normalize_returns=False)
    assert np.array_equal(calls[0][1].numpy(), np.stack(envs.seen[:17])[:, :, 0, 0, 2] + 1.0)


@pytest.mark.parametrize("vtrace", [False, True])
def test_statistics_are_updated_once_a_dataset(tmp_path, vtrace):
    """Observations: all rows, in units of 255. Returns: the valid rows' targets, of the first epoch with V-trace."""
    envs = fake()
    metrics, saved = run(tmp_path, [envs], sync=True, vtrace=vtrace, update_epochs=3)
    frames = np.concatenate(envs.seen[:16]).astype(float) / 255
    sums = saved["agent"]["obs_moments.sums"]
    np.testing.assert_allclose(sums[1], frames.sum(0), rtol=1e-5)
    np.testing.assert_allclose(sums[2], 1 + (frames**2).sum(0), rtol=1e-5)
    valid = sum((~before).sum() for *_, before in envs.log[:16])
    assert metrics["train/valid_frac"] == valid / 64 and saved["agent"]["return_moments.sums"][0] == 1 + valid


# ---------------------------------------------------------------------------------------------------- one whole update


def plain_agent(w, obs, stats):
    """The network in float64: uint8 (B, ...) -> logits, normalised values."""
    n, total, squares = stats
    mean = total / n
    x = ((obs.double() / 255 - mean) / (squares / n - mean**2).clamp(min=1e-12).sqrt()).clamp(-5, 5)
    for i, stride in ((0, 4), (2, 2), (4, 1)):
        x = F.relu(F.conv2d(x, w[f"trunk.{i}.weight"], w[f"trunk.{i}.bias"], stride))
    x = F.relu(F.linear(x.permute(0, 2, 3, 1).flatten(1), w["hidden.weight"], w["hidden.bias"]))
    return F.linear(x, w["policy.weight"], w["policy.bias"]), F.linear(x, w["value.weight"], w["value.bias"])[:, 0]


def plain_targets(reward, value, ended, cut, gamma, lam, rho=None):
    """Advantages and targets of one trajectory by the definitions' sums over each game; rho: V-trace, else GAE."""
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


@pytest.mark.parametrize("vtrace", [False, True])
def test_two_iterations_match_plain_float64(tmp_path, vtrace):
    """Rollout, statistics, targets, losses, Adam, from frames and actions alone, with dummy rows and all ends."""
    envs = fake(dummy_reward=7.0)
    args = dict(vtrace=vtrace, update_epochs=2, sync=True, adam_eps=1e-3, ent_coef=0.01, vf_clip=0.05, lr=("1e-3",))
    metrics, saved = run(tmp_path, [envs], 2, **args)
    torch.manual_seed(1)
    w = {name: x.detach().double() for name, x in appo_atari.Agent(SHAPE, 4, Args()).named_parameters()}
    for x in w.values():
        x.requires_grad_()
    adam = torch.optim.Adam(w.values(), eps=1e-3)
    frames = [torch.ones((), dtype=torch.float64), torch.zeros(SHAPE).double(), torch.ones(SHAPE).double()]
    returns, gamma = np.array([1.0, 0.0, 1.0]), 0.99
    acting = [torch.clone(x) for x in frames]

    def in_rewards(value):
        mean = returns[1] / returns[0]
        return value.detach().numpy().clip(-5, 5) * np.sqrt(returns[2] / returns[0] - mean**2) + mean

    def standard(x):
        mean = returns[1] / returns[0]
        return ((torch.tensor(x) - mean) / np.sqrt(returns[2] / returns[0] - mean**2)).clamp(-5, 5)

    def add_returns(x):
        returns[:] += len(x), np.sum(x), np.sum(np.square(x))

    for first in (0, 16):
        seen = torch.from_numpy(np.stack(envs.seen[first : first + 17]))  # (T + 1, N, ...)
        action = torch.from_numpy(np.stack(envs.actions[first : first + 16])).long()
        reward, ended, cut, dummy = (np.stack(x) for x in zip(*envs.log[first : first + 16], strict=True))
        logits, value = plain_agent(w, seen[:16].flatten(0, 1), acting)
        logp = logits.detach().log_softmax(-1).gather(-1, action.view(-1, 1)).view(16, 4)
        value = in_rewards(value).reshape(16, 4)
        frames[0] += 64
        frames[1] += (seen[:16].double() / 255).sum((0, 1))
        frames[2] += (seen[:16].double() / 255).square().sum((0, 1))
        value = np.concatenate([value, in_rewards(plain_agent(w, seen[16], frames)[1])[None]])
        advantage, target = np.zeros((2, 16, 4))
        for n in range(4):
            rows = (reward[:, n], value[:, n], ended[:, n], cut[:, n])
            advantage[:, n], target[:, n] = plain_targets(*rows, gamma, 0.95)
        explained = 1 - advantage[~dummy].var(ddof=1) / target[~dummy].var(ddof=1)  # of GAE's targets, V-trace or not
        if not vtrace:
            add_returns(target[~dummy])
        losses = []
        for epoch in range(2):
            goals = []
            for some in (slice(0, 2), slice(2, 4)):
                if vtrace:
                    new_logits, now = plain_agent(w, seen[:, some].flatten(0, 1), frames)
                    new_logp = new_logits[:32].detach().log_softmax(-1).gather(-1, action[:, some].reshape(-1, 1))
                    rho = (new_logp.view(16, 2) - logp[:, some]).exp().numpy()
                    now = in_rewards(now).reshape(17, 2)
                    for i, n in enumerate(range(some.start, some.stop)):
                        rows = (reward[:, n], now[:, i], ended[:, n], cut[:, n])
                        advantage[:, n], target[:, n] = plain_targets(*rows, gamma, None, rho[:, i])
                    goals.append(target[:, some][~dummy[:, some]])
                kept = torch.from_numpy(~dummy[:, some])
                new_logits, new_value = plain_agent(w, seen[:16, some].flatten(0, 1), frames)
                new = new_logits.log_softmax(-1).view(16, 2, 4)[kept]
                ratio = (new.gather(-1, action[:, some][kept][:, None])[:, 0] - logp[:, some][kept]).exp()
                better = torch.tensor(advantage[:, some])[kept]
                better = (better - better.mean()) / better.std(correction=0)
                approx_kl, ratio = (ratio - 1 - ratio.log()).mean(), ratio.clamp(0.05, 20)
                outside = ((ratio < 1 / 1.1) | (ratio > 1.1)).double().mean()
                surrogate = torch.min(ratio * better, ratio.clamp(1 / 1.1, 1.1) * better).mean()
                old, goal = standard(value[:16, some])[kept], standard(target[:, some])[kept]
                new_value = new_value.view(16, 2)[kept]
                near = old + (new_value - old).clamp(-0.05, 0.05)
                value_loss = torch.max((new_value - goal) ** 2, (near - goal) ** 2).mean()
                entropy = -(new.exp() * new).sum(-1).mean()
                adam.zero_grad()
                (-surrogate + 0.5 * value_loss - 0.01 * entropy).backward()
                adam.param_groups[0]["lr"] = 1e-3 * (1 - first / 32)
                adam.step()
                norm = sum(x.grad.square().sum() for x in w.values()) ** 0.5
                losses.append([x.item() for x in (-surrogate, value_loss, entropy, approx_kl, outside, norm)])
            if vtrace and epoch == 0:
                add_returns(np.concatenate(goals))
        acting = [torch.clone(x) for x in frames]
    got = [metrics[name] for name in (*appo_atari.TERMS, "train/grad_norm")]
    np.testing.assert_allclose(got, np.mean(losses, 0), rtol=1e-4, atol=1e-5)
    assert metrics["train/explained_variance"] == pytest.approx(explained, rel=1e-3, abs=1e-4)
    assert metrics["train/valid_frac"] == pytest.approx(1 - dummy.mean())
    assert metrics["train/lr"] == pytest.approx(0.5e-3)
    mean = returns[1] / returns[0]
    assert metrics["train/return_mean"] == pytest.approx(mean, rel=1e-4)
    assert metrics["train/return_std"] == pytest.approx(np.sqrt(returns[2] / returns[0] - mean**2), rel=1e-4)
    np.testing.assert_allclose(saved["agent"]["return_moments.sums"], returns, rtol=1e-5)
    for name, x in w.items():
        torch.testing.assert_close(saved["agent"][name].double(), x.detach(), rtol=1e-3, atol=2e-6, msg=name)


# -------------------------------------------------------------------------------------------- what a run has and writes


def test_milestones(tmp_path):
    """Checkpoints that are kept, the first at the first iteration that starts past each multiple."""
    run(tmp_path, [fake()], 6, sync=True, milestone_every=100)
    kept = sorted(int(path.stem.split("_")[1]) for path in (tmp_path / "run").glob("milestone_*.pt"))
    assert kept == [128, 256, 320]
    for step in kept:
        assert torch.load(tmp_path / "run" / f"milestone_{step}.pt", weights_only=True)["step"] == step


def test_energy(tmp_path, monkeypatch):
    """Joules of all packages between two iterations; a counter that wrapped around, or none, reports nothing."""
    monkeypatch.setattr(appo_atari, "POWERCAP", tmp_path)
    metrics, _ = run(tmp_path, [fake()], name="none", sync=True)
    assert "time/energy_j" not in metrics
    for i, microjoules in enumerate((5_000_000, 7_000_000)):
        (tmp_path / f"intel-rapl:{i}").mkdir()
        (tmp_path / f"intel-rapl:{i}" / "energy_uj").write_text(str(microjoules))
    rollout, counters = appo_atari.Group.rollout, ["7000000", "9500000", "1000000"]

    def spend(self, *rest):
        (tmp_path / "intel-rapl:1" / "energy_uj").write_text(counters.pop(0))
        return rollout(self, *rest)

    monkeypatch.setattr(appo_atari.Group, "rollout", spend)
    run(tmp_path, [fake()], 3, name="some", sync=True)
    joules = [(row["time/energy_j"], row["time/j_per_mframes"]) for row in read(tmp_path / "some")]
    assert joules == [("0", "0"), ("2.5", f"{2.5e6 / 64 / 4:.6g}"), ("", "")]


def test_a_new_total_recomputes_the_linear_schedule(tmp_path, capsys):
    """From the resumed step on the rate falls to zero at the new end, and the run says so."""
    args = Args(**(SMALL | dict(run_dir=str(tmp_path), run_name="run", total_timesteps=2 * 64, sync=True)))
    train(args, [fake()])
    again = dataclasses.replace(args, resume=str(tmp_path / "run"), total_timesteps=8 * 64, quiet=False)
    train(again, [fake()])
    assert "falls to 0 at step 512" in capsys.readouterr().out
    rates = [float(row["train/lr"]) for row in read(tmp_path / "run")]
    expected = [1, 1 / 2] + [1 - i / 8 for i in range(2, 8)]
    np.testing.assert_allclose(rates, 3.03e-4 * np.array(expected), rtol=1e-5)


@pytest.mark.parametrize("kl, factor", [(0.02, 1 / 1.5), (0.008, 1.0), (0.001, 1.5)])
def test_kl_schedule(tmp_path, monkeypatch, kl, factor):
    """Sample Factory's kl_adaptive_epoch: the rate moves by 1.5 when an epoch's KL leaves [target / 2, 2 target], and
    stays within [1e-6, 1e-2]; a resumed run goes on with it."""
    terms = appo_atari.ppo_terms

    def with_kl(*rest):
        rows = terms(*rest).clone()
        rows[3] = kl
        return rows

    monkeypatch.setattr(appo_atari, "ppo_terms", with_kl)
    options = dict(sync=True, lr_schedule="kl", update_epochs=2, lr=("1e-3",))
    run(tmp_path, [fake()], 8, **options)
    args = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["args"]
    train(dataclasses.replace(Args(**args), resume=str(tmp_path / "run"), total_timesteps=10 * 64), [fake()])
    rates = [float(row["train/lr"]) for row in read(tmp_path / "run")]
    np.testing.assert_allclose(rates, np.clip(1e-3 * factor ** np.arange(0, 20, 2), 1e-6, 1e-2), rtol=1e-5)


@pytest.mark.parametrize("vtrace", [False, True])
def test_bf16_stays_close(tmp_path, vtrace):
    losses = []
    for precision in ("fp32", "bf16"):
        metrics, _ = run(tmp_path, [fake()], 1, precision, sync=True, precision=precision, vtrace=vtrace)
        losses.append([metrics[name] for name in ("loss/policy", "loss/value", "loss/entropy")])
    np.testing.assert_allclose(*losses, rtol=0.05, atol=0.02)
