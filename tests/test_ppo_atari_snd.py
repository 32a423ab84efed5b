"""The algorithm of ppo_atari_snd.py and of its variant snd_paper.py against independent oracles in float64."""

import importlib
import sys

import numpy as np
import ppo_atari_snd
import pydantic
import pytest
import torch
import torch.nn.functional as F
from ppo_atari_snd import SND, Agent, Args, UsageError, augment, contrastive

import conftest
from conftest import Games, giving, num_weights, plain_gae, plain_standardised, random_episodes, spy_on

SHAPE, WARMUP, T, N = (4, 16, 16), 3, 8, 4
SMALL = dict(num_envs=N, num_steps=T, minibatch_size=16, update_epochs=1, warmup_steps=WARMUP, pairs=4)
SMALL |= dict(snd_features=8, eval_episodes=0, threads=1, device="cpu")
run = conftest.runner(ppo_atari_snd, SMALL)


def fake(shape=SHAPE, **options):
    return Games(random_episodes(N, ends=("terminated", "truncated", "life")), shape=shape, **options)


@pytest.fixture
def paper(monkeypatch):
    """The variant snd_paper.py with its own copy of the script, which it changes."""
    monkeypatch.syspath_prepend(conftest.ROOT / "benchmark" / "variants")
    monkeypatch.delitem(sys.modules, "ppo_atari_snd")
    monkeypatch.delitem(sys.modules, "snd_paper", raising=False)
    module = importlib.import_module("snd_paper")
    yield module
    assert module.script is not ppo_atari_snd
    del sys.modules["snd_paper"], sys.modules["ppo_atari_snd"]


# ------------------------------------------------------------------------------------------------------------- maths


def test_defaults_match_reference_table():
    """michalnand's run cnd_21, the paper's SND-V."""
    expected = dict(num_envs=128, num_steps=128, minibatch_size=512, update_epochs=4, gamma=0.998, gamma_int=0.99)
    expected |= dict(gae_lambda=0.95, clip=0.1, vf_coef=1, ent_coef=(0, 0.001), ext_coef=2, int_coef=1, lr=(0, 1e-4))
    expected |= dict(max_grad_norm=0.5, repeat_action_probability=0.25, max_episode_steps=4500, noop_max=30)
    expected |= dict(frame_size=96, stack=4, int_clip=1, eta=0.5, pairs=64, predictor_share=0)
    expected |= dict(snd_features=512, env_id="MontezumaRevenge", total_timesteps=128_000_000, fire_reset=False)
    expected |= dict(adam_eps=1e-8, warmup_steps=256, frame_channels=1)
    assert {name: getattr(Args(), name) for name in expected} == expected


def test_networks_have_the_published_layers(paper):
    """Numbers of weights layer by layer at 32 x 32 (4 x 4 maps), and the scale of each layer at first."""
    agent = Agent((4, 32, 32), 18, Args())
    convs = 9 * (4 * 32 + 32 * 64 + 64 * 64 + 64 * 128) + 32 + 64 + 64 + 128
    assert num_weights(agent) == convs + 4 * 4 * 128 * 512 + 512 + 2 * (512 * 512 + 512) + 513 * (18 + 2)
    conftest.assert_initial(agent, dict(hidden_policy=0.01, hidden_value=0.1, policy=0.01, value=0.01))
    elu = 9 * (16 + 16 * 32 + 32 * 64 + 64 * 64) + 16 + 32 + 64 + 64 + 64 * 16 * 48 + 48
    relu = 9 * (32 + 32 * 64 + 64 * 64 + 64 * 128) + 32 + 64 + 64 + 128 + 128 * 16 * 48 + 48
    snd = SND((1, 32, 32), Args(snd_features=48))
    paper_snd = {kind: paper.SND((1, 32, 32), paper.Args(target=kind, snd_features=48)) for kind in ("v", "std", "vic")}
    nets = [(snd, elu, {}), (paper_snd["v"], elu, {}), (paper_snd["vic"], relu, dict(target=0.5))]
    for net, size, gains in [*nets, (paper_snd["std"], relu, dict(target=0.5, predictor=0.5))]:
        assert num_weights(net.target) == size and num_weights(net.predictor) == size + 2 * (48 * 48 + 48)
        both = torch.nn.ModuleDict({"target": net.target, "predictor": net.predictor})
        conftest.assert_initial(both, gains)
    std = paper_snd["std"]
    assert std.whole.weight.shape == (64, 48) and std.local.weight.shape == (64, 64)  # of the third convolution


