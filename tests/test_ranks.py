"""Several processes under torchrun: two Gloo ranks do what one does with twice the environments."""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import NEXT_STEP, ROOT, SAME_STEP, FakeVecEnv, random_episodes

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
T, N = 8, 2  # N environments a rank
COMMON = dict(num_envs=N, num_steps=T, minibatch_size=N * T, update_epochs=2, total_timesteps=2 * 3 * N * T)
COMMON |= dict(eval_episodes=0, quiet=True, device="cpu", torch_threads=1, lr=("1e-3",), max_grad_norm=0.1)
ATARI, GROUPS = dict(adam_eps=1e-3), dict(num_groups=1, sync=True)
CASES = {  # epsilon: so that Adam's first steps do not turn rounding errors into signs
    "ppo_procgen": dict(channels=(4, 4, 4), norm_reward=0.99, norm_adv="minibatch", adam_eps=1e-3),
    "impala_procgen": dict(channels=(4, 4, 4), adam_eps=1e-3, **GROUPS),
    "ppo_atari_rnd": dict(rnd_features=4, warmup_steps=2, predictor_share=1, **ATARI),
    "ppo_atari_snd": dict(
        snd_features=4, warmup_steps=2, predictor_share=1, target="none", minibatches="permuted", **ATARI
    ),
    "appo_atari": dict(num_minibatches=1, lr_schedule="kl", **ATARI, **GROUPS),
}
DRAWN = {  # what ranks draw for themselves; and overlap
    "impala_procgen": dict(channels=(4, 4, 4), num_groups=2, replay_slots=2, replay_proportion=0.5),
    "ppo_atari_rnd": dict(rnd_features=4, warmup_steps=2, predictor_share=0.1, minibatch_size=4, minibatches="drawn"),
    "ppo_atari_snd": dict(snd_features=4, warmup_steps=2, target="vic", motivation_passes="one"),
    "appo_atari": dict(num_minibatches=2, num_groups=2, vtrace=True),
}


class Part(FakeVecEnv):
    """Environments first, first + 1, ... of a larger vector, which show noise of their own."""

    first = 0

    def frame(self, env):
        seeds = [env + self.first, int(self.episode[env]), int(self.t[env])]
        return np.random.default_rng(seeds).integers(0, 256, self.shape, np.uint8)


def envs_of(script, first, count):
    shape, mode = ((4, 44, 44), NEXT_STEP) if "atari" in script else ((3, 16, 16), SAME_STEP)
    envs = Part(random_episodes(2 * N, seed=3)[first : first + count], mode, shape=shape)
    envs.first = first
    return [envs] if hasattr(importlib.import_module(script), "Group") else envs


def run(script, options, envs, out, greedy=True):
    """Train; the state of each checkpoint of this rank -> out, and the last metrics."""
    module = importlib.import_module(script)
    original = module.sample, module.Run.write
    if greedy:  # so that who draws does not matter
        module.sample = lambda logits, generator=None: logits.argmax(-1)
    module.Run.write = lambda run, name: torch.save(run.state, f"{out}.{name}")
    try:
        args = module.Args(**{**COMMON, **options}, run_dir=str(out.parent), run_name=out.name)
        torch.save(module.train(args, envs), f"{out}.metrics")
    finally:
        module.sample, module.Run.write = original


