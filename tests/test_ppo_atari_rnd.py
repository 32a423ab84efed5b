"""The algorithm of ppo_atari_rnd.py against independent oracles, its environments against hand-kept books."""

import gymnasium as gym
import numpy as np
import ppo_atari_rnd
import pytest
import torch
import torch.nn.functional as F
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from ppo_atari_rnd import RND, Agent, Args, AtariEnvs, RunningMoments, UsageError, load, make_envs, stream_seed, train

import conftest
from conftest import (
    Games,
    RareDoor,
    plain_deviation,
    plain_gae,
    plain_standardised,
    random_episodes,
    random_play,
    spy_on,
)

SHAPE, WARMUP, T, N = (4, 44, 44), 3, 8, 4
SMALL = dict(num_envs=N, num_steps=T, minibatch_size=16, update_epochs=1, warmup_steps=WARMUP, rnd_features=8)
SMALL |= dict(eval_episodes=0, threads=1, device="cpu")
run = conftest.runner(ppo_atari_rnd, SMALL)


class Unreported(gym.vector.VectorWrapper):
    """Without the reports of a fake's episodes."""

    def step(self, actions):
        obs, reward, ended, cut, info = super().step(actions)
        return obs, reward, ended, cut, {name: info[name] for name in info if "episode" not in name}


def fake(num_envs=N, ends=("terminated", "truncated", "life"), **options):
    return Games(random_episodes(num_envs, ends=ends), shape=SHAPE, **options)


# ------------------------------------------------------------------------------------------------------------- maths


def test_defaults_match_reference_table():
    """OpenAI's published setting."""
    expected = dict(num_envs=128, num_steps=128, minibatch_size=4096, update_epochs=4, gamma=0.999, gamma_int=0.99)
    expected |= dict(gae_lambda=0.95, clip=0.1, vf_coef=1, ent_coef=(0, 0.001), ext_coef=2, int_coef=1, lr=(0, 1e-4))
    expected |= dict(repeat_action_probability=0.25, noop_max=1, fire_reset=False, stack=4, bonus_after=0)
    expected |= dict(adam_eps=1e-8, max_grad_norm=0, max_episode_steps=4500, frame_size=84, predictor_share=0)
    expected |= dict(rnd_features=512, warmup_steps=6400, env_id="MontezumaRevenge")
    expected |= dict(total_timesteps=30_000 * 128 * 128)
    assert {name: getattr(Args(), name) for name in expected} == expected


def test_network_sizes_and_initial_weights():
    """Layer by layer as in the authors' cnn_policy_param_matched.py and cnn_gru_policy_dynamics.py."""
    agent = Agent((4, 84, 84), 18, Args())
    rnd = RND((1, 84, 84), Args())
    trunk = 4 * 64 * 32 + 32 + 32 * 16 * 64 + 64 + 64 * 16 * 64 + 64 + 6 * 6 * 64 * 256 + 256
    assert conftest.num_weights(agent) == trunk + 256 * 448 + 448 + 2 * (448 * 448 + 448) + 449 * 20
    target = 64 * 32 + 32 + 32 * 16 * 64 + 64 + 64 * 9 * 64 + 64 + 3136 * 512 + 512
    assert conftest.num_weights(rnd.target) == target
    assert conftest.num_weights(rnd.predictor) == target + 2 * (512 * 512 + 512)
    assert not any(weight.requires_grad for weight in rnd.target.parameters())
    conftest.assert_initial(agent, dict(residual_value=0.1, residual_policy=0.1, policy=0.01, value=0.01))
    conftest.assert_initial(rnd, {})


def plain_convolutions(w, name, x):
    for i, stride in ((0, 4), (2, 2), (4, 1)):
        x = F.conv2d(x, w[f"{name}.{i}.weight"], w[f"{name}.{i}.bias"], stride)
        x = F.relu(x) if name == "trunk" else F.leaky_relu(x, 0.2)
    return x.flatten(1)


