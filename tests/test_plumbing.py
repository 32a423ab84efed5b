"""What every script promises around its algorithm: command line, files, checkpoints, resuming, stopping, bad input.

The plumbing is one text in all five files (test_repo.py compares), so what is in it is tested with one of them.
"""

import importlib.metadata
import json
import math
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
import types
from pathlib import Path

import gymnasium as gym
import numpy as np
import pydantic
import pytest
import torch
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conftest import ITERATION, KINDS, PROCGEN, ROOT, SAME_STEP, equal, rows, spy_on, timeless

each_script = pytest.mark.parametrize("script", KINDS, indirect=True)
SHORT = ("--total-timesteps", ITERATION, "--eval-episodes", 0)


def load(folder, name="checkpoint.pt"):
    return torch.load(folder / name, weights_only=True)


def stop(*_):
    raise KeyboardInterrupt


COLUMNS = """step iteration episode/return episode/length episode/count loss/policy loss/value loss/entropy
train/approx_kl train/explained_variance train/grad_norm train/lr time/sps time/env_s time/policy_s time/learn_s"""


@each_script
def test_files_of_a_run(script, capfd):
    """Files and progress; a second run of the seed, without evaluations, has the same numbers; another seed others."""
    flags, folder, split = ("--total-timesteps", 2 * ITERATION + 7), script.folder, script.split
    assert script.main(*flags, "--run-name", "a", "--eval-every", 100) == 0  # first reached in iteration 2
    out, error = capfd.readouterr()
    assert not error and "Gym" not in out  # gym's banner
    assert out.count("\nstep ") == 2 and out.count(f"{split}: return ") == 2 and "runs/a: cpu, threads: 1" in out
    config = json.loads((folder / "config-0.json").read_text())
    assert config["args"]["num_envs"] == 4 and config["ranks"] == 1 and config["command"] == sys.argv
    assert config["versions"]["torch"] == importlib.metadata.version("torch") and "envpool" in config["versions"]
    assert (folder / f"{script.name}.py").read_text() == (ROOT / f"{script.name}.py").read_text()
    assert list(folder.glob("events.out.tfevents.*")) and not list(folder.glob("*.tmp"))
    table = rows(folder)
    assert set(COLUMNS.split()) <= table[0].keys()
    assert [row["step"] for row in table] == ["64", "128"]  # the total is rounded down to whole iterations
    assert [bool(row[script.evaluated]) for row in table] == [False, True]
    assert not {"nan", "inf"} & {cell for row in table for cell in row.values()}
    result = json.loads((folder / "eval.json").read_text())
    assert result["step"] == load(folder)["step"] == 2 * ITERATION and list(result["splits"]) == [split]
    played = result["splits"][split]
    assert len(played["returns"]) == len(played["lengths"]) == 2
    assert played["mean"] == pytest.approx(np.mean(played["returns"]))
    assert played["stderr"] == pytest.approx(np.std(played["returns"], ddof=1) / math.sqrt(2))
    assert script.main(*flags, "--run-name", "b", "--eval-episodes", 0) == 0
    assert timeless(folder) == timeless(folder.parent / "b")
    assert equal(load(folder)["agent"], load(folder.parent / "b")["agent"])
    assert script.main(*SHORT, "--seed", 4) == 0
    (other,) = folder.parent.glob(f"{config['args']['env_id']}__{script.name}__4__20*")
    assert timeless(other) != timeless(folder)[:1]