def plain_agent(w, obs):
    x = obs.double() / 255
    for i, stride in ((0, 2), (2, 2), (4, 2), (6, 1)):
        x = F.relu(F.conv2d(x, w[f"trunk.{i}.weight"], w[f"trunk.{i}.bias"], stride, 1))
    x = F.relu(F.linear(x.flatten(1), w["trunk.9.weight"], w["trunk.9.bias"]))
    policy = F.relu(F.linear(x, w["hidden_policy.weight"], w["hidden_policy.bias"]))
    value = F.relu(F.linear(x, w["hidden_value.weight"], w["hidden_value.bias"]))
    return F.linear(policy, w["policy.weight"], w["policy.bias"]), F.linear(value, w["value.weight"], w["value.bias"])


def plain_snd(w, net, x, kind):
    """Features and the third convolution's maps, in float64."""
    activation, maps = F.relu if kind in ("std", "vic") else F.elu, []
    for i, stride in enumerate((2, 2, 2, 1)):
        x = activation(F.conv2d(x, w[f"{net}.{2 * i}.weight"], w[f"{net}.{2 * i}.bias"], stride, 1))
        maps.append(x)
    x = F.linear(x.flatten(1), w[f"{net}.9.weight"], w[f"{net}.9.bias"])
    for j in (11, 13) if net == "predictor" else ():
        x = F.linear(F.elu(x), w[f"{net}.{j}.weight"], w[f"{net}.{j}.bias"])
    return x, maps[2]


def plain_contrastive(a, b, far):
    loss = 0
    for x, y, label in zip(a, b, far.double(), strict=True):
        loss += (label - (x - y).square().mean()) ** 2 / len(a)
    return loss + (a.square().mean() + b.square().mean() - 200).clamp(min=0)


def plain_vicreg(a, b):
    n, d = a.shape
    loss = (a - b).square().sum() / (n * d)
    for z in (a, b):
        z = z - z.mean(0)
        covariance = z.T @ z / (n - 1)
        loss = loss + (1 - (covariance.diagonal() + 1e-4).sqrt()).clamp(min=0).sum() / d
        loss = loss + (covariance * (1 - torch.eye(d))).square().sum() / d / 25
    return loss


def plain_infonce(patches, whole, local, features):
    """A softmax over the next frames for every patch of every row; patches: (P, B, K)."""
    loss = -1e-4 * features.std(1).mean()
    for patch, following in zip(patches, local, strict=True):
        for asked in (whole, following):
            logits = patch @ asked.T
            right = (logits.exp().sum(1).log() - logits.diagonal()).mean()
            loss = loss + (right + 1e-4 * logits.square().sum().sqrt()) / len(patches)
    return loss


def test_target_losses_of_large_features(paper):
    """Above the std that vicreg wants and contrastive's limit of the norms; the update below stays under both."""
    torch.manual_seed(0)
    a, b = 14 * torch.randn(2, 9, 5).double()
    far = torch.rand(9) < 0.5
    assert (a**2).mean() + (b**2).mean() > 200
    assert contrastive(a, b, far).mean().item() == pytest.approx(plain_contrastive(a, b, far).item())
    assert paper.vicreg(a, b).item() == pytest.approx(plain_vicreg(a, b).item())


