"""The algorithm of ppo_atari_rnd.py against independent oracles in float64."""

import numpy as np
import ppo_atari_rnd
import pytest
import torch
import torch.nn.functional as F
from ppo_atari_rnd import RND, Agent, Args, RunningMoments, load, train

import conftest
from conftest import Games, RareDoor, plain_deviation, plain_gae, plain_standardised, random_episodes, spy_on

SHAPE, WARMUP, T, N = (4, 44, 44), 3, 8, 4
SMALL = dict(num_envs=N, num_steps=T, minibatch_size=16, update_epochs=1, warmup_steps=WARMUP, rnd_features=8)
SMALL |= dict(eval_episodes=0, threads=1, device="cpu")
run = conftest.runner(ppo_atari_rnd, SMALL)


def fake(num_envs=N, ends=("terminated", "truncated", "life"), **options):
    return Games(random_episodes(num_envs, ends=ends), shape=SHAPE, **options)


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
    """(L, B, C, S, S) -> logits and values, (L, B, ...), memory (B, 256); 0 after a row where `before` is set."""
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


def test_a_pixel_that_never_changes_has_a_small_std():
    """At least 1e-6, however long it was seen; sums are exact, also of more rows than are summed at once."""
    constant, pixels = RunningMoments((2,), count=1e-4, variance=1, epsilon=0), torch.tensor([0.0, 255.0]).double()
    constant.update(pixels.expand(701, 2).to(torch.uint8))
    assert constant.sums[2].tolist() == [1e-4, 1e-4 + 701 * 255**2]
    constant.sums += 2e9 * torch.stack([torch.ones(2), pixels, pixels**2])
    constant.update(pixels[None].to(torch.uint8))
    assert (constant.std > 0.9e-6).all() and (constant.std < 1e-2).all()


def test_the_divisor_of_a_resumed_run():
    """Normalize, save, load, normalize equals one go: the discounted sums do not climb from 0 again."""
    first, second = torch.rand(2, 30, N, generator=torch.Generator().manual_seed(0))
    whole, resumed = [RND((1, 44, 44), Args(**SMALL)) for _ in range(2)]
    whole.normalize(first)
    resumed.load_state_dict(whole.state_dict())
    assert torch.equal(resumed.normalize(second), whole.normalize(second))


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
    spy_on(monkeypatch, torch, "randperm", lambda result, *size: draws.append(result))
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
    w = {name: x.clone().requires_grad_() for name, x in start.items()}
    r = {name: x.clone() for name, x in networks.items() if name.startswith(("target", "predictor"))}
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
            inputs, wanted = (part[:, some].transpose(0, 1).flatten(0, 1) for part in (x, features))
            order = next(draw)  # its first rows are the predictor's
            assert sorted(order.tolist()) == list(range(2 * T))
            drawn = order[: int(np.ceil(2 * T * (args.predictor_share or 1)))]
            predictor = (plain_rnd(r, "predictor", inputs[drawn]) - wanted[drawn]).square().mean()
            loss = terms[0] + 0.7 * terms[1] - 0.3 * terms[2] + predictor
            norm = conftest.plain_step(optimizer, loss, w.values(), args.max_grad_norm)  # of the policy network only
            losses.append([x.item() for x in (*terms, norm)])
            errors.append(predictor.item())
        memory = after
    assert next(draw, None) is None
    conftest.assert_metrics(metrics, losses, (ext, internal), goals.numpy(), valid, raw, bonus)
    assert metrics["loss/predictor"] == pytest.approx(np.mean(errors), rel=1e-9)
    assert metrics["ext/reward"] == pytest.approx(reward[valid].mean(), rel=1e-6)
    assert metrics["int/divisor"] == pytest.approx(plain_deviation(returns), rel=1e-9)
    np.testing.assert_allclose(saved["rnd"]["frames.sums"][1], np.concatenate(shown).sum(0), rtol=1e-9)
    conftest.assert_learned(start, w, saved["agent"])
    conftest.assert_learned(networks, r, saved["rnd"])


def test_a_clip_of_0_is_off():
    rows = dict(obs=None, action=torch.zeros(2, dtype=torch.int64), logp=torch.full((2,), -np.log(12.0)))
    rows |= dict(advantage=torch.tensor([1.0, -1.0]), target=torch.zeros(2, 2))
    _, terms = ppo_atari_rnd.ppo_loss(lambda obs: (torch.zeros(2, 4), torch.zeros(2, 2)), rows, 0, Args(clip=0))
    assert terms["loss/policy"].tolist() == pytest.approx([-3, 3]) and not terms["train/clip_frac"].any()


def test_a_resumed_run_may_have_other_environments(tmp_path):
    """Its sums of bonuses are repeated."""
    run(tmp_path, fake())
    saved = load(str(tmp_path / "run"))
    args = Args(**saved["args"] | dict(num_envs=2 * N, total_timesteps=3 * T * N))
    train(args, conftest.giving(fake(2 * N)), saved)
    again = load(str(tmp_path / "run"))
    assert again["rnd"]["discounted"].shape == (2 * N,) and again["step"] == 3 * T * N


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