@each_script
def test_own_environments_switches_and_schedules(script):
    """Autocast changes neither the agent's kind nor much else; rates follow the steps.

    make_envs makes all environments; every evaluation has the same seed, which is not that of training.
    """
    tables = dict(lr=(0, 1e-5, 128, 3e-5), ent_coef=(0, 0.1, 128, 0.3), eval_episodes=2, eval_every=ITERATION)
    if script.name == "appo_atari":
        tables["anneal_lr"] = False
    made, norms, saved = [], [], []

    def make_envs(args, num_envs, seed, test=False):
        episodes = [[([2.0] * 7, "terminated")]] * num_envs if test else None
        envs = script.fake(num_envs, episodes=episodes, num_actions=1)
        made.append((envs, seed, test))
        return envs

    for name, options in (("a", {}), ("b", dict(precision="bf16"))):
        result = script.train(make_envs, 2, run_name=name, **tables, **options)
        assert result["train/lr"] == pytest.approx(2e-5)
        played = result["eval"]["splits"][script.split]
        assert played["returns"] == [14, 14] and played["lengths"] == [7, 7] and result[script.evaluated] == 14
        norms.append(result["train/grad_norm"])
        saved.append(dict(load(script.folder.parent / name)["agent"]))
        assert equal(dict(result["agent"].state_dict()), saved[-1]) and result["run"] == f"runs/{name}"
    assert norms[1] == pytest.approx(norms[0], rel=0.1) and norms[1] != norms[0]
    torch.testing.assert_close(saved[1], saved[0], rtol=0.1, atol=0.01)  # dtypes and names too
    tests = [seed for _, seed, test in made if test]
    assert len(tests) == 6 and set(tests) == {tests[0]} and tests[0] != made[0][1]
    assert all(envs.closed for envs, _, _ in made)


@each_script
def test_heads_stay_float32_under_bf16(script):
    """Their outputs are not rounded to bfloat16's numbers."""
    obs = torch.randint(0, 255, (64, *script.shape), dtype=torch.uint8)
    agent = script.module.Agent(script.shape, 4, script.module.Args(precision="bf16"))
    for output in agent(obs):
        assert output.dtype == torch.float32 and (output.bfloat16() == output).float().mean() < 0.1


def test_the_table_and_its_events(script, monkeypatch):
    """A metric may be a tensor, appear later, or end; a resumed run drops the rows after its checkpoint."""
    log, own = script.module.Run.log, [{}, {"mine/x": torch.tensor(1.5, requires_grad=True)}, {}, {"mine/y": 7}]
    monkeypatch.setattr(
        script.module.Run, "log", lambda run, metrics: log(run, metrics | own[metrics["iteration"] - 1])
    )
    script.train(script.fake())
    old = (script.folder / "checkpoint.pt").read_bytes()
    for iterations in (3, 4):
        time.sleep(1.1)  # event files are read in the order of the second in their names
        (script.folder / "checkpoint.pt").write_bytes(old)  # as if killed before the next one was written
        script.go_on(script.fake(), iterations)
    table = rows(script.folder)
    assert [row["step"] for row in table] == ["64", "128", "192", "256"]
    assert [row["mine/x"] for row in table] == ["", "1.5", "", ""]
    assert [row["mine/y"] for row in table] == ["", "", "", "7"]
    events = EventAccumulator(str(script.folder)).Reload()
    assert [event.value for event in events.Scalars("mine/x")] == [1.5]
    losses = [float(row["loss/value"]) for row in table]
    assert [event.value for event in events.Scalars("loss/value")] == pytest.approx(losses, rel=1e-4)


def test_the_bar_and_the_lines(script, monkeypatch):
    """`> log` from a terminal: the terminal has the bar, the log has each line at once."""
    lines = []  # step lines in the log, whenever an action is drawn
    spy_on(monkeypatch, script.module, "sample", lambda *_: lines.append(Path("log").read_text().count("\nstep ")))
    terminal, child = pty.openpty()
    termios.tcsetwinsize(child, (24, 80))
    with open("log", "w") as log, open(child, "w") as error:
        monkeypatch.setattr(sys, "stdout", log)
        monkeypatch.setattr(sys, "stderr", error)
        script.train(script.fake(), 2)
    assert lines == [0] * 16 + [1] * 16
    assert b"128/128" in os.read(terminal, 65536)
    os.close(terminal)


