"""benchmark/run.py: what is done is not run again, what was killed goes on, what failed is said."""

import csv
import fcntl
import importlib
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))
import run  # noqa: E402

TINY = "--num-envs 4 --num-steps 16 --minibatch-size 32 --channels 4 4 4 --eval-episodes 2 --device cpu"


def cell(total, extra=""):
    return run.Job("smoke", "ppo_procgen", "starpilot", 1, f"{TINY} --total-timesteps {total} {extra}".strip())


def result(tmp_path, name="ppo_procgen/starpilot/seed1"):
    return json.loads((tmp_path / "results" / "smoke" / f"{name}.json").read_text())


def bench(tmp_path, monkeypatch, rows, *flags):
    """The exit status of run.py on cells of its own; files under tmp_path."""
    monkeypatch.setitem(run.SUITES, "smoke", rows)
    where = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    return run.main(["--suite", "smoke", "--jobs", "2", *where, *flags])  # one thread each


def test_cells_are_run_once_and_recorded(tmp_path, monkeypatch, capsys):
    """A failure stops nothing and is run again on request only; what was stopped too early to go on begins anew."""
    job = cell(150)
    rows = [("ppo_procgen", ["nogame", "starpilot"], 1, job.flags)]
    assert bench(tmp_path, monkeypatch, rows, "--list") == 0
    assert capsys.readouterr().out.splitlines()[1] == f"open     {' '.join(job.command)}"
    stopped = tmp_path / "runs" / job.folder
    stopped.mkdir(parents=True)
    (stopped / "config.json").write_text("{}")  # of a run that has no checkpoint yet
    assert bench(tmp_path, monkeypatch, rows) == 1
    assert "1 done, 1 failed" in capsys.readouterr().out
    failed = result(tmp_path, "ppo_procgen/nogame/seed1")
    assert failed["status"] == "failed" and "choice 'nogame' for argument" in failed["error"] and failed["eval"] is None
    found = result(tmp_path)
    assert found["status"] == "done" and found["steps"] == 128 and found["error"] is None and found["cores"]
    assert found["command"] == f"python ppo_procgen.py --env-id starpilot --seed 1 {TINY} --total-timesteps 150"
    assert found["versions"]["torch"] == torch.__version__ and found["versions"]["procgen-mirror"]
    assert found["git"] is not None and found["cpu"] and len(found["eval"]["splits"]["test"]["returns"]) >= 2
    with open(tmp_path / "results" / "smoke" / "ppo_procgen" / "starpilot" / "seed1.csv", newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["64", "128"]
    monkeypatch.setattr(subprocess, "Popen", None)  # nothing is started again
    assert bench(tmp_path, monkeypatch, rows) == 0 and "nothing to do" in capsys.readouterr().out
    with pytest.raises(TypeError):
        bench(tmp_path, monkeypatch, rows, "--retry")


def test_other_flags_begin_anew(tmp_path):
    """A result of earlier flags is none of today's, and a run of them is not gone on with."""
    changes = ["", "--gamma 0.5", "--precision bf16", "--total-timesteps 192"]
    assert len({cell(128, change).folder for change in changes}) == len(changes)
    run.record(cell(128), ("", {"status": "done", "command": " ".join(cell(128).command)}), tmp_path)
    assert [run.state(cell(128, change), tmp_path) for change in changes] == ["done", "open", "open", "open"]


@pytest.mark.parametrize(
    "steps, evaluated, status",
    [
        ([64, 128], 128, "done"),
        ([64], 64, "open"),
        ([64, 128], 64, "open"),
        ([64, 128], None, "open"),
        ([], 128, "open"),
    ],
)
def test_what_is_done(tmp_path, steps, evaluated, status):
    """All iterations, and an evaluation of the last: not one of an unfinished run, nor of an older checkpoint."""
    (tmp_path / "config.json").write_text(json.dumps({"git": "new", "args": {"total_timesteps": 150}}))
    (tmp_path / "revisions").write_text("old\nnew\nold\n")
    lines = ["step,iteration,time/sps,episode/count", *(f"{step},{step // 64},32.0,1" for step in steps)]
    (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    if evaluated:
        (tmp_path / "eval.json").write_text(json.dumps({"step": evaluated, "splits": {}}))
    found = run.collect(cell(150), tmp_path)[1]
    assert found["status"] == status and found["train_seconds"] == 2 * len(steps)
    assert found["git"] == "new" and found["git_before"] == ["old"]  # gone on with after a commit: both are named


def test_killed_it_goes_on(tmp_path):
    """Training ends with run.py, however that dies, leaves a checkpoint of its last iteration, and goes on there."""

    def start(total):
        code = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmark")!r})
import run
run.SUITES["smoke"] = [("ppo_procgen", ["starpilot"], 1, {cell(total).flags!r})]
sys.exit(run.main(["--suite", "smoke", "--jobs", "2", "--runs", "runs", "--results", "results"]))
"""
        return subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)

    folder, saved = tmp_path / "runs" / cell(640_000).folder, 0
    metrics = folder / "metrics.csv"

    def rows():
        return len(metrics.read_text().splitlines()) - 1 if metrics.exists() else 0

    for number in (signal.SIGTERM, signal.SIGKILL):
        process = start(640_000)  # more than it could do in the meantime
        while rows() < saved + 2:
            assert process.poll() is None
            time.sleep(0.02)
        done = rows()
        process.send_signal(number)
        process.wait()
        with open(folder.with_name(folder.name + ".lock")) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # free once training has ended, too
        step = torch.load(folder / "checkpoint.pt", weights_only=True)["step"]
        assert done - 1 <= step // 64 < 9_000  # no more than the iteration under way is lost
        saved = step // 64
        assert not (tmp_path / "results").exists()
    total = 64 * (saved + 2)  # of all that is left, enough
    folder.rename(tmp_path / "runs" / cell(total).folder)
    assert start(total).wait() == 0
    found = result(tmp_path)
    assert found["status"] == "done" and found["steps"] == total
    with open(tmp_path / "results/smoke/ppo_procgen/starpilot/seed1.csv", newline="") as file:
        assert [int(row["iteration"]) for row in csv.DictReader(file)] == list(range(1, saved + 3))


def test_told_to_stop_it_begins_nothing(tmp_path):
    """A signal that comes while a cell waits for its lock, or a deadline: no training is left running."""
    job, processes = cell(64_000), []
    lock = tmp_path / "runs" / f"{job.folder}.lock"
    lock.parent.mkdir(parents=True)
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert run.execute(job, tmp_path / "runs", 1, stopping=[15], processes=processes) is None
    assert run.execute(job, tmp_path / "runs", 1, stopping=[15], processes=processes) is None  # ended at once
    assert run.execute(job, tmp_path / "runs", 1, deadline=time.time() + 0.5, processes=processes) is None
    assert len(processes) == 2 and all(process.poll() is not None for process in processes)


def test_two_invocations_share_no_folder(tmp_path, monkeypatch):
    """A cell that another run.py trains at the moment is left to it."""
    job = cell(64)
    (tmp_path / "smoke").mkdir()
    with open(tmp_path / f"{job.folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        clock = iter(range(0, 1000, 30))
        monkeypatch.setattr(run.time, "monotonic", lambda: next(clock))
        monkeypatch.setattr(run.time, "sleep", lambda seconds: None)
        assert run.execute(job, tmp_path, 1) is None
    assert not (tmp_path / job.folder).exists()


def test_thin():
    """At most 500 rows; steps and games add up, returns weigh by games, empty cells do not count."""
    rng = np.random.default_rng(0)
    names = ("step", "iteration", "episode/count", "episode/return", "loss/value", "episode/rooms_ever")
    rows = [dict.fromkeys(names, "") | {"step": str(i), "iteration": str(i)} for i in range(1, 1203)]
    for row in rows:
        row["episode/count"] = str(rng.integers(0, 3))
        row["episode/return"] = str(rng.normal()) if row["episode/count"] != "0" else ""
        row["loss/value"], row["episode/rooms_ever"] = str(rng.normal()), row["step"]
    merged = run.thin(rows)
    assert len(merged) <= 500 and merged[-1]["step"] == "1202" and [row["step"] for row in merged[:2]] == ["3", "6"]
    assert sum(float(row["episode/count"]) for row in merged) == sum(float(row["episode/count"]) for row in rows)
    assert [row["episode/rooms_ever"] for row in merged] == [row["step"] for row in merged]  # a running maximum
    part = rows[3:6]
    total = sum(float(row["episode/count"]) for row in part)
    expected = sum(float(row["episode/count"]) * float(row["episode/return"] or 0) for row in part) / total
    assert float(merged[1]["episode/return"]) == pytest.approx(expected, rel=1e-5)
    mean = np.mean([float(row["loss/value"]) for row in part])
    assert float(merged[1]["loss/value"]) == pytest.approx(mean, rel=1e-5)
    assert [row["step"] for row in run.thin(rows[:400])] == [str(i) for i in range(1, 401)] and run.thin([]) == []


@pytest.mark.parametrize("suite", run.SUITES)
def test_every_command_parses(suite):
    """Each literal command of every suite is one that its script takes, on a game that exists."""
    import envpool
    import tyro

    jobs = run.jobs_of(suite)
    assert len({job.name for job in jobs}) == len(jobs) == sum(len(games) * n for _, games, n, _ in run.SUITES[suite])
    scripts = {"snd_breakout": "ppo_atari_snd"}  # importing a variant would change its script for the tests to come
    for job in {(job.script, job.flags): job for job in jobs}.values():
        module = importlib.import_module(scripts.get(job.script, job.script))
        args = tyro.cli(module.Args, args=job.command[2:])
        module.check(args)
    for script, game in {(job.script, job.game) for job in jobs}:
        module = importlib.import_module(scripts.get(script, script))
        assert game in (module.GAMES if "procgen" in script else {name[:-3] for name in envpool.list_all_envs()})


def test_slurm_prints_an_array(tmp_path, capsys):
    """One task a cell, valid shell, and each task's command names its cell alone."""
    assert run.main(["--suite", "gpu", "--launcher", "slurm", "--results", str(tmp_path)]) == 0
    script = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    cells = run.jobs_of("gpu")
    assert f"--array=0-{len(cells) - 1}\n" in script
    fake = tmp_path / "python"
    fake.write_text('#!/bin/bash\necho "$@"; exit 7\n')
    fake.chmod(0o755)
    environment = os.environ | dict(PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_ARRAY_TASK_ID="3")
    done = subprocess.run(["bash"], input=script, text=True, capture_output=True, env=environment, cwd=tmp_path)
    folders = f"--runs {tmp_path}/runs --results {tmp_path}"
    expected = f"benchmark/run.py --suite gpu --max-minutes 0 {folders} --exactly --only"
    assert done.stdout.strip() == f"{expected} {cells[3].name}"
    assert done.returncode == 7  # a failure is one for Slurm, too
    assert run.main(["--suite", "gpu", "--exactly", "--only", cells[3].name, "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.slow
def test_ray_cluster_of_two_nodes(tmp_path, monkeypatch, capsys):
    """Every cell is a task of the cluster, both nodes work, results and failures come back, nothing is run twice."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=1))
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        rows = [("ppo_procgen", ["starpilot", "nogame"], 3, f"{TINY} --total-timesteps 2048")]
        ray_flags = ["--launcher", "ray", "--ray-address", cluster.address, "--ray-cpus", "1"]
        assert bench(tmp_path, monkeypatch, rows, *ray_flags) == 1
        out = capsys.readouterr().out
        nodes = {line.split(" on ")[1] for line in out.splitlines() if " on " in line}
        assert len(nodes) == 2 and out.count("done ") == 3 and out.count("failed ") == 3
        for seed in (1, 2, 3):
            found = result(tmp_path, f"ppo_procgen/starpilot/seed{seed}")
            assert found["status"] == "done" and found["steps"] == 2048 and found["git"]
            assert "nogame" in result(tmp_path, f"ppo_procgen/nogame/seed{seed}")["error"]
        assert bench(tmp_path, monkeypatch, rows, *ray_flags) == 0 and " on " not in capsys.readouterr().out
    finally:
        ray.shutdown()
        cluster.shutdown()