def test_tiles_hide_a_tenth_of_half_the_frames_and_noise_moves_half():
    """Shares, range and tile sizes, from many draws."""
    torch.manual_seed(0)
    hidden, noisy, sizes, noise = [], [], set(), []
    for _ in range(60):
        x = torch.full((64, 1, 48, 48), 5.0)
        y = augment(x)
        dark = y.abs() <= 0.2
        assert ((y - 5).abs() <= 0.2).logical_or(dark).all()
        share = dark.float().mean((1, 2, 3))
        hidden.append(share)
        noise.append((y - 5)[y > 4])
        noisy += [(row.frac() != 0).any().item() for row in y]
        row = dark[share.argmax(), 0]  # runs of hidden pixels are multiples of the tile
        edges = (row[:, 1:] != row[:, :-1]).any(0).nonzero().flatten() + 1
        sizes.add(int(np.gcd.reduce(edges.numpy())) if len(edges) else 48)
    hidden, noise = torch.cat(hidden), torch.cat(noise)
    assert noise.mean().abs() < 0.001 and noise.min() < -0.199 and noise.max() > 0.199
    assert hidden.mean().item() == pytest.approx(0.05, abs=0.006)
    assert (hidden > 0).float().mean() == pytest.approx(0.5, abs=0.06)
    assert np.mean(noisy) == pytest.approx(0.5, abs=0.05) and {1, 2, 4, 8, 12, 16} <= sizes


def test_both_frames_of_a_pair_have_draws_of_their_own(monkeypatch):
    """Else a frame would be told from itself without any distortion to see through."""
    shown = []
    spy_on(monkeypatch, ppo_atari_snd, "augment", lambda result, x: shown.append(result))
    torch.manual_seed(0)
    frames = torch.randint(0, 256, (16, 1, 16, 16), dtype=torch.uint8)
    SND((1, 16, 16), Args(snd_features=8)).target_loss(dict(first=frames, second=frames, far=torch.zeros(16)))
    one, other = shown
    assert (one != other).flatten(1).any(1).float().mean() > 0.6  # all but those that neither draw touched


def test_a_row_drawn_twice_is_near(tmp_path, monkeypatch):
    """With one row in the rollout all pairs are of that row: none is far, whatever was drawn."""
    fars = []
    spy_on(monkeypatch, SND, "target_loss", lambda result, snd, pairs: fars.append(pairs["far"]))
    real = torch.randint

    def one_row(high, size, **options):
        return torch.full(size, 5, **options) if size == (2, 64) else real(high, size, **options)

    monkeypatch.setattr(torch, "randint", one_row)
    run(tmp_path, fake(), pairs=64)
    assert fars and not torch.cat(fars).any()


def test_predictor_learns_as_much_as_with_32_environments(tmp_path, monkeypatch):
    """The default --predictor-share: with 64 environments half of the errors."""
    shares = []
    real = torch.rand

    def rand(*size, **options):
        drawn = real(*size, **options)
        if size == (64, 8):  # the mask of a minibatch's errors: all below the share are kept
            shares.append(drawn)
        return drawn

    losses = []
    spy_on(monkeypatch, SND, "errors", lambda result, snd, frames: losses.append(result.detach()))
    monkeypatch.setattr(torch, "rand", rand)
    envs = Games(random_episodes(64, ends=("terminated", "truncated")), shape=SHAPE)
    metrics, _ = run(tmp_path, envs, num_envs=64, num_steps=1, minibatch_size=64, lr=(0.0,))
    (mask,) = [drawn < 0.5 for drawn in shares]
    expected = (losses[1] * mask).sum() / mask.sum()  # after the bonus
    assert metrics["loss/predictor"] == pytest.approx(expected.item(), rel=1e-4)


def test_predictor_learns_as_much_with_two_ranks(tmp_path, monkeypatch):
    """One rank of two, each with 32 environments: half of the errors."""
    kept, learn = [], ppo_atari_snd.learn

    def learn_on_one_of_two(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ppo_atari_snd, "WORLD", 2)
            patch.setattr(ppo_atari_snd, "sum_over_ranks", lambda x: x)
            spy_on(patch, ppo_atari_snd, "gradient", lambda result, *given: kept.append(given[3].sum().item()))
            return learn(*args)

    monkeypatch.setattr(ppo_atari_snd, "learn", learn_on_one_of_two)
    envs = Games(random_episodes(32, ends=("terminated", "truncated")), shape=SHAPE)
    run(tmp_path, envs, num_envs=32, num_steps=2, minibatch_size=64)
    assert kept[1] == pytest.approx(64 * 8 / 2, abs=60)  # the number of errors that are kept; std 11


def test_a_gradient_limit_of_0_is_off(tmp_path):
    for name, limit in (("off", 0), ("high", 1e9)):
        run(tmp_path, fake(), name=name, max_grad_norm=limit)
    assert conftest.timeless(tmp_path / "off") == conftest.timeless(tmp_path / "high")


