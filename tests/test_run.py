"""benchmark/run.py: finished jobs are not run again, killed ones continue, failures are recorded."""

import importlib.metadata
import json
import os
import pickle
import signal
import subprocess
import sys
import time

import envpool.procgen
import pandas as pd
import pytest
import run
import submitit
import torch
import tyro

from conftest import ROOT, read

TINY = "--num-envs 4 --num-steps 16 --minibatch-size 32 --channels 4 4 4 --device cpu --eval-episodes"


def job_of(total, game="starpilot", episodes=2):
    return run.Job("smoke", "ppo_procgen", game, 1, f"{TINY} {episodes} --total-timesteps {total}")


def result(tmp_path, job):
    return json.loads((tmp_path / "smoke" / f"{job.name}.json").read_text())


def flags_of(tmp_path, *flags):
    return ["--suite", "smoke", "--results", str(tmp_path), *flags]


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """bench(jobs, *flags): the exit status of run.py, in this process (submitit's debug executor)."""
    monkeypatch.setattr(submitit, "LocalExecutor", submitit.DebugExecutor)

    def main(jobs, *flags):
        monkeypatch.setitem(run.SUITES, "smoke", jobs)
        return run.main(flags_of(tmp_path, *flags))

    return main


def test_jobs_are_run_once_and_recorded(tmp_path, bench, capsys):
    """A failure does not stop the others and runs again on request only; a run without a checkpoint starts again."""
    jobs = [job_of(150, game="nogame"), job_of(150)]
    assert bench(jobs, "--list") == 0 and f"\nopen     {' '.join(jobs[1].command)}\n" in capsys.readouterr().out
    folder = tmp_path / "runs" / jobs[1].folder
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("step\n1\n")  # of a run that has no checkpoint yet
    assert bench(jobs) == 1 and "1 done, 1 failed" in capsys.readouterr().out
    failed, found = (result(tmp_path, job) for job in jobs)
    assert failed["status"] == "failed" and failed["error"].startswith("ppo_procgen.py: --env-id nogame: ")
    assert found["status"] == "done" and found["steps"] == 128 and found["error"] is None and found["cores"]
    assert found["command"] == f"python ppo_procgen.py --env-id starpilot --seed 1 {TINY} 2 --total-timesteps 150"
    assert found["versions"]["torch"] == importlib.metadata.version("torch") and found["git"] and found["cpu"]
    assert len(found["eval"]["splits"]["test"]["returns"]) >= 2
    rows = read(folder)
    assert found["train_seconds"] == pytest.approx(sum(64 / float(row["time/sps"]) for row in rows), abs=0.1)
    curve = pd.read_csv(tmp_path / "smoke" / f"{jobs[1].name}.csv")
    assert list(curve) == list(rows[0]) and list(curve["step"]) == [64, 128]
    assert bench(jobs) == 0 and "nothing to do" in capsys.readouterr().out
    assert [run.state(job_of(total), tmp_path) for total in (150, 192)] == ["done", "open"]  # other flags
    assert job_of(150).folder != job_of(192).folder
    lock = open(f"{tmp_path}/runs/{jobs[0].folder}.lock", "w")
    run.fcntl.flock(lock, run.fcntl.LOCK_EX)  # another run.py trains it
    assert bench(jobs, "--retry") == 0 and "1 busy" in capsys.readouterr().out


def test_killed_jobs_continue(tmp_path):
    """After SIGKILL of all processes at most the unsaved rows are lost; SIGTERM loses nothing and ends all of them."""
    job, history = job_of(640_000, episodes=0), []  # more than it could do in the meantime
    folder, log, iterations = tmp_path / "runs" / job.folder, tmp_path / "runs" / f"{job.folder}.log", 0
    code = f"import run, sys; run.SUITES['smoke'] = [run.{job}]; sys.exit(run.main({flags_of(tmp_path)}))"
    for number, status in ((signal.SIGKILL, -9), (signal.SIGTERM, 130)):
        started = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT / "benchmark", start_new_session=True)
        before, iterations = iterations, 0
        while iterations < before + 2:
            assert started.poll() is None
            time.sleep(0.1)
            iterations = log.read_text().count("\nstep ") if log.exists() else 0
        (os.killpg if number == signal.SIGKILL else os.kill)(started.pid, number)
        assert started.wait() == status
        rows = read(folder)
        saved = torch.load(folder / "checkpoint.pt", weights_only=True)["step"] // 64
        assert saved == len(rows) or (saved < len(rows) and number == signal.SIGKILL)
        assert rows[: len(history)] == history
        history = rows[:saved]
    with open(f"{folder}.lock") as lock:
        run.fcntl.flock(lock, run.fcntl.LOCK_EX | run.fcntl.LOCK_NB)  # free: training has ended
    short = job_of(64 * (saved + 1), episodes=0)
    folder.rename(tmp_path / "runs" / short.folder)
    code = code.replace(str(job), str(short))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "benchmark", capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"done     smoke {job.name}\n1 done\n", done.stderr
    assert result(tmp_path, short)["steps"] == 64 * (saved + 1) and result(tmp_path, short)["eval"] is None
    assert read(tmp_path / "runs" / short.folder)[:saved] == history