def plain_linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def plain_agent(w, obs, memory, before):
    """(L, B, C, S, S) -> logits and values, (L, B, ...), memory (B, 256); after a row where `before` it begins anew."""
    x = plain_convolutions(w, "trunk", obs.flatten(0, 1).double() / 255)
    x = F.relu(plain_linear(w, "hidden1", x))
    if "hidden2.weight" in w:
        x = F.relu(plain_linear(w, "hidden2", x)).view(*obs.shape[:2], -1)
    else:
        states = []
        for row, over in zip(x.view(*obs.shape[:2], -1), before, strict=True):
            inputs = (row @ w["hidden2.weight_ih"].T + w["hidden2.bias_ih"]).chunk(3, 1)
            hidden = (memory @ w["hidden2.weight_hh"].T + w["hidden2.bias_hh"]).chunk(3, 1)
            reset, update = (inputs[0] + hidden[0]).sigmoid(), (inputs[1] + hidden[1]).sigmoid()
            states.append((1 - update) * (inputs[2] + reset * hidden[2]).tanh() + update * memory)
            memory = states[-1] * ~over[:, None]
        x = torch.stack(states)
    policy = x + F.relu(plain_linear(w, "residual_policy", x))
    value = x + F.relu(plain_linear(w, "residual_value", x))
    return plain_linear(w, "policy", policy), plain_linear(w, "value", value), memory


def plain_rnd(w, net, x):
    x = plain_linear(w, f"{net}.7", plain_convolutions(w, net, x))
    for i in (9, 11) if net == "predictor" else ():
        x = plain_linear(w, f"{net}.{i}", F.relu(x))
    return x


def test_a_pixel_that_never_changes_has_a_small_deviation():
    """But not zero, however long it was seen; its mean is of all rows, also of more than are summed at once."""
    constant = RunningMoments((2,), 1e-4, 1, 1e-12)
    assert constant.mean.tolist() == [0, 0] and constant.std.tolist() == [1, 1]
    constant.update(torch.full((700, 2), 255, dtype=torch.uint8))
    assert constant.mean.tolist() == pytest.approx([255, 255])
    constant.sums += torch.tensor([1.0, 255.0, 255.0**2])[:, None].double() * 2e9
    constant.update(torch.full((1, 2), 255, dtype=torch.uint8))
    assert (constant.std > 0).all() and (constant.std < 1e-2).all()


def test_bonus_and_loss_have_one_precision():
    """Under bf16 both are differences of float32: in bf16 what is left of two near features would be noise."""
    rnd, seen = RND((1, 44, 44), Args(rnd_features=64, precision="bf16")), {}
    frames = torch.randint(0, 256, (32, 1, 44, 44), dtype=torch.uint8)
    frames[0, 0, 0, :2] = torch.tensor([255, 0])
    frames[1:, 0, 0, :2] = 100
    rnd.frames.update(frames)
    for name in ("predictor", "target"):
        note = lambda net, inputs, output, name=name: seen.update({name: (inputs[0], output)})  # noqa: E731
        getattr(rnd, name).register_forward_hook(note)
    with torch.no_grad():
        error = rnd.error(frames, rnd.features(frames))
    (x, prediction), (same, target) = seen["predictor"], seen["target"]
    assert torch.equal(x, same) and x.dtype == torch.float32
    assert x.max() == 5 and x.min() == -5  # of one that deviates by the root of 31
    assert prediction.dtype == torch.bfloat16 and error.dtype == torch.float32
    assert torch.equal(error, (prediction.float() - target.float()).square().mean(1))
    assert not torch.equal(error, (prediction - target).square().mean(1).float())


def normalizer(num_envs=N):
    return RND((1, 44, 44), Args(num_envs=num_envs, gamma_int=0.875, rnd_features=2, minibatch_size=128))


def assert_same_divisor(one, other):
    torch.testing.assert_close(one.returns.sums, other.returns.sums, rtol=1e-9, atol=0)
    torch.testing.assert_close(one.discounted, other.discounted, rtol=1e-9, atol=0)


def test_the_divisor_of_a_resumed_run():
    """Normalize, save, load, normalize equals one go: the discounted sums do not climb from 0 again."""
    first, second = torch.rand(2, 30, N, generator=torch.Generator().manual_seed(0))
    whole, part, resumed = normalizer(), normalizer(), normalizer()
    whole.normalize(first)
    expected = whole.normalize(second)
    filtered, sums = np.zeros(N), []
    for row in torch.cat([first, second]).double().numpy():
        filtered = 0.875 * filtered + row
        sums += filtered.tolist()
    torch.testing.assert_close(expected.double(), second.double() / plain_deviation(sums), rtol=1e-6, atol=0)
    part.normalize(first)
    resumed.load_state_dict(part.state_dict())
    assert torch.equal(resumed.normalize(second), expected)
    assert_same_divisor(resumed, whole)


