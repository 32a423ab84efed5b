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
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from conftest import NEXT_STEP, ROOT, SAME_STEP, FakeVecEnv, random_episodes

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
T, N = 8, 2  # N environments a rank
COMMON = dict(num_envs=N, num_steps=T, minibatch_size=N * T, update_epochs=2, total_timesteps=2 * 3 * N * T)
COMMON |= dict(eval_episodes=0, quiet=True, device="cpu", torch_threads=1, lr=(1e-3,), max_grad_norm=0.1)
COMMON |= dict(adam_eps=1e-3)  # so that Adam's first steps do not turn rounding errors into signs
GROUPS = dict(num_groups=1, sync=True)
CASES = {
    "ppo_procgen": dict(channels=(4, 4, 4), norm_reward=0.99, norm_adv="minibatch"),
    "impala_procgen": dict(channels=(4, 4, 4), **GROUPS),
    "ppo_atari_rnd": dict(rnd_features=4, warmup_steps=2, predictor_share=1),
    "ppo_atari_snd": dict(snd_features=4, warmup_steps=2, predictor_share=1, target="none", minibatches="permuted"),
    "appo_atari": dict(num_minibatches=1, **GROUPS),
}
DRAWN = {  # what ranks draw for themselves; and overlap
    "impala_procgen": dict(channels=(4, 4, 4), num_groups=2, replay_slots=2, replay_proportion=0.5),
    "ppo_atari_rnd": dict(rnd_features=4, warmup_steps=2, predictor_share=0.1),
    "ppo_atari_snd": dict(snd_features=4, warmup_steps=2, target="vic"),
    "appo_atari": dict(num_minibatches=2, num_groups=2, vtrace=True),
}


class Part(FakeVecEnv):
    """Environments first, first + 1, ... of a larger vector, which show noise of their own."""

    first = 0

    def frame(self, env):
        seeds = [env + self.first, int(self.episode[env]), int(self.t[env])]
        return np.random.default_rng(seeds).integers(0, 256, self.shape, np.uint8)


def envs_of(script, first, count):
    atari = "atari" in script
    episodes = random_episodes(2 * N, seed=3, ends=("terminated", "truncated") if atari else ("terminated",))
    shape, autoreset = ((4, 44, 44), NEXT_STEP) if atari else ((3, 16, 16), SAME_STEP)
    envs = Part(episodes[first : first + count], autoreset, shape=shape)
    envs.first = first
    return envs


def run(script, options, envs, out, greedy=True, resume=""):
    """Train; the state of each checkpoint of this rank -> out, and the last metrics."""
    module = importlib.import_module(script)
    save = module.Logger.save

    def both(logger, name, state):
        save(logger, name, dict(state))  # fails on rank 1, whose folder does not exist, if it writes
        torch.save(state, f"{out}.{name}")

    with pytest.MonkeyPatch.context() as patch:
        if greedy:  # so that who draws does not matter
            patch.setattr(module, "sample", lambda logits, generator=None: logits.argmax(-1))
        patch.setattr(module.Logger, "save", both)
        options = COMMON | options | dict(run_dir=str(out.parent), run_name=out.name, resume=resume)
        if resume:
            options["total_timesteps"] += 2 * N * T
        if "num_groups" in options and envs is not None and not isinstance(envs, list):
            envs = [envs]
        result = module.train(module.Args(**options), envs)
        torch.save({name: x for name, x in result.items() if name != "agent"}, f"{out}.metrics")


def worker(folder: Path):
    """What each rank does; all cases in one process, whose start takes longer than they do."""
    rank = int(os.environ["RANK"])
    for script, options in CASES.items():
        run(script, options, envs_of(script, rank * N, N), folder / f"{script}{rank}")
    for script, options in DRAWN.items():
        groups = options.get("num_groups")
        parts = [envs_of(script, rank * N + g, 1) for g in range(groups)] if groups else envs_of(script, rank * N, N)
        run(script, options, parts, folder / f"drawn-{script}{rank}", greedy=False)
    for script, options in CASES.items():  # rank 0's run, by both
        parts = envs_of(script, rank * N, N)
        run(script, options, parts, folder / f"resumed-{script}{rank}", resume=str(folder / f"{script}0"))
    for script, options in CASES.items():  # with environments of its own
        module, streams = importlib.import_module(script), []
        seed = module.stream_seed

        def make(args, count, stream, script=script, module=module):
            module.stream_seed(args.seed, stream)  # as the true one does
            return RecordEpisodeStatistics(envs_of(script, 0, count))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "make_envs", make)
            patch.setattr(module, "stream_seed", lambda n, name, s=streams, f=seed: s.append(name) or f(n, name))
            run(script, options | dict(total_timesteps=2 * N * T), None, folder / f"own-{script}{rank}")
        torch.save([streams, torch.rand(3)], folder / f"seeds-{script}{rank}")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run([*TORCHRUN, "2", __file__, folder], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def load(folder, name, kind="checkpoint.pt"):
    return torch.load(f"{folder / name}.{kind}", weights_only=False)


def tensors(state, parts=("agent", "rnd", "snd", "normalizer")):
    """All tensors of these parts by name, but for what has a row for each of a rank's environments."""
    found = {}
    for part in parts:
        if isinstance(state.get(part), torch.Tensor):
            found[part] = state[part]
        elif part in state:
            found |= {f"{part}.{name}": x for name, x in state[part].items() if "filtered" not in name}
    return found


@pytest.mark.parametrize("script", CASES)
def test_two_ranks_update_like_one_with_both_their_rows(script, two_ranks, tmp_path):
    """Weights, running statistics and metrics of 2 ranks x N environments and of 1 rank x 2 N, after 3 iterations."""
    both = CASES[script] | dict(num_envs=2 * N, minibatch_size=2 * N * T)
    run(script, both, envs_of(script, 0, 2 * N), tmp_path / "one")
    one, two = load(tmp_path, "one"), load(two_ranks, f"{script}0")
    assert one["step"] == two["step"] == COMMON["total_timesteps"] and one.get("kl_coef") == two.get("kl_coef")
    for name, x in tensors(one).items():
        torch.testing.assert_close(tensors(two)[name], x, rtol=2e-4, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}")
    ours, theirs = load(two_ranks, f"{script}0", "metrics"), load(tmp_path, "one", "metrics")
    shared = [name for name in ours if name.split("/")[0] in ("loss", "episode")]
    shared += [f"train/{name}" for name in ("grad_norm", "kl", "approx_kl", "valid_frac", "lr")]
    assert {"episode/count", "episode/return", "loss/value"} <= set(shared)
    for name in {name for name in shared if ours.get(name) is not None}:
        assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=1e-5), name