def test_threads(script, monkeypatch):
    """All cores that the process may use: its affinity mask, its container's quota, its share of a machine."""
    cores = len(os.sched_getaffinity(0))
    for threads, expected in ((2, 2), (0, script.module.available_cores())):
        script.module.set_up(script.module.Args(device="cpu", threads=threads), None)
        assert torch.get_num_threads() == expected
    for text, expected in (("max 100000", cores), ("150000 100000", min(cores, 2)), ("50000 100000", 1)):
        monkeypatch.setattr(Path, "read_text", lambda self, text=text: text)
        assert script.module.available_cores() == expected
    monkeypatch.setattr(Path, "read_text", lambda self: "max 100000")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(6))
    for ranks, expected in (("2", 3), ("8", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert script.module.available_cores() == expected


def test_gpus(script, monkeypatch):
    """The chosen or the first one; LOCAL_RANK's with torchrun, with srun the rank modulo their number."""
    module, chosen = script.module, []
    index_of = torch.cuda._utils._get_device_index  # PyTorch's own: refuses "cuda" without a number
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(index_of(device)))
    for device in ("auto", "cuda", "cuda:2"):
        module.set_up(module.Args(device=device), None)
    monkeypatch.setattr(module, "WORLD", 2)
    monkeypatch.setattr(module, "RANK", 5)
    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(module.dist, "broadcast_object_list", lambda objects, device: None)
    module.set_up(module.Args(device="cuda"), None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    *_, device = module.set_up(module.Args(device="cuda"), None)
    assert chosen == [0, 0, 2, 1, 3] and device == torch.device("cuda:3")
    with pytest.raises(module.UsageError, match="--device cuda:1: "):
        module.set_up(module.Args(device="cuda:1"), None)


@each_script
def test_wrong_environments_are_refused(script, monkeypatch):
    """Before the run's folder exists; and gymnasium 1.2.3, which drops the last reward of same-step episodes."""

    def refuse(envs, words="make_envs: "):
        with pytest.raises(script.module.UsageError, match=words):
            script.train(envs)
        assert not script.folder.exists()

    refuse(script.fake(num_envs=3))
    envs = script.fake()
    envs.metadata = {"autoreset_mode": None}
    refuse(envs)
    for space in gym.spaces.MultiBinary(4), gym.spaces.Discrete(4, start=1), gym.spaces.Box(-1, 1, (2,)):
        envs = script.fake()
        envs.single_action_space = space
        refuse(envs)
    for frames in (lambda x: x.transpose(0, 2, 3, 1), lambda x: np.float32(x / 255), lambda x: x[..., 0]):
        envs = script.fake()
        reset = envs.reset
        monkeypatch.setattr(envs, "reset", lambda frames=frames, reset=reset, **k: (frames(reset()[0]), {}))
        refuse(envs)
    monkeypatch.setattr(gym, "__version__", "1.2.3")
    refuse(script.fake(), "gymnasium 1.2.3")


class Toy(gym.Env):
    """Seven steps with a reward of 2 each."""

    action_space = gym.spaces.Discrete(4)
    observation_space = gym.spaces.Box(0, 255, (3, 16, 16), np.uint8)

    def reset(self, seed=None, options=None):
        self.t = 0
        return self.observation_space.low, {}

    def step(self, action):
        self.t += 1
        return self.observation_space.low, 2.0, self.t >= 7, False, {}


def test_statistics_inside_or_outside_of_a_wrapper(script):
    """Whole episodes, unshaped; also those of a same-step SyncVectorEnv, which reports them in final_info."""

    def shaped():
        return gym.wrappers.TransformReward(gym.wrappers.RecordEpisodeStatistics(Toy()), lambda x: 9 * x)

    inside = gym.vector.SyncVectorEnv([shaped] * 4, autoreset_mode=SAME_STEP)
    plain = gym.vector.SyncVectorEnv([Toy] * 4, autoreset_mode=SAME_STEP)
    for name, envs in ("a", RecordEpisodeStatistics(plain)), ("b", inside):
        result = script.train(envs, run_name=name)
        assert (result["episode/return"], result["episode/length"]) == (14, 7)
    with pytest.raises(script.module.UsageError, match="RecordEpisodeStatistics"):
        script.module.ended_episodes({"episode": {"r": np.zeros(2), "l": np.zeros(2)}})  # no "_episode"


def test_play(script, capfd):
    """As many episodes in each environment, without dropout; episodes that do not end are mentioned once."""
    agent, modes = script.module.Agent(script.shape, 4, script.module.Args(channels=(4, 4, 4))), []
    agent.register_forward_hook(lambda *_: modes.append(agent.training))
    before = torch.get_rng_state()
    # Short ones do not crowd out long ones: the true mean is (2 + 800) / 2
    games = [[(2 * np.ones(steps, np.float32), "terminated")] for steps in (1, 400)]
    episodes = script.module.play(agent, script.fake(episodes=games), 3, seed=0)
    assert sorted(episodes) == [(0, 2, 1)] * 3 + [(1, 800, 400)] * 3
    assert not capfd.readouterr().out
    script.module.play(agent, script.fake(episodes=[[(np.zeros(2100, np.float32), "terminated")]]), 1, seed=0)
    assert capfd.readouterr().out.count("1,000 steps without an end") == 1
    assert set(modes) == {False} and agent.training and torch.equal(before, torch.get_rng_state())


@each_script
def test_best_and_timed_checkpoints(script, monkeypatch):
    """best.pt has the best mean of 100 episodes, and does not postpone checkpoint.pt, due after 300 seconds."""
    saved, clock = [], [0]

    def tick(*_):
        saved.append(load(script.folder)["step"])
        clock.append(clock[-1] + 151)

    fake = types.SimpleNamespace(monotonic=lambda: clock[-1], perf_counter=time.perf_counter)
    monkeypatch.setattr(script.module, "time", fake)
    spy_on(monkeypatch, script.module.Run, "log", tick)
    games = [([paid], "terminated") for paid in 40 * [9.0] + 200 * [0.0]]
    script.train(script.fake(episodes=[games] * 4), 8)
    # The first before the first step: a run that is killed early can be resumed
    assert saved == [0, 0, 128, 128, 256, 256, 384, 384] and load(script.folder)["step"] == 512
    best = load(script.folder, "best.pt")
    assert best["step"] == (128 if script.autoreset == SAME_STEP else 256)
    assert best["best"] == load(script.folder)["best"] == 9


@each_script
def test_an_interrupted_evaluation_leaves_no_hole(script, monkeypatch):
    """Its iteration does not count, so that the resumed run writes its row."""
    monkeypatch.setattr(script.module, "evaluate", stop)
    with pytest.raises(KeyboardInterrupt):
        script.train(script.fake(), 3, eval_episodes=2, eval_every=2 * ITERATION)
    assert [row["step"] for row in rows(script.folder)] == ["64"] and load(script.folder)["step"] == 64


@each_script
def test_resume_continues_the_learner(script, monkeypatch):
    """It begins with what was saved, weights, moments, statistics, counters, flags; its episodes are others."""
    names, seed = [], script.module.stream_seed
    monkeypatch.setattr(script.module, "stream_seed", lambda number, name: names[-1].add(name) or seed(number, name))

    def run(main, *flags):
        names.append(set())
        return main(*flags), load(script.folder)

    assert SHORT[SHORT.index("--eval-episodes") + 1] == 0  # never, whatever --eval-every says
    code, first = run(script.main, *SHORT, "--run-name", "a", "--lr", 1e-3, "--gamma", 0.5, "--eval-every", 1)
    assert code == 0
    first["best"] = 12.5
    torch.save(first, script.folder / "best.pt")  # newer than checkpoint.pt: a worse agent must not replace it
    flags = ("--total-timesteps", 2 * ITERATION, "--gamma", 0.7, "--adam-eps", 1e-3)
    with monkeypatch.context() as patch:
        patch.setattr(script.module, "sample", stop)  # before anything is learned
        if hasattr(script.module, "Actors"):
            patch.setattr(script.module.Actors, "datasets", lambda *_: (stop() for _ in range(1)))
        code, again = run(script.resume, *flags)
    assert code == 130 and again["optimizer"]["param_groups"][0]["eps"] == 1e-3
    for part in first.keys() - {"args"}:
        kept = [x[part]["state"] if "optimizer" in part else x[part] for x in (again, first)]
        assert equal(*kept), part
    assert again["args"] == first["args"] | dict(total_timesteps=2 * ITERATION, gamma=0.7, adam_eps=1e-3)
    code, last = run(script.resume, *flags)
    assert code == 0 and last["step"] == 2 * ITERATION and not equal(last["agent"], first["agent"])
    assert [row["step"] for row in rows(script.folder)] == ["64", "128"]
    assert names[1] == names[2] and not names[0] & names[1] and 0 < len(names[0]) == len(names[1])
    assert run(script.resume)[0] == 0  # it is finished
    assert (script.folder / f"config-{ITERATION}.json").exists()


@each_script
@pytest.mark.parametrize("failure", ["environment", "loss", "weights", "log"])
def test_a_failure_keeps_the_last_checkpoint(script, failure, monkeypatch):
    """Errors in an environment, a loss or a weight that is NaN, in the second iteration, leave that of the first.

    A log that cannot be written (a full quota, a lost network drive) costs nothing. Nothing is left running.
    """
    envs, threads = script.fake(), threading.active_count()
    step, learn, log = envs.step, script.module.learn, script.module.SummaryWriter.flush
    at = 16 + 5 + 8 * ("--warmup-steps" in KINDS[script.name])

    def failing_step(actions):
        obs, reward, *rest = step(actions)
        if len(envs.actions) == at and failure == "environment":
            raise ZeroDivisionError
        if len(envs.actions) == at and failure == "loss":
            reward *= np.nan
        return obs, reward, *rest

    def spoiling_learn(*arguments):
        means = learn(*arguments)
        *_, net = (x for x in arguments if isinstance(x, torch.nn.Module))  # RND's and SND's own, else the agent
        if len(envs.actions) > at and failure == "weights":
            next(net.parameters()).data[0] = torch.nan
        return means

    def failing_flush(writer):
        if len(envs.actions) > at and failure == "log":
            raise OSError
        log(writer)

    monkeypatch.setattr(envs, "step", failing_step)
    monkeypatch.setattr(script.module, "learn", spoiling_learn)
    monkeypatch.setattr(script.module.SummaryWriter, "flush", failing_flush)
    error = dict(environment=ZeroDivisionError, log=OSError).get(failure, FloatingPointError)
    with pytest.raises(error):
        script.train(envs, 3, checkpoint_every=300 if failure == "log" else 0)
    assert load(script.folder)["step"] == (2 if failure == "log" else 1) * ITERATION
    assert len(rows(script.folder)) == (2 if failure in ("weights", "log") else 1)
    assert threads_end(threads + 1)  # PyTorch's autograd may have started its own


def threads_end(limit):
    """Whether at most so many are left: an actor's thread may end a moment later."""
    end = time.monotonic() + 10
    while threading.active_count() > limit and time.monotonic() < end:
        time.sleep(0.1)
    return threading.active_count() <= limit


@each_script
def test_a_sweep_in_one_process(script):
    """Runs started in the same second get a folder each, and leave no thread and no open file."""
    counts = []
    for i in range(4):
        script.train(script.fake(), run_name="")
        assert i < 2 or threads_end(counts[1][0])
        counts.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    assert counts[3][1] <= counts[1][1]
    assert len(list(Path("runs").iterdir())) == 4


def test_a_second_signal_does_not_cut_the_saving_short(script, monkeypatch, capfd):
    stopped = []

    def signals(*_):
        stopped.append(True)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)

    def saved(result, state, path):
        assert Path(path).name != "checkpoint.pt"  # written aside, then renamed
        if stopped:
            signals()

    spy_on(monkeypatch, torch, "save", saved)
    spy_on(monkeypatch, script.module, "sample", signals)
    before = {number: signal.signal(number, script.module.interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert script.main("--total-timesteps", ITERATION, "--run-name", "a") == 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert load(script.folder)["step"] == 0 and "--resume runs/a" in capfd.readouterr().out
    assert len(stopped) == 2


WORKERS = """
import gymnasium as gym
sys.path.append({tests!r})
from test_plumbing import Toy

def make_workers(args, num_envs, seed, test=False):
    mode = gym.vector.AutoresetMode.SAME_STEP
    return gym.wrappers.vector.RecordEpisodeStatistics(gym.vector.AsyncVectorEnv([Toy] * num_envs, autoreset_mode=mode))

if __name__ == "__main__":
"""


def test_signals(script):
    """A copy in an empty folder, under another name, stopped and resumed again and again.

    Signals go to the whole process group, as Ctrl-C does: the environments' worker processes end first.
    """
    text = (ROOT / "ppo_procgen.py").read_text()
    text = text.replace('if __name__ == "__main__":\n', WORKERS.format(tests=str(ROOT / "tests")))
    Path("mine.py").write_text(text.replace("sys.exit(main())", "sys.exit(main(make_envs=make_workers))"))
    flags = [*PROCGEN.split(), "--run-name", "a", "--total-timesteps", "1000000", "--checkpoint-every", "0"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    pipes["env"] = os.environ | {"RANK": "1"}  # without torchrun it does not mean that another rank writes
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen([sys.executable, "mine.py", *flags], **pipes)
        lines = (line for line in process.stdout if line.startswith("step "))
        next(lines), next(lines)
        os.killpg(process.pid, number)
        out, error = process.communicate(timeout=120)
        saved = load(script.folder)
        message = f"stopped at step {saved['step']:,}: python mine.py --resume runs/a continues\n"
        killed = number == signal.SIGKILL  # at most the last iteration is lost
        assert process.returncode == (-number if killed else 130), error
        assert (message in out) != killed, out + error
        flags = ["--resume", "runs/a"]
    script.go_on(script.fake(), saved["step"] // ITERATION + 1, eval_episodes=0)
    steps = [int(row["step"]) for row in rows(script.folder)]
    assert steps == list(range(ITERATION, saved["step"] + ITERATION + 1, ITERATION))


def test_flags_built_in_python_become_plain(script):
    """NumPy's numbers, a single rate, YAML's text: the checkpoint has Python's own types and can be read."""
    options = dict(gamma=np.float64(0.98), num_steps=np.int64(16), clip=np.float32(0.25), lr=[0, "1e-4", 1000, 0.0])
    script.train(script.fake(), **options, ent_coef=3e-4, total_timesteps=np.float64(ITERATION))
    saved = load(script.folder)["args"]
    assert saved["lr"] == [0, 1e-4, 1000, 0] and saved["ent_coef"] == [0, 3e-4] and saved["clip"] == 0.25
    for value in saved.values():
        assert type(value) in (bool, int, float, str, list)


@each_script
def test_every_flag_is_checked(script):
    """nan, inf and -1 for each number, other choices, surplus names."""
    wrong = {int: (-1, 1.5), float: (-1.0, math.nan, math.inf), bool: ("maybe",), tuple: ((-1.0,), (math.nan,), "x")}
    flags = vars(script.module.Args())
    tried = [("num_envs", 0), ("num_steps", 0), ("surplus", 1)]
    tried += [(name, 1.5) for name in ("gamma", "gae_lambda", "repeat_action_probability") if name in flags]
    for name, default in flags.items():
        if name not in ("env_id", "run_dir", "run_name"):
            tried += [(name, value) for value in wrong.get(type(default), ("x", 3))]
    assert len(tried) > 50
    for name, value in tried:
        with pytest.raises(pydantic.ValidationError, match=name):
            script.module.Args(**{name: value})


OWN_FIELDS = """    target_kl: float | None = None  # stop early
    data: Path = Path("x")
    sizes: list[int] = Field(default_factory=lambda: [1])
    offset: float = -1.5
    seed: NonNegative"""


def test_fields_as_people_add_them(script, monkeypatch, capfd):
    """A copied file with new fields trains and resumes; CleanRL's `float = None` gets one sentence."""
    text = (ROOT / "ppo_procgen.py").read_text()
    Path("more_fields.py").write_text(text.replace("    seed: NonNegative", OWN_FIELDS))
    Path("cleanrl_field.py").write_text(text.replace("    seed: NonN", "    target_kl: float = None\n    seed: NonN"))
    monkeypatch.syspath_prepend(".")
    script.module = importlib.import_module("more_fields")
    assert script.main(*SHORT, *"--run-name a --target-kl 0.5 --data y --sizes 1 2 --offset -2".split()) == 0
    assert script.resume("--total-timesteps", 2 * ITERATION) == 0
    saved = load(script.folder)["args"]
    assert (saved["target_kl"], saved["data"], saved["sizes"], saved["offset"]) == (0.5, "y", [1, 2], -2)
    capfd.readouterr()
    script.module = importlib.import_module("cleanrl_field")
    assert script.main() == 2
    error = capfd.readouterr().err
    assert "target_kl" in error and error.count("\n") == 1, error


BAD = [  # flags, and what the message must hold
    ("--lr 1e-3 0", "lr"),
    ("--gamma 2", "gamma"),
    ("--surplus 1", "--surplus"),
    ("--total-timesteps 1", "--total-timesteps 1 64"),
    ("--env-id nogame", "--env-id nogame"),
    ("--device cuda:99", "--device cuda:99"),
    ("--run-name b", "runs/b"),
    ("--resume runs/none", "--resume runs/none"),
]


@each_script
def test_bad_input(script, capfd, tmp_path):
    """Exit code 2 and a message that names the flag; nothing is written."""
    (tmp_path / "runs/b").mkdir(parents=True)
    only = [("--preset openai --resume runs/b", "--resume --preset")] if script.name == "ppo_procgen" else []
    for flags, words in BAD + only:
        assert script.main("--total-timesteps", ITERATION, *flags.split()) == 2, flags
        error = capfd.readouterr().err
        assert "Traceback" not in error and all(word in error for word in words.split()), error
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["b", "runs"]


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_bad_checkpoints(script, capfd):
    """One line, exit code 2, nothing changed, and a hostile file runs no code; `main` runs in a thread."""
    thread = threading.Thread(target=script.main, args=(*SHORT, "--run-name", "a"))
    thread.start()
    thread.join()
    path, saved = script.folder / "checkpoint.pt", load(script.folder)
    whole = path.read_bytes()
    older = saved | dict(args=saved["args"] | dict(quiet=False))
    for bad in (b"", whole[:3000], saved | dict(args=Bomb()), older, [1, 2]):
        if isinstance(bad, bytes):
            path.write_bytes(bad)
        else:
            torch.save(bad, path)
        before = {file.name: file.read_bytes() for file in script.folder.iterdir()}
        capfd.readouterr()
        assert script.resume("--total-timesteps", 2 * ITERATION) == 2
        error = capfd.readouterr().err
        assert error.count("\n") == 1 and "--resume runs/a" in error and "f996cf0" in error, error
        assert before == {file.name: file.read_bytes() for file in script.folder.iterdir()}
        assert not os.path.exists("harm")