def test_bonus_and_training_error_have_one_precision():
    """With bf16 the features' difference is taken in float32: else it would be rounded to 2 or 3 digits."""
    snd, seen = SND((1, 16, 16), Args(snd_features=8, precision="bf16")), {}
    frames = torch.randint(0, 256, (32, 1, 16, 16), dtype=torch.uint8)
    snd.frames.update(frames)
    for name in ("predictor", "target"):
        note = lambda net, inputs, output, name=name: seen.update({name: (inputs[0], output)})  # noqa: E731
        getattr(snd, name).register_forward_hook(note)
    with torch.no_grad():
        ours = snd.errors(frames)
    (x, predicted), (same, features) = seen["predictor"], seen["target"]
    assert torch.equal(x, same) and x.dtype == torch.float32
    assert features.dtype == predicted.dtype == torch.bfloat16 and ours.dtype == torch.float32
    torch.testing.assert_close(ours, (features.float() - predicted.float()) ** 2, rtol=1e-6, atol=0)
    losses, _ = snd.target_loss(dict(first=frames, second=frames, far=torch.zeros(32)))
    assert seen["target"][1].dtype == torch.bfloat16 and losses.dtype == torch.float32


# ---------------------------------------------------------------------------------------------------- one whole update


def plain_target_loss(kind, w, x, y, far):
    """Of pairs of preprocessed frames."""
    (a, maps), (b, next_maps) = (plain_snd(w, "target", z, kind) for z in (x, y))
    if kind == "v":
        return plain_contrastive(a, b, far)
    if kind == "vic":
        return plain_vicreg(a, b)
    patches, following = (z.flatten(2).permute(2, 0, 1) for z in (maps, next_maps))
    whole, local = F.linear(b, w["whole.weight"], w["whole.bias"]), following @ w["local.weight"].T + w["local.bias"]
    return plain_infonce(patches, whole, local, a)


