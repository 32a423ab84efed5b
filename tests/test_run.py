"""benchmark/run.py: what is done is not run again, what was killed goes on, what failed is said."""

import csv
import fcntl
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


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """run.py on cells of its own: bench(cells, *flags) -> exit status; files under tmp_path."""

    def call(rows, *flags):
        monkeypatch.setitem(run.SUITES, "smoke", rows)
        where = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
        return run.main(["--suite", "smoke", "--jobs", "2", *where, *map(str, flags)])  # one thread each

    return call


def result(tmp_path, name="ppo_procgen/leaper/seed1"):
    return json.loads((tmp_path / "results" / "smoke" / f"{name}.json").read_text())


def test_a_cell_is_run_once_and_recorded(tmp_path, bench, capsys, monkeypatch):
    cells = [("ppo_procgen", ["leaper"], 1, f"{TINY} --total-timesteps 256")]
    assert bench(cells, "--list") == 0 and capsys.readouterr().out.startswith("open     python ppo_procgen.py --env-id")
    assert bench(cells) == 0
    found = result(tmp_path)
    assert found["status"] == "done" and found["steps"] == 256 and found["error"] is None and found["cores"]
    assert found["command"] == f"python ppo_procgen.py --env-id leaper --seed 1 {TINY} --total-timesteps 256"
    assert found["versions"]["torch"] == torch.__version__ and len(found["eval"]["splits"]["test"]["returns"]) >= 2
    with open(tmp_path / "results" / "smoke" / "ppo_procgen" / "leaper" / "seed1.csv", newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["64", "128", "192", "256"]
    monkeypatch.setattr(subprocess, "Popen", None)  # nothing is started again
    assert bench(cells) == 0 and "nothing to do" in capsys.readouterr().out
    assert bench(cells, "--list") == 0 and capsys.readouterr().out.startswith("done ")


def test_a_failure_is_recorded_and_stops_nothing(tmp_path, bench, capsys):
    flags = f"{TINY} --total-timesteps 64"
    cells = [("ppo_procgen", ["nogame"], 1, flags), ("ppo_procgen", ["leaper"], 2, flags)]
    assert bench(cells) == 1
    assert "1 failed" in capsys.readouterr().out
    failed = result(tmp_path, "ppo_procgen/nogame/seed1")
    assert failed["status"] == "failed" and "--env-id nogame" in failed["error"] and failed["eval"] is None
    assert result(tmp_path)["status"] == result(tmp_path, "ppo_procgen/leaper/seed2")["status"] == "done"
    assert bench(cells) == 0  # failures are run again only on request
    assert bench(cells, "--retry") == 1


def test_out_of_time_stops_cleanly_and_goes_on(tmp_path, bench, capsys):
    cells = [("ppo_procgen", ["leaper"], 1, f"{TINY} --total-timesteps 512")]
    assert bench(cells, "--max-minutes", 0.0001) == 0
    out = capsys.readouterr().out
    assert "stopped" in out or "not begun" in out
    assert not (tmp_path / "results").exists()
    assert bench(cells) == 0 and result(tmp_path)["steps"] == 512


def test_other_flags_begin_anew(tmp_path, bench):
    """A run of earlier flags is no result of today's, also where --resume would take it: a flag that is gone, other
    numbers, other steps."""
    changes = {
        "--gamma 0.5": 128,
        "": 128,
        "--precision bf16": 128,
        "--total-timesteps 192": 192,
        "--total-timesteps 64": 64,
    }
    for change, steps in changes.items():
        flags = f"{TINY} --total-timesteps 128 {change}".strip()
        assert bench([("ppo_procgen", ["leaper"], 1, flags)]) == 0
        config = tmp_path / "runs" / run.Job("smoke", "ppo_procgen", "leaper", 1, flags).folder / "config.json"
        args, found = json.loads(config.read_text())["args"], result(tmp_path)
        assert found["status"] == "done" and found["steps"] == args["total_timesteps"] == steps
        assert args["gamma"] == (0.5 if "gamma" in change else 0.99)
        assert args["precision"] == ("bf16" if "bf16" in change else "fp32")
    assert len(list((tmp_path / "runs" / "smoke").glob("*/"))) == len(changes)


def test_what_is_done(tmp_path):
    """All iterations, and an evaluation of the last: not one of an unfinished run, nor of an older checkpoint."""
    jobs = [run.Job("smoke", "ppo_procgen", "leaper", 1, f"{TINY} --total-timesteps {total}") for total in (150, 10**6)]
    assert run.execute(jobs[0], tmp_path, 1)[1]["status"] == "done"
    assert run.execute(jobs[1], tmp_path, 1, deadline=time.time()) is None  # one iteration is done
    evaluations = [tmp_path / job.folder / "eval.json" for job in jobs]
    evaluations[1].write_text(json.dumps(dict(step=64, splits={})))
    assert run.collect(jobs[1], evaluations[1].parent)[1]["status"] == "open"
    evaluations[0].write_text(json.dumps(dict(step=64, splits={})))
    assert run.collect(jobs[0], evaluations[0].parent)[1]["status"] == "open"
    assert run.execute(jobs[0], tmp_path, 1)[1]["eval"]["step"] == 128  # plays again
    (tmp_path / jobs[0].folder / "metrics.csv").unlink()
    assert run.collect(jobs[0], tmp_path / jobs[0].folder)[1]["status"] == "open"


def test_every_revision_is_kept(tmp_path):
    """A run that was gone on with after a commit names both."""
    job = run.Job("smoke", "ppo_procgen", "leaper", 1, f"{TINY} --total-timesteps 256")
    assert run.execute(job, tmp_path, 1, deadline=time.time()) is None
    config = tmp_path / job.folder / "config.json"
    old = json.loads(config.read_text())
    config.write_text(json.dumps(old | dict(git="1234567-dirty")))
    found = run.execute(job, tmp_path, 1)[1]
    assert found["git"] == old["git"] and found["git_before"] == ["1234567-dirty"]
    assert run.execute(job, tmp_path, 1)[1]["git_before"] == ["1234567-dirty"]  # finished before


@pytest.mark.parametrize("how", ["terminate", "kill", "ctrl-c"])
def test_killed_at_any_moment_it_goes_on(tmp_path, how):
    """Three times; each time training ends too, leaves a checkpoint that is as new as --checkpoint-every asks, and goes
    on from there, never from the beginning."""

    def start(total):
        code = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmark")!r})
import run
flags = {f"{TINY} --total-timesteps {total} --checkpoint-every 0"!r}
run.SUITES["smoke"] = [("ppo_procgen", ["leaper"], 1, flags)]
sys.exit(run.main(["--suite", "smoke", "--jobs", "2", "--runs", "runs", "--results", "results"]))
"""
        return subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, start_new_session=True)

    def rows():
        return len(metrics.read_text().splitlines()) - 1 if metrics.exists() else 0

    def folder_of(total):
        flags = f"{TINY} --total-timesteps {total} --checkpoint-every 0"
        return tmp_path / "runs" / run.Job("smoke", "ppo_procgen", "leaper", 1, flags).folder

    folder, saved = folder_of(640_000), 0
    metrics = folder / "metrics.csv"
    for _ in range(3):
        process = start(640_000)  # more than it could do in the meantime
        while rows() < saved + 4:
            assert process.poll() is None and rows() >= saved
            time.sleep(0.02)
        done = rows()
        if how == "ctrl-c":
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        else:
            process.send_signal(signal.SIGTERM if how == "terminate" else signal.SIGKILL)
        process.wait()
        with open(folder.with_name(folder.name + ".lock")) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # free once training has ended, too
        step = torch.load(folder / "checkpoint.pt", weights_only=True)["step"]
        assert done - 1 <= step // 64 < 9_000  # no more than the iteration under way is lost
        saved = step // 64
    assert not (tmp_path / "results").exists()
    folder.rename(folder_of(64 * (saved + 3)))  # of all that is left, enough: three iterations
    assert start(64 * (saved + 3)).wait() == 0
    found = result(tmp_path)
    assert found["status"] == "done" and found["steps"] == 64 * (saved + 3)
    with open(tmp_path / "results/smoke/ppo_procgen/leaper/seed1.csv", newline="") as file:
        assert [int(row["iteration"]) for row in csv.DictReader(file)] == list(range(1, saved + 4))


def test_told_to_stop_it_begins_nothing(tmp_path):
    """A signal that comes while a cell waits for its lock: no training is begun, and none is left."""
    job, processes = run.Job("smoke", "ppo_procgen", "leaper", 1, f"{TINY} --total-timesteps 64000"), []
    lock = tmp_path / "runs" / f"{job.folder}.lock"
    lock.parent.mkdir(parents=True)
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert run.execute(job, tmp_path / "runs", 1, stopping=[15], processes=processes) is None
    assert run.execute(job, tmp_path / "runs", 1, stopping=[15], processes=processes) is None  # ended at once
    assert len(processes) == 1 and processes[0].poll() is not None


def test_two_invocations_share_no_folder(tmp_path, bench):
    """A cell that another run.py trains at the moment is left to it."""
    cells = [("ppo_procgen", ["leaper"], 1, f"{TINY} --total-timesteps 64")]
    (tmp_path / "runs" / "smoke").mkdir(parents=True)
    job = run.Job("smoke", *[(v, g[0], s, f) for v, g, s, f in cells][0])
    with open(tmp_path / "runs" / f"{job.folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        clock = iter(range(0, 1000, 30))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run.time, "monotonic", lambda: next(clock))
            patch.setattr(run.time, "sleep", lambda seconds: None)
            assert run.execute(job, tmp_path / "runs", 1) is None
        assert not (tmp_path / "runs" / job.folder).exists()
    assert bench(cells) == 0


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
    assert float(merged[1]["loss/value"]) == pytest.approx(
        np.mean([float(row["loss/value"]) for row in part]), rel=1e-5
    )
    assert run.thin(rows[:400]) == [row | {"episode/count": row["episode/count"]} for row in run.thin(rows[:400])]
    assert [row["step"] for row in run.thin(rows[:400])] == [str(i) for i in range(1, 401)] and run.thin([]) == []


@pytest.mark.parametrize("suite", run.SUITES)
def test_every_command_parses(suite):
    """Each literal command of every suite is one that its script takes, on a game that exists."""
    import importlib

    import tyro

    names = set()
    for job in run.jobs_of(suite):
        module = importlib.import_module(job.script)
        args = tyro.cli(module.Args, args=job.command[2:])
        args.validate()
        names.add(job.name)
        if job.seed == 1 and suite in ("procgen16", "atari57"):
            module.make_envs(args, "test", 1).close()
    assert len(names) == len(run.jobs_of(suite)) == sum(len(games) * n for _, games, n, _ in run.SUITES[suite])


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
def test_ray_cluster_of_two_nodes(tmp_path, bench, capsys):
    """Every cell is a task of the cluster, both nodes work, results and failures come back, nothing is run twice."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=1))
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        flags = f"{TINY} --total-timesteps 2048"
        cells = [("ppo_procgen", ["leaper", "nogame"], 3, flags)]
        ray_flags = ["--launcher", "ray", "--ray-address", cluster.address, "--ray-cpus", 1]
        assert bench(cells, *ray_flags) == 1
        out = capsys.readouterr().out
        nodes = {line.split(" on ")[1] for line in out.splitlines() if " on " in line}
        assert len(nodes) == 2 and out.count("done ") == 3 and out.count("failed ") == 3
        for seed in (1, 2, 3):
            found = result(tmp_path, f"ppo_procgen/leaper/seed{seed}")
            assert found["status"] == "done" and found["steps"] == 2048 and found["git"]
            assert "nogame" in result(tmp_path, f"ppo_procgen/nogame/seed{seed}")["error"]
        assert bench(cells, *ray_flags) == 0 and " on " not in capsys.readouterr().out
    finally:
        ray.shutdown()
        cluster.shutdown()