# ---------------------------------------------------------------------------------------------------- one whole update


CASES = {
    "gray": dict(int_coef=0.5, micro_batch=7, predictor_share=0.1),
    "rgb": dict(frame_channels=3, max_grad_norm=0.05, ext_coef=0, bonus_after=T * N),
}


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_update_equals_float64_reference(tmp_path, monkeypatch, changes):
    assert_updates_equal_reference(ppo_atari_rnd, tmp_path, monkeypatch, changes)


def assert_updates_equal_reference(script, tmp_path, monkeypatch, changes):
    """Two iterations with terminations, truncations, lost lives and dummy rows, recomputed in float64 from the frames.

    Compared: both networks' weights, the statistics of frames and intrinsic returns, the metrics.
    """
    Agent, RND, Args = script.Agent, script.RND, script.Args  # noqa: N806
    draws, kinds = [], set()
    conftest.larger(monkeypatch, Agent, "policy", "value")
    spy_on(monkeypatch, torch, "rand", lambda result, *size: draws.append(result))
    spy_on(monkeypatch, Agent, "forward", lambda result, agent, obs, *x: kinds.add(obs.dtype))
    envs = fake(dummy_reward=100.0)
    options = dict(adam_eps=0.01, update_epochs=2, lr=(1e-3,), clip=1e-3, vf_coef=0.7, ent_coef=(0.3,))
    options |= dict(gamma=0.95, gamma_int=0.9) | changes
    metrics, saved = conftest.runner(script, SMALL)(tmp_path, envs, iterations=2, **options)
    assert kinds == {torch.uint8}
    args = Args(**(SMALL | options))
    C = args.frame_channels
    torch.manual_seed(1)
    start, networks = Agent(SHAPE, 4, args).state_dict(), RND((C, 44, 44), args).state_dict()
    w = {name: x.double().requires_grad_() for name, x in start.items()}
    r = {name: x.double() for name, x in networks.items() if name.startswith(("target", "predictor"))}
    learned = [*w.values(), *(x.requires_grad_() for name, x in r.items() if name.startswith("predictor"))]
    optimizer = torch.optim.Adam(learned, lr=1e-3, eps=0.01)  # a large one: else first steps are signs
    in_use = torch.tensor([args.ext_coef > 0, True])
    shown = [frame[:, -C:].astype(float) for frame in envs.seen[1 : WARMUP + 1]]  # all that the statistics saw
    filtered, returns, draw, no_ends = np.zeros(N), [], iter(draws), np.zeros((T, N))
    memory = torch.zeros(N, 256).double()
    for rollout in range(2):
        first = WARMUP + rollout * T  # of the actions; one more of the frames, for the reset after the warm-up
        obs = torch.from_numpy(np.stack(envs.seen[first + 1 : first + T + 2]))
        action = torch.from_numpy(np.stack(envs.actions[first : first + T])).long()
        reward, ended, cut, over = (np.stack(x) for x in zip(*envs.log[first : first + T], strict=True))
        before, valid = torch.from_numpy(over), ~over
        frames = obs[1:, :, -C:].flatten(0, 1)
        with torch.no_grad():
            logits, values, after = plain_agent(w, obs[:T], memory, before)
            values = torch.cat([values, plain_agent(w, obs[T:], after, before[:1])[1]])
            x = plain_standardised(frames, shown, 5)
            raw = ((plain_rnd(r, "predictor", x) - plain_rnd(r, "target", x)) ** 2).mean(1).view(T, N).numpy()
            shown.append(frames.numpy().astype(float))
            x = plain_standardised(frames, shown, 5)
            features = plain_rnd(r, "target", x).view(T, N, -1)
            x = x.view(T, N, C, 44, 44)
        for row in raw:
            filtered = args.gamma_int * filtered + row
            returns += filtered.tolist()
        bonus = raw / plain_deviation(returns) * (rollout * T * N >= args.bonus_after)
        ext = plain_gae(reward, values[..., 0].numpy(), ended, cut, args.gamma, args.gae_lambda)
        internal = plain_gae(bonus, values[..., 1].numpy(), no_ends, no_ends, args.gamma_int, args.gae_lambda)
        advantage = torch.from_numpy(args.ext_coef * ext + args.int_coef * internal)
        goals = torch.from_numpy(np.stack([ext, internal], -1)) + values[:T]
        logp = logits.log_softmax(-1).gather(-1, action[..., None])[..., 0]
        losses, errors = [], []
        for some in (slice(0, 2), slice(2, 4)) * args.update_epochs:  # whole environments, in this order
            keep = ~before[:, some]
            logits, value, _ = plain_agent(w, obs[:T, some], memory[some], before[:, some])
            value_error = ((value - goals[:, some]).square() * in_use).sum(2) / 2
            rows = (part[keep] for part in (logits, value_error, action[:, some], advantage[:, some], logp[:, some]))
            terms = conftest.plain_ppo(*rows, 1 - args.clip, 1 + args.clip)
            mask = (next(draw) < (args.predictor_share or 1)).double()
            inputs, wanted = (part[:, some].transpose(0, 1).flatten(0, 1) for part in (x, features))
            error = (plain_rnd(r, "predictor", inputs) - wanted).square().mean(1)
            predictor = (error * mask).sum() / mask.sum().clamp(min=1)
            loss = terms[0] + 0.7 * terms[1] - 0.3 * terms[2] + predictor
            norm = conftest.plain_step(optimizer, loss, w.values(), args.max_grad_norm)  # of the policy network only
            losses.append([x.item() for x in (*terms, norm)])
            errors.append(predictor.item())
        memory = after
    assert next(draw, None) is None
    conftest.assert_metrics(metrics, losses, (ext, internal), goals.numpy(), valid, raw, bonus)
    assert metrics["loss/predictor"] == pytest.approx(np.mean(errors), rel=1e-9)
    assert metrics["ext/reward"] == pytest.approx(reward[valid].mean(), rel=1e-6)
    assert metrics["episode/rooms_ever"] is None
    assert metrics["int/divisor"] == pytest.approx(plain_deviation(returns), rel=1e-9)
    assert metrics["int/return_std"] == pytest.approx(goals.numpy()[valid][:, 1].std(ddof=1), rel=1e-9)
    np.testing.assert_allclose(saved["rnd"]["frames.sums"][1], np.concatenate(shown).sum(0), rtol=1e-9)
    conftest.assert_learned(start, w, saved["agent"])
    conftest.assert_learned(networks, r, saved["rnd"])