CASES = {  # of the script; of the variant
    "v": dict(micro_batch=7, predictor_share=0.5, pairs=9),
    "paper-v": dict(target="v", predictor_share=0.5, pairs=9, eta=2.6),
    "paper-std": dict(target="std", micro_batch=7, eta=420),
    "paper-vic": dict(target="vic", predictor_share=0.5, eta=60, ext_coef=0, clip=1e-4),
}


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", CASES)
def test_update_equals_float64_reference(tmp_path, monkeypatch, paper, name):
    """Two iterations with terminations, truncations, lost lives and dummy rows, recomputed in float64 from the frames.

    Compared: weights of policy, predictor and target, frame statistics, metrics. Augmentation is a mirror here.
    """
    changes, is_paper = CASES[name], name != "v"
    module = paper.script if is_paper else ppo_atari_snd
    Agent, SND, run = module.Agent, module.SND, conftest.runner(module, SMALL)
    monkeypatch.setitem(paper.GAINS, "std", (1.2, 1.2))  # larger features
    monkeypatch.setitem(paper.GAINS, "vic", (1.2, 2**0.5))
    drawn = {"rand": [], "randint": [], "randperm": []}
    conftest.larger(monkeypatch, Agent, "hidden_policy", "policy", "value")
    with monkeypatch.context() as patch:
        for name, draws in drawn.items():
            spy_on(patch, torch, name, lambda result, *x, draws=draws: draws.append(result))
        patch.setattr(module, "augment", lambda x: x.flip(3))
        envs = fake(dummy_reward=100.0)
        options = dict(update_epochs=2, lr=(1e-3,), adam_eps=0.01, clip=1e-3, vf_coef=0.7, gamma=0.95, gamma_int=0.9)
        options |= dict(max_grad_norm=0.05, eta=1.9, ent_coef=(3.0,), int_coef=0.8) | changes
        metrics, saved = run(tmp_path, envs, iterations=2, **options)
    args = module.Args(**(SMALL | options))
    kind = args.target if is_paper else "v"
    torch.manual_seed(1)
    start, networks = Agent(SHAPE, 4, args).state_dict(), SND((1, 16, 16), args).state_dict()
    w = {name: x.double().requires_grad_() for name, x in start.items()}
    r = {name: x.double().requires_grad_() for name, x in networks.items() if not name.startswith("frames")}
    optimizer = torch.optim.Adam([*w.values(), *r.values()], lr=1e-3, eps=0.01)
    orders = [x for x in drawn["randint"] if x.shape == (2 * T * N,)]
    orders = orders or [x.repeat(2) for x in drawn["randperm"]]
    ints = [x for x in drawn["randint"] if x.shape == (2, args.pairs)]
    for draws in (orders, ints):
        assert not draws or torch.cat([x.flatten() for x in draws]).max() == T * N - 1
    rands, orders, ints = iter(drawn["rand"]), iter(orders), iter(ints)
    in_use = torch.tensor([args.ext_coef > 0, True])
    shown = [frame[:, -1:].astype(float) for frame in envs.seen[1 : WARMUP + 1]]  # all that the statistics saw

    def prepare(frames):
        return frames.double() / 255 if is_paper else plain_standardised(frames, shown, 1)

    for rollout in range(2):
        first = WARMUP + rollout * T  # of the actions; one more of the frames, for the reset after the warm-up
        obs = torch.from_numpy(np.stack(envs.seen[first + 1 : first + T + 2])).flatten(0, 1)
        action = torch.from_numpy(np.concatenate(envs.actions[first : first + T])).long()
        reward, ended, cut, over = (np.stack(x) for x in zip(*envs.log[first : first + T], strict=True))
        valid, newest = torch.from_numpy(~over).flatten(), obs[:, -1:]
        with torch.no_grad():
            logits, values = (x.view(T + 1, N, -1) for x in plain_agent(w, obs))
            x = prepare(newest[:-N])
            raw = (plain_snd(r, "predictor", x, kind)[0] - plain_snd(r, "target", x, kind)[0]).square().mean(1)
            raw = raw.view(T, N).numpy()
        bonus = np.minimum(args.eta * raw, 1)
        shown.append(newest[:-N].numpy().astype(float))
        x = prepare(newest)
        ext = plain_gae(reward, values[..., 0].numpy(), ended, cut, args.gamma, args.gae_lambda)
        internal = plain_gae(bonus, values[..., 1].numpy(), ended, cut, args.gamma_int, args.gae_lambda)
        advantage = torch.from_numpy(args.ext_coef * ext + 0.8 * internal).flatten()
        goals = (torch.from_numpy(np.stack([ext, internal], -1)) + values[:T]).flatten(0, 1)
        logp = logits[:T].log_softmax(-1).flatten(0, 1).gather(-1, action[:, None])[:, 0]
        order, losses, novelty = next(orders), [], []
        for rows in order.split(args.minibatch_size):
            keep = rows[valid[rows]]
            now, value = plain_agent(w, obs[keep])
            value_error = ((value - goals[keep]).square() * in_use).sum(1) / 2
            parts = now, value_error, action[keep], advantage[keep], logp[keep]
            terms = conftest.plain_ppo(*parts, 1 - args.clip, 1 + args.clip)
            loss = terms[0] + 0.7 * terms[1] - 3 * terms[2]
            norm = conftest.plain_step(optimizer, loss, w.values(), 0.05)
            losses.append([x.item() for x in (*terms, norm)])
        for rows in (torch.arange(T * N) if is_paper else order).split(args.minibatch_size):
            mask = (next(rands) < (args.predictor_share or 1)).double()
            error = plain_snd(r, "predictor", x[rows], kind)[0] - plain_snd(r, "target", x[rows], kind)[0].detach()
            predictor = (error**2 * mask).sum() / (1 if kind == "std" else mask.sum())
            one = rows[valid[rows]]  # the next frame of a dummy row is another game's
            other = one + N
            if kind == "v":
                one, other = next(ints)
                other = torch.where(next(rands) < 0.5, one, other)
            pair = [x[part].flip(3) if kind == "v" else x[part] for part in (one, other)]
            goal = plain_target_loss(kind, r, *pair, one != other)
            conftest.plain_step(optimizer, predictor + goal, r.values())
            novelty.append([predictor.item(), goal.item()])
    assert not any(list(rest) for rest in (rands, ints, orders))
    assert 0.02 < (bonus == 1).mean() < 0.98  # the limit was felt
    conftest.assert_metrics(metrics, losses, (ext, internal), goals.view(T, N, 2).numpy(), ~over, raw, bonus)
    assert metrics["ext/reward"] == pytest.approx(reward[~over].mean(), rel=1e-6)  # a float32 reward
    predictor, goal = np.mean(novelty, axis=0)
    assert metrics["loss/predictor"] == pytest.approx(predictor, rel=1e-9)
    assert metrics["loss/target"] == pytest.approx(goal, rel=1e-9)
    np.testing.assert_allclose(saved["snd"]["frames.sums"][1], np.concatenate(shown).sum(0), rtol=1e-9)
    mean, std = (saved["snd"][f"frames.{name}"] for name in ("mean", "std"))
    np.testing.assert_allclose(mean, np.concatenate(shown).mean(0), rtol=1e-9, atol=1e-3)
    np.testing.assert_allclose(std, conftest.plain_deviation(np.concatenate(shown)), rtol=1e-9)
    conftest.assert_learned(start, w, saved["agent"])
    conftest.assert_learned(networks, r, saved["snd"])


