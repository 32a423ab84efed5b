"""Several processes under torchrun: two Gloo ranks do what one does with twice the environments."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import NEXT_STEP, PROCGEN, SAME_STEP, Snow, equal, float64, random_episodes, rows, spy_on

T, N = 8, 2  # N environments a rank
COMMON = dict(num_envs=N, num_steps=T, minibatch_size=N * T, update_epochs=2, total_timesteps=2 * 2 * N * T)
COMMON |= dict(eval_episodes=0, device="cpu", threads=1, lr=1e-3, max_grad_norm=0.1)
COMMON |= dict(adam_eps=1e-3)  # so that Adam's first steps do not turn rounding errors into signs
GROUPS = dict(num_groups=1, sync=True)
CASES = {
    "ppo_procgen": dict(channels=(4, 4, 4), norm_reward=0.99, norm_adv="minibatch"),
    "impala_procgen": dict(channels=(4, 4, 4), **GROUPS),
    "ppo_atari_rnd": dict(rnd_features=4, warmup_steps=2, predictor_share=1),
    "ppo_atari_snd": dict(snd_features=4, warmup_steps=2, predictor_share=1),
    "appo_atari": dict(num_minibatches=1, **GROUPS),
}
DRAWN = {  # what ranks draw for themselves: actions, rows, pairs, replayed batches; and overlap
    "ppo_procgen": dict(channels=(4, 4, 4)),
    "impala_procgen": dict(channels=(4, 4, 4), num_groups=2, sync=False, replay_slots=2, replay_proportion=0.5),
    "ppo_atari_rnd": dict(rnd_features=4, warmup_steps=2, predictor_share=0.1),
    "ppo_atari_snd": dict(snd_features=4, warmup_steps=2),
    "appo_atari": dict(num_minibatches=2, num_groups=2),
}
TINY = f"{PROCGEN} --run-dir . --run-name x --total-timesteps 256 --eval-every 128"


def envs_of(script, first, count):
    atari = "atari" in script
    episodes = random_episodes(2 * N, seed=3, ends=("terminated", "truncated") if atari else ("terminated",))
    shape, autoreset = ((4, 44, 44), NEXT_STEP) if atari else ((3, 16, 16), SAME_STEP)
    envs = Snow(episodes[first : first + count], autoreset, shape=shape)
    envs.first = first
    return envs


def difference(snd, pairs):
    """A target's loss that is a mean over rows; the true one compares pairs that each rank draws."""
    loss = snd.target(snd.preprocess(snd.rollout)).square().mean().expand(len(pairs["far"]))
    return loss, {"loss/target": loss}


def without_draws(module, patch):
    """SND trains on all rows once an epoch, and its target on the whole rollout."""
    learn, randint = module.learn, torch.randint

    def remember(agent, snd, optimizer, batch, *rest):
        snd.rollout = batch["obs"][:, -1:]
        return learn(agent, snd, optimizer, batch, *rest)

    def rows(high, size, **options):
        epochs = COMMON["update_epochs"]
        return torch.arange(high).repeat(epochs) if size == (epochs * high,) else randint(high, size, **options)

    patch.setattr(module, "learn", remember)
    patch.setattr(torch, "randint", rows)
    patch.setattr(module.SND, "target_loss", difference)


def run(script, options, out, envs=None, resume=None, **changes):
    """Train, greedily on given envs, else drawing; this rank's checkpoint, metrics and random streams -> out."""
    module, names = importlib.import_module(script), []

    def make(args, count, seed, test=False):
        return envs if envs is not None else envs_of(script, module.RANK * N, count)

    def note(result, run, name, parts, **counters):
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save(states | counters | {"args": run.flags}, f"{out}.pt")

    with pytest.MonkeyPatch.context() as patch:
        save = module.Run.save
        patch.setattr(module.Run, "save", lambda *x, **counters: note(save(*x, **counters), *x, **counters))
        spy_on(patch, module, "stream_seed", lambda result, number, name: names.append(name))
        if envs is not None:  # so that who draws does not matter
            patch.setattr(torch.Tensor, "exponential_", lambda noise, generator=None: noise.fill_(1))
            if hasattr(module, "SND"):
                without_draws(module, patch)
        options = COMMON | options | dict(run_dir=str(out.parent), run_name=out.name) | changes
        # Rank 1's seed and folder do not count
        args = module.Args(**options | dict(seed=1 + module.RANK)) if resume is None or module.RANK else None
        saved = None
        if resume and module.RANK == 0:
            saved = module.load(resume)
            args = module.Args(**saved["args"] | options | dict(seed=1))
        metrics = module.train(args, make, saved)
    del metrics["agent"]
    torch.save([metrics, names, torch.rand(3)], f"{out}.more")