def test_invalid_rows_have_zero_gradient(tmp_path):
    """Reward and observation of the dummy row reach no weight of the policy's; with --int-coef 0 nor does the bonus."""
    saved = []
    for reward, noise in ((0.0, 0), (-1e6, 255)):
        envs = fake(ends=("terminated",), dummy_reward=reward)
        envs.noise = noise
        saved.append(run(tmp_path, envs, 2, f"noise {noise}", int_coef=0)[1])
    for part, same in (("agent", True), ("rnd", False)):
        one, other = (state[part] for state in saved)
        assert all(torch.equal(one[name], other[name]) for name in one) == same


def test_predictor_learns_the_rows_of_32_environments(tmp_path, monkeypatch):
    """The default --predictor-share: here half of the rows."""
    sizes = []
    spy_on(monkeypatch, RND, "error", lambda result, rnd, frames, x: sizes.append(len(frames)))
    run(tmp_path, fake(num_envs=64), num_envs=64, num_steps=1, minibatch_size=64, update_epochs=10)
    assert sizes[0] == 64 and len(sizes) == 11  # first of the bonus
    assert np.mean(sizes[1:]) == pytest.approx(32, abs=3 * 4 / 10**0.5)


def test_predictor_learns_the_rows_of_32_environments_of_all_ranks(tmp_path, monkeypatch):
    """One rank of two, each with 32 environments: half of its rows."""
    sizes, learn = [], ppo_atari_rnd.learn

    def learn_on_one_of_two(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ppo_atari_rnd, "WORLD", 2)
            patch.setattr(ppo_atari_rnd, "sum_over_ranks", lambda x: 2 * x)
            spy_on(patch, RND, "error", lambda result, rnd, frames, x: sizes.append(len(frames)))
            return learn(*args)

    monkeypatch.setattr(ppo_atari_rnd, "learn", learn_on_one_of_two)
    run(tmp_path, fake(num_envs=32), num_envs=32, num_steps=2, minibatch_size=64, update_epochs=10)
    assert len(sizes) == 10 and np.mean(sizes) == pytest.approx(32, abs=3 * 4 / 10**0.5)