def test_games_begin_anew_after_the_warm_up(tmp_path, monkeypatch):
    """As in the reference: its steps are in no return or length."""
    shown = []
    spy_on(monkeypatch, Agent, "forward", lambda result, agent, x: shown.append(x.dtype))

    class Fresh(Games):
        def reset(self, **options):  # as RecordEpisodeStatistics
            self.returns[:], self.lengths[:] = 0, 0
            return super().reset()

    envs = Fresh([[([1.0] * 10, "terminated")]] * N, shape=SHAPE)
    metrics, saved = run(tmp_path, envs, num_steps=16)
    assert set(shown) == {torch.uint8}
    assert (metrics["episode/count"], metrics["episode/return"], metrics["episode/length"]) == (N, 10, 10)
    assert saved["snd"]["frames.sums"][0, 0, 0, 0] == pytest.approx(N * (WARMUP + 16) + 1e-4)


@pytest.mark.parametrize("target", ["std", "vic"])
def test_minibatches_without_consecutive_frames_of_a_game_have_a_loss(tmp_path, paper, target):
    """In step games of one action make each second row a dummy: its minibatch has no pair of one game."""
    envs = Games([[([1.0], "terminated")]] * N, shape=SHAPE)
    metrics, _ = conftest.runner(paper.script, SMALL)(tmp_path, envs, target=target, minibatch_size=N)
    assert metrics["train/valid_frac"] == 0.5
    assert np.isfinite(metrics["loss/target"])


def test_what_is_refused(tmp_path):
    """One message that names the flag, or the frames, before anything is written."""
    changes = [dict(minibatch_size=24), dict(eval_every=9), dict(int_clip=-1.0), dict(noop_max=1001), dict(stack=65)]
    changes += [dict(predictor_share=1.5), dict(max_episode_steps=2**31), dict(frame_size=64), dict(frame_channels=0)]
    for change in changes:
        with pytest.raises(pydantic.ValidationError, match=next(iter(change)).replace("_", "[-_]")):
            run(tmp_path, fake(), **change)
    with pytest.raises(UsageError, match="H, W >= 4"):
        run(tmp_path, fake((4, 3, 3)))
    assert not list(tmp_path.iterdir())


def test_bonus_and_networks_see_all_channels_of_a_color_image(tmp_path, monkeypatch):
    """--frame-channels 3: statistics, bonus and losses are of the last three channels, the newest of two frames."""
    envs, shown = fake((6, 16, 16)), []
    spy_on(monkeypatch, SND, "errors", lambda result, snd, frames: shown.append(frames))
    spy_on(monkeypatch, SND, "target_loss", lambda result, snd, pairs: shown.extend([pairs["first"], pairs["second"]]))
    _, saved = run(tmp_path, envs, frame_channels=3)
    seen = np.stack([*envs.seen[1 : WARMUP + 1], *envs.seen[WARMUP + 1 : WARMUP + T + 1]])[:, :, 3:]
    np.testing.assert_array_equal(saved["snd"]["frames.sums"][1], seen.sum((0, 1), dtype=float))
    bonus, *others = shown
    np.testing.assert_array_equal(bonus, seen[WARMUP:].reshape(T * N, 3, 16, 16))
    assert len(others) > 2 and {frames.shape[1:] for frames in others} == {(3, 16, 16)}


