"""The variants of ppo_atari_snd.py, except snd_paper.py (test_ppo_atari_snd.py); test_variants.py runs each."""

import numpy as np
import torch

from conftest import SAME_STEP, FakeVecEnv, giving, random_episodes, rows


def test_exploration_envs_reset_in_the_next_step(variant):
    """An end's row shows the frame before it; the row after it plays a no-op, has no reward and begins an episode."""
    module = variant("snd_procgen")
    first = [([3.0, -2.0, 5.0], "truncated"), ([7.0], "terminated"), ([0.0, 2.0], "terminated")]
    games = FakeVecEnv([first, [([1.0] * 9, "terminated")]], SAME_STEP, num_actions=15, shape=(6, 64, 64))
    envs = module.ExplorationEnvs(games, 0, seed=1)
    older, newest = np.split(envs.reset()[0][1], 2)
    assert newest.any() and not older.any()
    shown, alone = [], []
    for _ in range(6):
        obs, reward, terminated, truncated, _ = envs.step(np.full(2, 9))
        older, newest = np.split(obs[0], 2)
        alone.append(not older.any())
        _, game, step = newest[0, 0, :3].tolist()
        assert not truncated.any()
        shown.append((game, step, reward[0], terminated[0]))
    expected = [(0, 1, 3, False), (0, 2, -2, False), (0, 2, 5, True), (2, 0, 0, False)]
    assert shown == [*expected, (2, 1, 0, False), (2, 1, 2, True)]  # game 1 was over in its no-op
    assert [actions.tolist() for actions in games.actions] == [[9, 9]] * 3 + [[4, 9], [9, 9], [9, 9]]
    assert alone == [False, False, False, True, False, False]  # episode 2's first row has one frame and zeros


def test_pixelated_frames(variant, monkeypatch):
    """Half of the frames have half the resolution, a quarter a quarter; then lost pixels and noise."""
    module = variant("snd_breakout")
    shares = []
    monkeypatch.setattr(module, "chance", lambda share, x, *size: shares.append(share) or torch.tensor(share > 0.2))
    monkeypatch.setattr(torch, "rand_like", torch.zeros_like)
    x = torch.rand(2, 1, 8, 8)
    half = x.reshape(2, 1, 4, 2, 4, 2).mean((3, 5)).reshape(2, 1, 2, 2, 2, 2).mean((3, 5))
    expected = half.repeat_interleave(4, 2).repeat_interleave(4, 3) - 0.2
    np.testing.assert_allclose(module.script.augment(x, None), expected, atol=1e-6)
    assert shares == [0.5, 0.25, 0.1, 0.125]
    assert module.script.SND((1, 84, 84), module.script.Args()).target[0].weight.shape == (32, 1, 8, 8)


def test_bonus_of_michalnand(variant):
    """Half the sum of squared errors of frames less their mean; b2: divided by its std."""
    module = variant("rnd_michalnand")
    rollout = torch.randint(256, (3, 8, 1, 32, 32), dtype=torch.uint8)  # 3 steps of 8 environments
    frames = rollout.flatten(0, 1)
    for config in ("ppo_rnd_b0", "ppo_rnd_b2"):
        rnd = module.RND((1, 32, 32), module.Args(config=config, int_clip=0))
        rnd.frames.update(frames[:8])
        with torch.no_grad():
            x = (frames - frames[:8].double().mean(0)).float() / 255
            error = (rnd.predictor(x) - rnd.target(x)).square()
        first, second = [rnd.bonus(rollout, 5)[1].flatten() for _ in range(2)]
        expected = half = error.sum(1) / 2
        if config == "ppo_rnd_b2":
            np.testing.assert_allclose(first, error.mean(1), rtol=1e-3)  # the first std is 1
            expected = half / half.std(correction=0)
        np.testing.assert_allclose(second, expected, rtol=0.02)
        np.testing.assert_allclose(rnd.errors(frames).detach(), error, rtol=1e-2, atol=1e-6)  # not divided


def test_spread_within_an_episode(variant):
    """NumPy's std, of the last three observations; an episode's first one stands in for those before it."""
    module = variant("snd_entropy")
    snd = module.SND((1, 32, 32), module.Args(snd_features=8, num_envs=2, minibatch_size=2, episodic_steps=3))
    frames = torch.randint(256, (7, 2, 1, 32, 32), dtype=torch.uint8)
    valid = torch.ones(7, 2)
    valid[2, 0] = 0  # environment 0: row 2 shows the last observation of an episode
    parts = [snd.spread(frames[:3].flatten(0, 1), valid[:3], 4), snd.spread(frames[3:].flatten(0, 1), valid[3:], 5)]
    spread = torch.cat(parts)
    with torch.no_grad():
        features = snd.target.encoder(frames.flatten(0, 1) / 255).view(7, 2, 256).numpy()
    for env, row in np.ndindex(2, 7):
        start = 3 if env == 0 and row >= 3 else 0
        window = features[[max(i, start) for i in (row - 2, row - 1, row)], env]
        expected = np.std(window, 0, ddof=1).mean()
        np.testing.assert_allclose(spread[row, env], expected, rtol=1e-3, atol=1e-6)
        assert (expected < 1e-5) == (row == start)


def test_the_second_bonus_has_a_head_of_its_own(variant, monkeypatch, tmp_path):
    """GAE of rewards, SND's bonus and the second one, each with its discount; all enter advantage and loss."""
    module, calls, learned = variant("snd_entropy"), [], []
    gae, learn = module.gae_of_one, module.learn_two
    monkeypatch.setattr(module, "gae_of_one", lambda *args: calls.append((args, gae(*args))) or calls[-1][1])

    def note(agent, snd, optimizer, batch, *rest):
        _, terms = module.script.ppo_loss(agent, batch, 0.0, rest[-1])
        learned.append((batch, agent(batch["obs"])[1].detach(), terms["loss/value"]))
        return learn(agent, snd, optimizer, batch, *rest)

    monkeypatch.setattr(module, "learn_two", note)
    args = dict(num_envs=2, num_steps=16, minibatch_size=16, total_timesteps=64, snd_features=8, warmup_steps=1)
    args |= dict(eval_episodes=0, threads=1, device="cpu", run_dir=str(tmp_path), run_name="x")
    args = module.Args(**args, gamma_episodic=0.5, episodic_coef=7, eta_episodic=30, int_clip=0.002)
    module.script.train(args, giving(FakeVecEnv(random_episodes(2), shape=(4, 32, 32))))
    for iteration, (batch, values, losses) in enumerate(learned):
        torch.testing.assert_close(losses, 0.5 * (values - batch["target"]).square().sum(1))
        three = calls[3 * iteration : 3 * iteration + 3]
        assert [args[4] for args, _ in three] == [0.998, 0.99, 0.5]
        for (_, value, *ends, _, _), _ in three:
            assert torch.equal(torch.stack(ends[:2]), torch.stack(three[0][0][2:4])) and value.shape == (17, 2)
        bonus, value = three[2][0][:2]
        assert 0.2 < (bonus.numpy() == np.float32(0.002)).mean() < 0.8  # the limit
        torch.testing.assert_close(value[:-1].flatten(), values[:, 2], rtol=1e-4, atol=1e-6)
        expected = sum(weight * result for weight, (_, result) in zip((2, 1, 7), three, strict=True))
        torch.testing.assert_close(batch["advantage"].view(16, 2), expected)
        torch.testing.assert_close(batch["target"][:, 2], (three[2][1] + value[:-1]).flatten())
    spread = float(rows(tmp_path / "x")[0]["int/episodic_raw"])
    assert len(learned) == 2 and spread > 0
