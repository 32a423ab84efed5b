"""benchmark/report.py: what the tables say is what the results say."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))
import report  # noqa: E402
import run  # noqa: E402

CURVE = ((4_000_000, 1.0, 2), (7_996_800, 3.0, 1))


def write(results, name, mean, suite="gpu", steps=7_996_800, error=None, curve=CURVE, **more):
    (job,) = run.jobs_of(suite, name)
    found = dict(command=" ".join(job.command), status="failed" if error else "done", error=error, steps=steps)
    found |= dict(gpu=None, cpu="CPU", cores=2, git="abc", seed=int(name[-1])) | more
    split = dict(returns=[mean], mean=mean, stderr=0.5)
    found["eval"] = None if error else dict(splits=dict(test=split))
    path = results / suite / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))
    rows = "".join(f"{step},{value},{games}\n" for step, value, games in curve)
    path.with_suffix(".csv").write_text("step,episode/return,episode/count\n" + rows)


def write_seed(results, seed, mean, **more):
    write(results, f"ppo_procgen/starpilot/seed{seed}", mean, "cpu", 61_440, **more)


def rows(text, start):
    return [[x.strip() for x in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith(f"| {start}")]


def starpilot(results):
    """The row of the seeds of `write_seed`."""
    (row,) = rows(report.report(results).split("## cpu")[1], "`ppo_procgen/starpilot` | starpilot (test)")
    return row


def test_committed_tables_are_generated():
    """Nobody edited them, nobody forgot to generate them."""
    assert report.main(["--check"]) == 0


def test_folder_of_results(tmp_path, capsys):
    """Tables, page and plots, all there: one seed says so, a gap has its published number, a failure its error."""
    write(tmp_path, "ppo_procgen/bigfish/seed1", 12.0)
    write(tmp_path, "ppo_procgen/coinrun/seed1", 0.0, error="Traceback\nppo_procgen.py: no memory | left")
    before = (ROOT / "benchmark" / "README.md").read_text()
    assert report.main(["--results", str(tmp_path)]) == 0
    assert (ROOT / "benchmark" / "README.md").read_text() == before
    text = (tmp_path / "README.md").read_text().split("## gpu")[1]
    games = ("bigfish", "coinrun", "starpilot")
    (bigfish,), (coinrun,), (gap,) = (rows(text, f"`ppo_procgen/{game}`") for game in games)
    assert bigfish[1:5] == ["bigfish (test)", "7,996,800", "1 seed", "12.00 (+- 0.50 over games)"]
    assert bigfish[6] == "3.00 (1 games)"
    assert bigfish[7].startswith("9.57, OpenAI's PPO (") and "; 26.28, the competition entry (" in bigfish[7]
    assert bigfish[8:] == ["+2.43, -14.28", "CPU, 2 cores", "abc"]
    assert coinrun[3:5] == ["0", "failed: ppo_procgen.py: no memory / left"]
    assert gap[2] == "8,000,000" and gap[4] == "**not run**" and gap[7].startswith("29.5")

    page = (tmp_path / "index.html").read_text()
    assert "http" not in page.split("<script>")[0] and "src=" not in page and "href=" not in page
    data = json.loads(re.search(r"const cells = (.*);\n", page)[1])
    assert len(data) == len(report.cells(tmp_path)) and data[0]["command"].startswith("python ")
    (cell,) = [cell for cell in data if cell["n"]]
    assert cell["game"] == "bigfish" and cell["curves"] == [[[4_000_000, 1.0], [7_996_800, 3.0]]] and cell["known"]
    pictures = {path.name: path.read_bytes()[:4] for path in (tmp_path / "plots").iterdir()}
    assert pictures == {"curves.png": b"\x89PNG"}

    with pytest.raises(SystemExit):
        report.main(["--results", str(tmp_path / "nowhere")])
    assert "no such folder" in capsys.readouterr().err


def test_seeds(tmp_path):
    """Mean and error over seeds, with three the interquartile mean in its interval; all revisions and machines."""
    scores, hashes = [1.0, 2.0, 6.0], ["1" * 40, "1" * 40, "1" * 40 + "-dirty"]
    for seed, (score, git) in enumerate(zip(scores, hashes, strict=True), 1):
        curve = ((100, 0.0, 5), (61_000, score, 1), (61_440, score + 1, 3))  # three games of four have one more
        before = dict(git_before=["2" * 40]) if seed == 1 else {}
        write_seed(tmp_path, seed, score, curve=curve, git=git, cpu="Other" if seed == 2 else "CPU", **before)
    error = np.std(scores, ddof=1) / 3**0.5
    row = starpilot(tmp_path)
    assert row[3:6] == ["3 seeds", f"3.00 +- {error:.2f}", "3.00 (1.00 to 6.00)"]
    assert row[6:9] == [f"3.75 +- {error:.2f} (12 games)", "none at these steps", "-"]
    assert row[9:] == ["CPU, 2 cores; Other, 2 cores", "2222222, 1111111, 1111111-dirty"]
    write_seed(tmp_path, 3, 99.0, error="gone", curve=((61_440, 99.0, 1),))
    row = starpilot(tmp_path)  # nothing of a failed seed
    assert row[3:5] == ["2 seeds, 1 failed", "1.50 +- 0.50"] and row[6] == "2.25 +- 0.50 (8 games)"
    write_seed(tmp_path, 3, 99.0, command="python ppo_procgen.py --env-id starpilot --lr 1e-1")
    assert starpilot(tmp_path)[3:5] == ["2 seeds", "1.50 +- 0.50"]  # nor of one with the suite's earlier flags
    write_seed(tmp_path, 3, 99.0, curve=((100, 1.0, 5),))
    row = starpilot(tmp_path)  # long games at its end
    assert row[3] == "3 seeds" and row[6] == "2.25 +- 0.50 (8 games, 2 of 3 seeds)"


def test_intervals():
    """Of six seeds the middle four count; the same seeds are drawn each time, since `--check` compares texts."""
    scores = [5.45, 6.56, 5.25, 5.22, 6.79, 4.3]
    mean, low, high = map(float, re.findall(r"[\d.]+", report.interval(scores)))
    assert mean == pytest.approx(np.mean(sorted(scores)[1:5]), abs=0.005) and 4.3 < low < mean < high < 6.79
    assert report.interval(scores) == report.interval(scores) and report.interval(scores[:2]) == "-"


def test_smooth():
    """Of each window its last step, and the mean over its games, of which long ones are few."""
    rows = [(10, 1.0, 3), (90, 5.0, 1), (110, 7.0, 2)]
    assert report.smooth(rows, 100) == ([90, 110], [2.0, 7.0])


def test_published_numbers():
    """The nearest step within a tenth; frames are four to a step; each split of the 200-level setting has its own."""
    points, (openai,) = report.reference(), run.jobs_of("gpu", "ppo_procgen-openai")
    (bigfish,), (montezuma,) = run.jobs_of("gpu", "ppo_procgen/bigfish"), run.jobs_of("gpu", "ppo_atari_snd")
    series = points["procgen", "bigfish", "all_levels_PPO"]
    assert report.published(bigfish, "test", 8_400_000, points)[0][0] == series[7_995_392]
    assert report.published(bigfish, "test", 6_000_000, points) == []
    assert report.published(montezuma, "game", 128_000_000, points)[0][0] == pytest.approx(13_213, abs=10)
    for split, name in (("train", "train200_PPO"), ("test", "test_full_PPO")):
        (found,) = report.published(openai, split, 25_000_000, points)
        assert found[0] == points["procgen", "coinrun", name][25_001_984]
    assert report.checkpoints(openai, 25_000_000, points)[0][1][-1] == (
        25_001_984,
        points["procgen", "coinrun", "train200_PPO"][25_001_984],
    )
    (one_million,) = run.jobs_of("two_cores", "ppo_procgen-openai/starpilot/seed1")  # --num-levels 0: all of them
    assert report.published(one_million, "test", 1_000_000, points)[0][1:] == ("OpenAI's PPO", "training return")


@pytest.mark.slow
def test_page_in_a_browser(tmp_path):
    """Debian's chromium draws the committed page: the filter counts all cells, the curves are there."""
    browser = shutil.which("chromium")
    assert browser, "apt-get install chromium"
    page, picture = ROOT / "benchmark" / "results" / "index.html", tmp_path / "page.png"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run([*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120)
    body, cells = done.stdout.split("<script>")[0], report.cells()
    drawn = sum(any(curve for curve in cell["curves"].values()) for cell in cells)
    assert f"{len(cells)} cells" in body and body.count("<polyline") >= drawn > 0
    assert body.count("<tr") == len(cells) + 1
    choices = [len({getattr(cell["job"], name) for cell in cells}) + 1 for name in ("script", "game")]  # and "all"
    assert body.count("<option") == sum(choices)
    size = ["--window-size=1400,2000", f"--screenshot={picture}"]
    subprocess.run([*command, *size, page.as_uri()], capture_output=True, timeout=120, check=True)
    assert picture.stat().st_size > 20_000


def test_marked_tables_are_filled(tmp_path):
    """Only what stands between the marks is written, and twice is once."""
    write(tmp_path, "ppo_procgen/bigfish/seed1", 12.0)
    write(tmp_path, "ppo_procgen/coinrun/seed1", 0.0, error="Traceback\nno memory | left")
    (tmp_path / "floor").mkdir()
    shares = dict(learner_share=0.75, acting_share=0.5, acting_batch=16)
    shares |= dict(learner_shares=[0.75, 0.7, 0.9], acting_shares=[0.5, 0.5, 0.52])
    rates = dict(layers_alone_rows_per_s=1000, layers_alone_gflops=50, learner_rows_per_s=750, forward_rows_per_s=200)
    rates |= dict(acting_rows_per_s=100, matrix_product_gflops=80)
    (tmp_path / "floor" / "x.json").write_text(json.dumps(dict(script="appo_atari", flags="--sync") | shares | rates))
    text = "a\n<!-- results -->\nold\n<!-- end of results -->\nb\n<!-- floor -->\n<!-- end of floor -->\nc"
    done = report.filled(text, tmp_path)
    assert report.filled(done, tmp_path) == done and done.startswith("a\n<!-- results -->\n| ") and "old" not in done
    assert done.endswith("<!-- end of floor -->\nc") and "\nb\n" in done
    (line,) = (line for line in done.splitlines() if "bigfish" in line)
    assert "| 1 seed | 12.00 (+- 0.50 over games) | 9.57, OpenAI's PPO" in line
    assert "| gpu, `ppo_procgen`, coinrun | 8,000,000 | 0 seeds, 1 failed | failed: no memory / left | - |" in done
    (line,) = rows(done, "`appo_atari --sync`")
    assert line[2:6] == ["1,000 rows/s, 50 GFLOP/s", "750", "**0.75** (0.70 to 0.90)", "200 (batch 16)"]
    assert line[6:] == ["100", "**0.50** (0.50 to 0.52)"]


def test_speed_rows(tmp_path):
    """A ratio is a median over pairs, with its range; rows beside CleanRL come first; the processor is named."""
    (tmp_path / "speed").mkdir()
    ours = [dict(sps=sps, peak_gib=peak, env_only_sps=5000.0) for sps, peak in ((300.0, 1.0), (330.0, 2.0))]
    theirs = [dict(sps=150.0, peak_gib=float("nan"), env_only_sps=float("nan"))] * 2
    shared = dict(git="0123456789-dirty", wall_ratios=[2.0, 2.2], hardware="X (AVX2), 2 cores, no GPU, torch 2")
    for name, kind, more in (("a", "sb3", {}), ("b", "cleanrl", dict(source="abcdefghij"))):
        command = f"python benchmark/speed.py appo_atari --against {kind} --json z -- --env-id Pong"
        found = shared | dict(command=command, results={"script": ours, kind: theirs}, cpu_ratios=[float("nan")] * 2)
        (tmp_path / "speed" / f"{name}.json").write_text(json.dumps(found | more))
    cleanrl, row = rows("\n".join(report.speed_table(tmp_path)), "`appo_atari")
    assert row[:4] == ["`appo_atari --env-id Pong`", "300, 330", "sb3: 150, 150", "**2.10** (2.00 to 2.20)"]
    assert row[4:] == ["-", "5,000", "2.00 GiB", "X (AVX2), 2 cores", "0123456-dirty"]
    assert cleanrl[2] == "cleanrl abcdefg: 150, 150"