@pytest.mark.parametrize("shape", [(4, 4, 4), (4, 16, 20)])
def test_small_and_oblong_frames(tmp_path, paper, shape):
    """The losses are finite; tiles and statistics have the frame's own height and width."""
    for name, train in (("v", run), ("std", conftest.runner(paper.script, SMALL))):
        metrics, saved = train(tmp_path, fake(shape), name=name, **({"target": "std"} if name == "std" else {}))
        assert np.isfinite([metrics["loss/predictor"], metrics["loss/target"]]).all(), name
        assert saved["snd"]["frames.sums"].shape[-2:] == shape[1:] and metrics["loss/predictor"] > 0, name


def test_bonus_without_a_limit(tmp_path):
    """--int-clip 0 turns the limit off; the predictor's share 0 is that of 32 environments."""
    metrics, _ = run(tmp_path, fake(), int_clip=0, eta=100.0)
    assert metrics["int/reward"] == pytest.approx(100 * metrics["int/reward_raw"]) and metrics["int/reward"] > 1


def resume(tmp_path, envs, iterations):
    """Continue the run -> its last metrics, the checkpoint."""
    saved = ppo_atari_snd.load(str(tmp_path / "run"))
    args = Args(**saved["args"] | dict(total_timesteps=iterations * T * N))
    metrics = ppo_atari_snd.train(args, giving(envs), saved)
    return metrics, torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)


def test_a_resumed_run_continues_without_warming_up_again(tmp_path):
    """Weights, statistics of frames, Adam's state and rooms are those saved."""
    envs, again = fake(), fake()
    envs.rooms_ever = np.arange(256) == 7
    run(tmp_path, envs)
    metrics, saved = resume(tmp_path, again, 2)
    assert metrics["iteration"] == 2 and len(again.actions) == T
    assert saved["snd"]["frames.sums"][0, 0, 0, 0] == pytest.approx(N * (WARMUP + 2 * T) + 1e-4)
    assert saved["rooms_ever"].nonzero().flatten().tolist() == [7] and metrics["episode/rooms_ever"] == 1
    assert saved["optimizer"]["state"][0]["step"] == 2 * T * N // 16


@pytest.mark.parametrize("steps", [1, WARMUP + 2])
def test_a_run_stopped_in_its_first_iteration_warms_up_once(tmp_path, monkeypatch, steps):
    """Ctrl-C in the warm-up or in the first rollout: the resumed run plays the random steps that are left."""
    envs, again = fake(), fake()
    step = envs.step

    def stop(actions):
        if len(envs.actions) == steps:
            raise KeyboardInterrupt
        return step(actions)

    monkeypatch.setattr(envs, "step", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, envs)
    _, saved = resume(tmp_path, again, 1)
    assert len(again.actions) == max(WARMUP - steps, 0) + T
    assert saved["snd"]["frames.sums"][0, 0, 0, 0] == pytest.approx(N * (WARMUP + T) + 1e-4)


@pytest.mark.slow
def test_it_learns_the_games_rewards_and_its_bonus_falls(tmp_path):
    """Reward 1 for the action that the frame shows, one in four by chance, bonus and all: no term is upside down."""
    envs = Games([[([0.0] * 20, "terminated")]] * 8, shape=SHAPE, learn=True)
    flags = dict(num_envs=8, num_steps=32, minibatch_size=64, update_epochs=4, lr=(3e-4,), gamma=0.5, eta=0.01)
    metrics, _ = run(tmp_path, envs, 50, **flags)
    rewards = np.stack([reward for reward, *_ in envs.log])
    assert rewards[:200].mean() < 0.4 and rewards[-200:].mean() > 0.6
    first, *_ = conftest.rows(tmp_path / "run")
    assert metrics["int/reward_raw"] < 0.1 * float(first["int/reward_raw"])
    assert metrics["loss/target"] < 0.8 * float(first["loss/target"])  # 0.60, 0.45, 0.45 of it with seeds 1 to 3