def worker(folder: Path):
    """What each rank does; all cases in one process, whose start takes longer than they do."""
    rank = int(os.environ["RANK"])
    for script, options in CASES.items():
        run(script, options, envs_of(script, rank * N, N), folder / f"{script}{rank}")
    for script, options in DRAWN.items():
        groups = options.get("num_groups")
        parts = [envs_of(script, rank * N + g, 1)[0] for g in range(groups)] if groups else envs_of(script, rank * N, N)
        run(script, options, parts, folder / f"drawn-{script}{rank}", greedy=False)
    for script in CASES:  # with environments of its own
        module, made = importlib.import_module(script), []
        original = module.make_envs

        def record(args, split, count, script=script, made=made):
            made.append(split)
            envs = envs_of(script, 0, count)
            return envs[0] if isinstance(envs, list) else envs

        module.make_envs = record
        options = CASES[script] | dict(total_timesteps=2 * N * T)
        run(script, options, None, folder / f"own-{script}{rank}")
        module.make_envs = original
        torch.save([made, torch.rand(3)], folder / f"seeds-{script}{rank}")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run([*TORCHRUN, "2", __file__, folder], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def load(folder, name, kind="checkpoint.pt"):
    return torch.load(f"{folder / name}.{kind}", weights_only=False)


def tensors(state, parts=("agent", "rnd", "snd")):
    return {f"{part}.{name}": x for part in parts if part in state for name, x in state[part].items()}


@pytest.mark.parametrize("script", CASES)
def test_two_ranks_update_like_one_with_both_their_rows(script, two_ranks, tmp_path):
    """Weights, running statistics and metrics of 2 ranks x N environments and of 1 rank x 2 N, after 3 iterations."""
    both = dict(num_envs=2 * N, minibatch_size=2 * N * T)
    run(script, CASES[script] | both, envs_of(script, 0, 2 * N), tmp_path / "one")
    one, two = load(tmp_path, "one"), load(two_ranks, f"{script}0")
    assert one["step"] == two["step"] == COMMON["total_timesteps"]
    for name, x in tensors(one).items():
        mine = tensors(two)[name]
        x = x[:N] if name.endswith("filtered") else x  # one row an environment
        torch.testing.assert_close(mine, x, rtol=2e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
    if script == "ppo_procgen":
        np.testing.assert_allclose(one["normalizer"][1], two["normalizer"][1], rtol=1e-6)
        assert one["kl_coef"] == two["kl_coef"]
    ours, theirs = load(two_ranks, f"{script}0", "metrics"), load(tmp_path, "one", "metrics")
    shared = [name for name in ours if name.split("/")[0] in ("loss", "episode") or name in ("train/grad_norm",)]
    shared += [name for name in ours if name in ("train/kl", "train/approx_kl", "train/valid_frac", "train/lr")]
    assert {"episode/count", "train/valid_frac", "loss/value"} <= set(shared)
    for name in shared:
        assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=1e-5), name


@pytest.mark.parametrize("case", [*CASES, *(f"drawn-{script}" for script in DRAWN)])
def test_ranks_stay_bit_equal(case, two_ranks):
    """Also where ranks draw rows, pairs and replayed batches for themselves, and with overlap."""
    zero, one = (load(two_ranks, f"{case}{rank}") for rank in range(2))
    assert zero["step"] == one["step"] > 0
    for name, x in tensors(zero).items():
        assert name.endswith("filtered") or torch.equal(x, tensors(one)[name]), name
    moments = [state["optimizer"]["state"] for state in (zero, one)]
    assert moments[0].keys() == moments[1].keys()
    for key, entry in moments[0].items():
        assert all(torch.equal(torch.as_tensor(x), torch.as_tensor(moments[1][key][k])) for k, x in entry.items())


@pytest.mark.parametrize("script", CASES)
def test_ranks_have_random_streams_of_their_own(script, two_ranks):
    (made, drawn), (other_made, other_drawn) = (torch.load(two_ranks / f"seeds-{script}{rank}") for rank in range(2))
    assert made and not set(made) & set(other_made) and not torch.equal(drawn, other_drawn)
    zero, one = (tensors(load(two_ranks, f"own-{script}{rank}")) for rank in range(2))
    assert all(torch.equal(x, one[name]) for name, x in zero.items() if not name.endswith("filtered"))


def rank_of(process):
    """pid of each rank: children of torchrun."""
    pids = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout
    found = {}
    for pid in pids.split():
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {int(word[5:]): int(pid) for word in words if word.startswith(b"RANK=")}
    return found


TINY = """--env-id leaper --channels 4 4 4 --num-envs 4 --num-steps 16 --minibatch-size 32 --eval-episodes 2
--device cpu --torch-threads 1 --run-name x""".split()


def test_a_killed_rank_ends_the_run_and_it_is_resumed(tmp_path):
    """kill -9 of rank 1: a line that says so, a whole checkpoint; one rank goes on with it, then two."""
    command = [
        *TORCHRUN,
        "2",
        ROOT / "ppo_procgen.py",
        *TINY,
        "--total-timesteps",
        "100000000",
        "--checkpoint-every",
        "0",
    ]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    table, end = tmp_path / "runs" / "x" / "metrics.csv", time.monotonic() + 120
    while not (table.exists() and len(table.read_text().splitlines()) > 3):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.1)
    os.kill(rank_of(process)[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert (
        process.returncode != 0
        and "--resume" in errors
        and 'Traceback (most recent call last)\n  File "/root' not in errors
    )
    step = torch.load(tmp_path / "runs" / "x" / "checkpoint.pt")["step"]
    assert step >= 3 * 128 and step % 128 == 0
    for ranks, more in ((1, 64), (2, 64 + 128)):
        launch = TORCHRUN + [str(ranks)] if ranks > 1 else [sys.executable]
        flags = ["--resume", "runs/x", "--total-timesteps", str(step + more)]
        done = subprocess.run([*launch, ROOT / "ppo_procgen.py", *flags], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    rows = [line.split(",")[0] for line in table.read_text().splitlines()]
    assert rows[-3:] == [str(step), str(step + 64), str(step + 192)]
    assert done.stdout.count("finished") == 1 and (tmp_path / "runs" / "x" / "eval.json").exists()


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
