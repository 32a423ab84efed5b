"""The algorithm of appo_atari.py against independent oracles, and its threads against the one-threaded run."""

import csv
import threading
import time

import numpy as np
import pytest
import torch
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


@pytest.mark.parametrize("vtrace", [False, True])
def test_zero_lag_equals_sync(tmp_path, vtrace):
    """One group whose actor waits for the learner: the asynchronous run is the one-threaded one, bit for bit."""
    saved = []
    for name, changes in (("sync", dict(sync=True)), ("async", dict(num_batches_to_accumulate=0))):
        saved.append(run(tmp_path, [fake()], 3, name, vtrace=vtrace, update_epochs=2, **changes)[1])
    assert same(*saved) and saved[0]["version"] == saved[1]["version"] == 12
    first, second = (read(tmp_path / name) for name in ("sync", "async"))
    assert [{name: row[name] for name in row if "time/" not in name} for row in first] == [
        {name: row[name] for name in row if "time/" not in name} for row in second
    ]


def test_lag_bound(tmp_path, monkeypatch):
    """However slow the learner, no row is older than (queue + 2) datasets of SGD steps; and there is some lag."""
    lags, log = [], appo_atari.Run.log

    def slow(self, step, metrics):
        lags.append(metrics["async/policy_lag_max"])
        time.sleep(0.02)
        return log(self, step, metrics)

    monkeypatch.setattr(appo_atari.Run, "log", slow)
    run(tmp_path, [fake(num_envs=2), fake(num_envs=2)], 40, num_groups=2, num_batches_to_accumulate=1, update_epochs=2)
    assert 0 < max(lags) <= 3 * 4 and len(lags) == 40


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


def actors():
    return [thread for thread in threading.enumerate() if thread.name == "actor"]


def wait_for(condition, seconds=10):
    end = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < end
        time.sleep(0.05)


def test_actor_exception_propagates(tmp_path):
    class Broken(FakeVecEnv):
        def step(self, actions):
            if len(self.actions) == 20:
                raise ValueError("the emulator is gone")
            return super().step(actions)

    start = time.perf_counter()
    with pytest.raises(ValueError, match="the emulator is gone"):
        run(tmp_path, [fake(cls=Broken)], 10)
    assert time.perf_counter() - start < 10
    wait_for(lambda: not actors())


def test_interrupt_leaves_no_actor(tmp_path, monkeypatch):
    log = appo_atari.Run.log

    def interrupted(self, step, metrics):
        if step == 3 * 64:
            raise KeyboardInterrupt
        return log(self, step, metrics)

    monkeypatch.setattr(appo_atari.Run, "log", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [fake(num_envs=2), fake(num_envs=2)], 10, num_groups=2)
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["step"] == 2 * 64
    wait_for(lambda: not actors())


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