def test_a_clip_of_0_is_off():
    rows = dict(obs=None, action=torch.zeros(2, dtype=torch.int64), logp=torch.full((2,), -np.log(12.0)))
    rows |= dict(advantage=torch.tensor([1.0, -1.0]), target=torch.zeros(2, 2))
    _, terms = ppo_atari_rnd.ppo_loss(lambda obs: (torch.zeros(2, 4), torch.zeros(2, 2)), rows, 0, Args(clip=0))
    assert terms["loss/policy"].tolist() == pytest.approx([-3, 3]) and not terms["train/clip_frac"].any()


def resume(tmp_path, envs, iterations, **changes):
    saved = load(str(tmp_path / "run"))
    args = Args(**saved["args"] | dict(total_timesteps=iterations * T * N) | changes)
    train(args, conftest.giving(envs), saved)
    return load(str(tmp_path / "run"))


def test_a_resumed_run_may_have_other_environments(tmp_path):
    """Its sums of bonuses are repeated."""
    _, saved = run(tmp_path, fake())
    again = resume(tmp_path, fake(2 * N), 1, num_envs=2 * N, total_timesteps=2 * T * N)  # ends at once
    assert again["rnd"]["discounted"].equal(saved["rnd"]["discounted"])
    again = resume(tmp_path, fake(2 * N), 3, num_envs=2 * N)
    assert again["rnd"]["discounted"].shape == (2 * N,) and again["step"] == 3 * T * N


def test_games_begin_after_the_warm_up(tmp_path):
    """Statistics of exactly the warm-up's frames; then all games begin anew, as in the authors' code."""
    games = Games([[([1.0] * 10, "terminated")]] * N, shape=SHAPE)
    envs = RecordEpisodeStatistics(Unreported(games))
    metrics, saved = run(tmp_path, envs, warmup_steps=7, num_steps=16)
    assert metrics["step"] == 64 and metrics["episode/return"] == metrics["episode/length"] == 10
    assert metrics["episode/count"] == 4 and len(games.actions) == 7 + 16  # cut off at 7, then 10 steps and a row
    assert saved["rnd"]["frames.sums"][0].max().item() == pytest.approx(7 * 4 + 64, abs=1e-3)


def test_resumed_run_continues_its_statistics(tmp_path, monkeypatch):
    """Stopped in the warm-up, it does the rest; stopped in its first iteration, none; later it keeps its sums, too."""
    resumed, seen = [], []
    spy_on(monkeypatch, RND, "load_state_dict", lambda result, rnd, state: resumed.append(rnd.discounted.clone()))

    def stopping(envs, after):
        step = envs.step

        def stop(actions):
            if len(envs.actions) == after:
                raise KeyboardInterrupt
            return step(actions)

        envs.step = stop
        return envs

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, stopping(fake(), 2))
    for rest in (1, 0):
        seen.append(load(str(tmp_path / "run"))["rnd"]["frames.sums"][0].max().item())
        with pytest.raises(KeyboardInterrupt):
            resume(tmp_path, stopping(fake(), rest + 5), 2)
    seen.append(load(str(tmp_path / "run"))["rnd"]["frames.sums"][0].max().item())
    assert seen == pytest.approx([2 * N, WARMUP * N, WARMUP * N], abs=1e-3)
    actions = []
    for iterations in (2, 3):
        envs = fake()
        saved = resume(tmp_path, envs, iterations)
        actions.append(len(envs.actions))
        if iterations == 2:
            discounted = saved["rnd"]["discounted"]
    assert actions == [2 * T, T] and saved["step"] == 3 * T * N
    assert not resumed[-2].any() and discounted.all() and torch.equal(resumed[-1], discounted)


def test_a_run_that_dies_in_its_warm_up_can_be_resumed(tmp_path):
    """A checkpoint is there from the start."""
    envs = fake()
    envs.step = None
    with pytest.raises(TypeError):
        run(tmp_path, envs)
    envs = fake()
    assert resume(tmp_path, envs, 1)["step"] == T * N and len(envs.actions) == WARMUP + T