def test_slurm_array(tmp_path, monkeypatch):
    """sbatch gets one task per job, with the parameters; a task runs its own job and records it."""
    jobs = [job_of(64, game=game) for game in ("starpilot", "nogame", "bigfish")]
    monkeypatch.setitem(run.SUITES, "smoke", jobs)
    (tmp_path / "sbatch").write_text(f"#!/bin/bash\ncp $1 {tmp_path}/script; echo Submitted batch job 7\n")
    (tmp_path / "srun").write_text(
        '#!/bin/bash\nwhile [[ $1 == --* ]]; do [[ $1 == *ed ]] || shift; shift; done\n"$@"\n'
    )
    subprocess.run(["chmod", "+x", tmp_path / "sbatch", tmp_path / "srun"], check=True)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert run.main(flags_of(tmp_path, "--slurm", "time=90", "partition=gpu", "array_parallelism=2")) == 0
    script = (tmp_path / "script").read_text()
    lines = ("--array=0-2%2", "--partition=gpu", "--time=90", "--gpus-per-node=1", "--signal=USR2@120")
    assert {f"#SBATCH {line}" for line in lines} <= {*script.splitlines()}
    for i, job in enumerate(jobs):
        task = pickle.loads((tmp_path / "runs" / "submitit" / f"7_{i}_submitted.pkl").read_bytes())
        assert isinstance(task.function, run.Training) and task.args[0] == job
    task = dict(SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="1", SLURM_JOB_ID="8")
    subprocess.run(["bash", tmp_path / "script"], cwd=ROOT / "benchmark", env=os.environ | task, check=True)
    assert result(tmp_path, jobs[1])["status"] == "failed" and len(list(tmp_path.glob("smoke/*/*/*"))) == 1


def test_revisions_and_machines(tmp_path, monkeypatch):
    """The last start's, and those of earlier ones; one that ended before its first iteration counts for nothing."""
    job, folder, said = run.Job("smoke", "ppo_procgen", "starpilot", 1, ""), tmp_path / "run", {}
    folder.mkdir()
    monkeypatch.setattr(run.shutil, "which", lambda name: name)
    monkeypatch.setattr(run, "output_of", lambda command: said[command[0]])
    parts = ((0, "old", "GPU"), (16, "new", "GPU"), (32, "", None), (32, "old", None), (128, "new", None))
    for i, (step, git, gpu) in enumerate(parts):
        said.update({"git": git, sys.executable: gpu})
        run.note_start(job, folder)
        (folder / f"config-{step}.json").write_text(json.dumps({"args": {"threads": i}}))
    assert run.record(job, folder, tmp_path, None) == "done"
    found = result(tmp_path, job)
    assert found["git"] == "new" and found["git_before"] == ["old"] and found["cores"] == 4
    assert found["gpu"] is None and found["cpu"] and found["machines_before"] == {"GPU": 32}


def test_thin():
    """Last step, number of episodes, means over episodes or rows; empty cells do not count; at most 500 rows."""
    names = ("step", "iteration", "episode/count", "episode/return", "loss/value")
    table = [[64, 1, 2, 1, 4], [128, 2, 0, None, 5], [192, 3, 1, 4, None], [256, 4, 0, None, 1]]
    table = pd.DataFrame([*table, [320, 5, 0, None, 3]], columns=names)
    merged = run.thin(table, 2).to_csv(index=False, float_format="%.6g").splitlines()
    assert merged[1:] == ["192,3,3,2,4.5", "320,5,0,,2"]
    assert run.thin(table, 5) is table and len(run.thin(pd.concat([table] * 201))) == 335


def test_every_command_parses():
    """Each command of every suite has flags that its script knows, and a game that exists."""
    known = set(envpool.list_all_envs())
    changed = {"snd_breakout": "ppo_atari_snd", "procgen_tf_adam": "ppo_procgen"}  # importing a variant changes these
    for jobs in run.SUITES.values():
        for job in {job.variant: job for job in jobs}.values():
            tyro.cli(importlib.import_module(changed.get(job.script, job.script)).Args, args=job.command[2:])
        assert all({f"{job.game.title()}Easy-v0", f"{job.game}-v5"} & known for job in jobs)