OTHERS = [*(f"drawn-{script}" for script in DRAWN), *(f"resumed-{script}" for script in CASES)]


@pytest.mark.parametrize("case", [*CASES, *OTHERS])
def test_ranks_stay_bit_equal(case, two_ranks):
    """Also where ranks draw rows, pairs and replayed batches for themselves, with overlap, and resumed."""
    zero, one = (load(two_ranks, f"{case}{rank}") for rank in range(2))
    assert zero["step"] == one["step"] > 0
    for name, x in tensors(zero).items():
        assert torch.equal(x, tensors(one)[name]), name
    moments = [state["optimizer"]["state"] for state in (zero, one)]
    assert moments[0].keys() == moments[1].keys()
    for key, entry in moments[0].items():
        assert all(torch.equal(torch.as_tensor(x), torch.as_tensor(moments[1][key][k])) for k, x in entry.items())


@pytest.mark.parametrize("script", CASES)
def test_ranks_have_random_streams_of_their_own(script, two_ranks):
    """Names of all streams: levels, actions of groups; and PyTorch's own. Equal weights all the same."""
    (names, drawn), (others, other_drawn) = (torch.load(two_ranks / f"seeds-{script}{rank}") for rank in range(2))
    assert names and others and not set(names) & set(others) and not torch.equal(drawn, other_drawn)
    zero, one = (tensors(load(two_ranks, f"own-{script}{rank}")) for rank in range(2))
    assert all(torch.equal(x, one[name]) for name, x in zero.items())


TINY = """--env-id leaper --channels 4 4 4 --num-envs 4 --num-steps 16 --minibatch-size 32 --eval-episodes 2
--device cpu --torch-threads 1 --run-name x --checkpoint-every 10000 --total-timesteps 100000000""".split()


@pytest.mark.parametrize("how", ["killed", pytest.param("ctrl-c", marks=pytest.mark.slow)])
def test_a_lost_rank_ends_the_run_and_it_is_resumed(how, tmp_path):
    """kill -9 of rank 1, or Ctrl-C: a checkpoint; one rank goes on with it, then two."""
    command = [*TORCHRUN, "2", ROOT / "ppo_procgen.py", *TINY]
    streams = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    reset = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731  background shells ignore it
    process = subprocess.Popen(command, cwd=tmp_path, **streams, preexec_fn=reset)
    table, end = tmp_path / "runs" / "x" / "metrics.csv", time.monotonic() + 120
    while not (table.exists() and len(table.read_text().splitlines()) > 3):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.1)
    os.kill(rank_of(process)[1], signal.SIGKILL) if how == "killed" else process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0 and "stopped, saved at step" in errors, errors
    step = torch.load(tmp_path / "runs" / "x" / "checkpoint.pt")["step"]  # written on the way out: there was none
    assert step >= 2 * 128 and step % 128 == 0
    flags = "--resume runs/x --checkpoint-every 0 --total-timesteps".split()
    commands = [[sys.executable, ROOT / "ppo_procgen.py", *flags, str(step + 64)]]
    commands += [[*TORCHRUN, "2", ROOT / "ppo_procgen.py", *flags, str(step + 64 + 128)]]
    for command in commands:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    rows = [line.split(",")[0] for line in table.read_text().splitlines()]
    assert rows[-2:] == [str(step + 64), str(step + 192)]
    assert done.stdout.count("test: return") == 1  # rank 0 plays


def rank_of(process):
    """pid of each rank: children of torchrun."""
    pids = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout
    found = {}
    for pid in pids.split():
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {int(word[5:]): int(pid) for word in words if word.startswith(b"RANK=")}
    return found


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