def test_what_is_refused(tmp_path):
    changes = [dict(minibatch_size=4), dict(minibatch_size=24)]  # no whole environments; no divisor of 32 rows
    changes += [dict(total_timesteps=T * N - 1), dict(eval_every=9), dict(warmup_steps=-1), dict(predictor_share=1.5)]
    changes += [dict(max_episode_steps=2**31), dict(noop_max=0), dict(noop_max=1001), dict(stack=65)]
    changes += [dict(frame_size=90), dict(frame_channels=0), dict(gamma_int=1.5), dict(int_coef=np.inf)]
    for change in changes:
        with pytest.raises(ValueError, match=next(iter(change)).replace("_", "[-_]")):
            Args(**SMALL | change)
    flat = fake()
    flat.reset = lambda **options: (np.zeros((N, 44, 44), np.uint8), {})
    for envs in (*(Games(random_episodes(N), shape=shape) for shape in [(4, 36, 36), (4, 43, 60)]), flat):
        with pytest.raises(UsageError, match="H, W >= 44"):
            run(tmp_path, envs)
    with pytest.raises(UsageError, match="Ant"):
        make_envs(Args(env_id="Ant"), 1, 1)  # of EnvPool, too, but not Atari's
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_bonus_finds_the_rare_door(tmp_path, seed):
    """The agent with the bonus goes through the door five times as often as with --int-coef 0, same budget."""
    reached = []
    options = dict(num_envs=8, num_steps=64, minibatch_size=256, update_epochs=4, warmup_steps=64, rnd_features=32)
    for int_coef in (1.0, 0.0):
        envs = RareDoor()
        run(tmp_path, envs, 40, str(int_coef), int_coef=int_coef, ext_coef=0, lr=(5e-4,), seed=seed, **options)
        reached.append(envs.reached)
    assert reached[0] >= 5 * max(reached[1], 1), reached


# ------------------------------------------------------------------------------------------------------ the environment


def atari(num_envs=N, stream="training", **changes):
    args = Args(**dict(env_id="Breakout", threads=1) | changes)
    return make_envs(args, num_envs, stream_seed(args.seed, stream))


def test_true_returns_of_berzerk():
    """Whole games, unclipped, over lost lives and time limits, against books kept from rewards and step counts.

    The limit is in environment steps, the training reward is the sign of the score, an observation's newest frame is
    last, and only whole games end: a lost life does not.
    """
    envs, games = atari(env_id="Berzerk-v5", max_episode_steps=190), 0
    books = [[0.0, 0] for _ in range(N)]
    lives, lost, lengths, rewards, scores, before = np.zeros(N), 0, [], set(), set(), None
    for obs, reward, ended, cut, info, valid in random_play(envs, 450):
        assert before is None or (obs[valid, :3] == before[valid, 1:]).all()
        before = obs
        rewards |= set(reward.tolist())
        scores |= set(info["reward"].tolist())
        lengths += info["elapsed_step"][cut].tolist()
        lost += ((info["lives"] < lives) & ~ended & ~cut).sum()
        lives = info["lives"]
        assert (lives[ended] == 0).all()
        over = info.get("_episode", np.zeros(N, bool))
        assert (over == ended | cut).all()
        for i in range(N):
            books[i][0] += info["reward"][i] if valid[i] else 0
            books[i][1] += bool(valid[i])
            if over[i]:
                assert [info["episode"]["r"][i], info["episode"]["l"][i]] == books[i]
                games += 1
                books[i] = [0.0, 0]
    assert games > len(lengths) > 3 and lost > 10
    assert set(lengths) == {190} and rewards == {0.0, 1.0} and max(scores) >= 5


class ScriptedPool:
    """EnvPool as far as AtariEnvs looks at it: one environment, rows (reward, done, cut, game over)."""

    observation_space, action_space = gym.spaces.Box(0, 255, (4, 8, 8), np.uint8), gym.spaces.Discrete(2)
    closed = False

    def __init__(self, rows):
        self.rows = iter(rows)

    def reset(self):
        return np.zeros((1, 4, 8, 8), np.uint8), {}

    def step(self, actions):
        reward, done, cut, over = (np.array([x]) for x in next(self.rows))
        info = {"reward": reward, "terminated": over}
        return self.reset()[0], reward, (done > 0) & (cut == 0), cut > 0, info

    def close(self):
        self.closed = True