def worker(folder: Path):
    """What each rank does; all cases in one process, whose start takes longer than they do."""
    rank = int(os.environ["RANK"])
    for script, options in CASES.items():
        with float64():
            run(script, options, folder / f"{script}{rank}", envs_of(script, rank * N, N))
        torch.distributed.barrier()  # rank 0's run, which both go on with, is written
        more = dict(resume=str(folder / f"{script}0"), total_timesteps=4 * 2 * N * T)
        run(script, DRAWN[script], folder / f"drawn-{script}{rank}", **more)
    main = importlib.import_module("ppo_procgen").main
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "destroy_process_group", lambda: None)  # a process cannot join twice
        assert main(TINY.split()) == 0
        assert main(["--resume", "x", "--total-timesteps", "384"]) == 0
    assert main(["--env-id", "nogame"]) == 2


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2".split(), __file__, folder]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test: return") == 5  # rank 0 plays, after each iteration and at the end of each run
    assert done.stderr.count("--env-id nogame") == 2
    return folder


def load(folder, name, kind="pt"):
    return torch.load(f"{folder / name}.{kind}", weights_only=False)


def tensors(state):
    """All tensors of these parts by name, but for what has a row for each of a rank's environments."""
    found = {"normalizer": state["normalizer"]["sums"]} if "normalizer" in state else {}
    for part in {"agent", "rnd", "snd"} & state.keys():
        found |= {f"{part}.{name}": x for name, x in state[part].items() if "discounted" not in name and name != "skip"}
    return found


@pytest.mark.parametrize("script", CASES)
def test_two_ranks_update_like_one_with_both_their_rows(script, two_ranks, tmp_path):
    """Weights, running statistics and metrics of 2 ranks x N environments and of 1 rank x 2 N, after 2 iterations."""
    changes = dict(num_envs=2 * N, minibatch_size=2 * N * T)
    with float64():
        run(script, CASES[script], tmp_path / "one", envs_of(script, 0, 2 * N), **changes)
    one, two = load(tmp_path, "one"), load(two_ranks, f"{script}0")
    assert one["step"] == two["step"] == COMMON["total_timesteps"] and one.get("kl_coef") == two.get("kl_coef")
    for name, x in tensors(one).items():
        torch.testing.assert_close(
            tensors(two)[name], x, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
        )
    ours, theirs = load(two_ranks, f"{script}0", "more")[0], load(tmp_path, "one", "more")[0]
    shared = [f"train/{name}" for name in ("grad_norm", "kl", "approx_kl", "lr")]
    for name in [name for name in ours if name.startswith("loss/") or name in shared]:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("script", CASES)
def test_ranks_stay_bit_equal(script, two_ranks):
    """Also resumed, and where ranks draw for themselves, each from random streams of its own."""
    for case in (script, f"drawn-{script}"):
        zero, one = (load(two_ranks, f"{case}{rank}") for rank in range(2))
        assert zero["step"] == one["step"] > 0
        assert equal(tensors(zero), tensors(one)) and equal(zero["optimizer"], one["optimizer"]), case
    _, names, drawn = load(two_ranks, f"drawn-{script}0", "more")
    _, others, other_drawn = load(two_ranks, f"drawn-{script}1", "more")
    assert names and others and not set(names) & set(others)
    assert "num_groups" in DRAWN[script] or not torch.equal(drawn, other_drawn)  # groups have generators of their own


def test_the_command_line_of_two_ranks(two_ranks):
    """Rank 0's flags and checkpoint count, and it alone writes; a wrong flag ends both; one rank can continue."""
    for script in CASES:
        assert all(load(two_ranks, f"{script}{rank}")["args"]["seed"] == 1 for rank in range(2))
    assert importlib.import_module("ppo_procgen").main(["--resume", f"{two_ranks}/x", "--total-timesteps", "448"]) == 0
    assert [row["step"] for row in rows(two_ranks / "x")] == ["128", "256", "384", "448"]


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # Python 3.13 once aborted the exit of a process with the threads of eleven trainings