def test_ends_of_games_of_a_scripted_pool():
    """Reported: whole games, each once, without the row after an end, also at the time limit."""
    rows = [
        (1, 0, 0, 0),
        (2, 1, 0, 1),  # over
        (9, 0, 0, 0),  # reset
        (4, 0, 0, 0),
        (16, 1, 1, 0),  # the time limit
        (9, 0, 0, 0),  # reset
        (0, 0, 0, 0),
        (32, 1, 1, 1),  # over at the very limit: no future value
    ]
    pool = ScriptedPool(rows)
    envs = RecordEpisodeStatistics(AtariEnvs(pool, 1, None))
    envs.reset()
    reported, terminated, truncated = [], [], []
    for _ in rows:
        _, _, ended, cut, info = envs.step(None)
        terminated += ended.tolist()
        truncated += cut.tolist()
        reported.append((info["episode"]["r"][0], info["episode"]["l"][0]) if "episode" in info else None)
    assert reported == [None, (3, 2), None, None, (20, 2), None, None, (32, 2)]
    assert np.flatnonzero(terminated).tolist() == [1, 7] and np.flatnonzero(truncated).tolist() == [4, 7]
    envs.close()
    assert pool.closed


def test_a_game_over_at_the_time_limit_is_a_termination():
    """EnvPool calls it cut only; then its last frame's value would count as a future."""
    lengths = []
    for limit in (4500, None):
        envs = atari(1, max_episode_steps=limit or lengths[0])
        rows = ((bool(ended), bool(cut)) for _, _, ended, cut, _, _ in random_play(envs, 500))
        length, ends = next((number, row) for number, row in enumerate(rows, 1) if any(row))
        lengths.append(length)
        assert ends == (True, limit is None)
    assert lengths[0] == lengths[1]


def test_options_reach_the_emulator():
    options = dict(repeat_action_probability=0.3, noop_max=5, fire_reset=True, frame_size=96, stack=2, seed=7)
    envs = atari(1, **options)
    config = envs.unwrapped.pool.spec.config
    assert config.repeat_action_probability == pytest.approx(0.3) and config.frame_skip == 4 and config.noop_max == 5
    assert config.use_fire_reset and config.img_height == config.img_width == 96 and not config.reward_clip
    assert not config.episodic_life and config.max_episode_steps == 4500
    assert envs.single_observation_space.shape == (2, 96, 96)


def test_seed_streams_disjoint():
    """No two envs of neighbouring runs, nor of training and evaluation, share a seed."""
    seeds = [
        atari(2, stream, seed=s).unwrapped.pool.spec.config.env_seed for s in (1, 2) for stream in ("training", "game")
    ]
    assert len({seed for one in seeds for seed in one}) == 4 * 2
    assert atari(2, seed=1).unwrapped.pool.spec.config.env_seed == seeds[0]


def test_rooms_of_pitfall():
    for env_id, rooms in (("Pitfall", {1, 2, 3}), ("Breakout", {0})):
        envs = atari(1, env_id=env_id, max_episode_steps=20)
        assert any("_episode" in info for *_, info, _ in random_play(envs, 20))
        assert envs.unwrapped.rooms_ever.sum() in rooms


def test_rooms_in_metrics_and_checkpoint(tmp_path):
    """Rooms of all games, which a resumed run still knows."""
    options = SMALL | dict(env_id="MontezumaRevenge", num_envs=2, max_episode_steps=5, total_timesteps=2 * T)
    metrics = train(Args(**options, run_dir=str(tmp_path), run_name="run"))
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert metrics["episode/rooms_ever"] == 1 and saved["rooms_ever"].nonzero().flatten().tolist() == [1]
    assert metrics["episode/length"] == 5
    saved["rooms_ever"][[0, 7]] = True
    torch.save(saved, tmp_path / "run" / "checkpoint.pt")
    saved = load(str(tmp_path / "run"))
    metrics = train(Args(**saved["args"] | dict(total_timesteps=4 * T)), saved=saved)
    assert metrics["episode/rooms_ever"] == 3
