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


def write(
    results, suite, name, mean, steps=7_996_800, error=None, curve=((4_000_000, 1.0, 2), (7_996_800, 3.0, 1)), **more
):
    (job,) = run.jobs_of(suite, name)
    found = dict(command=" ".join(job.command), status="failed" if error else "done", error=error, steps=steps)
    found |= dict(gpu=None, cpu="CPU", cores=2, git="abc") | more
    splits = {"game" if "atari" in name else "test": dict(returns=[mean], mean=mean, stderr=0.5)}
    found |= dict(seed=int(name[-1]), eval=None if error else dict(splits=splits))
    path = results / suite / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))
    rows = "".join(f"{step},{value},{games}\n" for step, value, games in curve)
    path.with_suffix(".csv").write_text("step,episode/return,episode/count\n" + rows)


def rows(text, start):
    return [[x.strip() for x in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith(f"| {start}")]


def test_committed_tables_are_generated():
    """Nobody edited them, nobody forgot to generate them."""
    assert report.main(["--check"]) == 0


def test_tables_by_hand(tmp_path):
    """One seed says so; a gap stands beside its published number; a failure shows its error."""
    write(tmp_path, "gpu", "ppo_procgen/bigfish/seed1", 12.0)
    write(tmp_path, "gpu", "ppo_procgen/coinrun/seed1", 0.0, error="Traceback\nppo_procgen.py: no memory | left")
    text = report.report(tmp_path)
    bigfish, coinrun, starpilot = (
        next(row for row in rows(text.split("## gpu")[1], f"`ppo_procgen/{game}`"))
        for game in ("bigfish", "coinrun", "starpilot")
    )
    assert bigfish[1:5] == ["bigfish (test)", "7,996,800", "1 seed", "12.00 (+- 0.50 over games)"]
    assert bigfish[6] == "3.00 (1 games)"
    assert bigfish[7].startswith("9.57, OpenAI's PPO (") and "; 26.28, the competition entry (" in bigfish[7]
    assert bigfish[8:] == ["+2.43, -14.28", "CPU, 2 cores", "abc"]
    assert "failed: ppo_procgen.py: no memory / left" in coinrun and coinrun[3] == "0"
    assert starpilot[2] == "8,000,000" and starpilot[4] == "**not run**" and starpilot[7].startswith("29.5")
    failed = [line for line in report.short_table(tmp_path) if "coinrun" in line]  # the README's
    assert failed == [
        "| gpu, `ppo_procgen`, coinrun | 8,000,000 | 0 seeds, 1 failed | failed: ppo_procgen.py: no memory / left | - |"
    ]


def test_results_of_other_flags_do_not_count(tmp_path):
    """The suite was changed after a seed was run: its command is no longer that of the row."""
    for seed, more in ((1, {}), (2, {}), (3, dict(command="python ppo_procgen.py --env-id starpilot --lr 1e-1"))):
        write(tmp_path, "cpu", f"ppo_procgen/starpilot/seed{seed}", float(seed), 61_440, **more)
    (row,) = rows(report.report(tmp_path).split("## cpu")[1], "`ppo_procgen/starpilot` | starpilot (test)")
    assert row[3:5] == ["2 seeds", "1.50 +- 0.50"]


def test_revisions_and_machines_of_all_seeds(tmp_path):
    write(tmp_path, "cpu", "ppo_procgen/starpilot/seed1", 1.0, 61_440, git="1" * 40, git_before=["2" * 40])
    write(tmp_path, "cpu", "ppo_procgen/starpilot/seed2", 2.0, 61_440, git="1" * 40 + "-dirty", cpu="Other")
    (row,) = rows(report.report(tmp_path).split("## cpu")[1], "`ppo_procgen/starpilot` | starpilot (test)")
    assert row[9:] == ["CPU, 2 cores; Other, 2 cores", "2222222, 1111111, 1111111-dirty"]


def test_seeds(tmp_path):
    """Mean and standard error over seeds; with three the interquartile mean in its interval."""
    scores = [1.0, 2.0, 6.0]
    for seed, score in enumerate(scores, 1):
        curve = ((100, 0.0, 5), (61_000, score, 1), (61_440, score + 1, 3))  # three games of four have one more
        write(tmp_path, "cpu", f"ppo_procgen/starpilot/seed{seed}", score, 61_440, curve=curve)
    (row,) = [row for row in rows(report.report(tmp_path), "`ppo_procgen/starpilot`") if "61,440" in row]
    error = np.std(scores, ddof=1) / 3**0.5
    assert row[3:5] == ["3 seeds", f"3.00 +- {error:.2f}"] and row[6] == f"3.75 +- {error:.2f} (12 games)"
    assert row[5] == "3.00 (1.00 to 6.00)" and row[7:9] == ["none at these steps", "-"]
    write(tmp_path, "cpu", "ppo_procgen/starpilot/seed3", 99.0, 61_440, error="gone", curve=((61_440, 99.0, 1),))
    (row,) = [row for row in rows(report.report(tmp_path), "`ppo_procgen/starpilot`") if "61,440" in row]
    assert row[3:5] == ["2 seeds, 1 failed", "1.50 +- 0.50"]  # nothing of a failed seed
    assert row[6] == "2.25 +- 0.50 (8 games)"
    write(tmp_path, "cpu", "ppo_procgen/starpilot/seed3", 99.0, 61_440, curve=((100, 1.0, 5),))  # long games at its end
    (row,) = [row for row in rows(report.report(tmp_path), "`ppo_procgen/starpilot`") if "61,440" in row]
    assert row[3] == "3 seeds" and row[6] == "2.25 +- 0.50 (8 games, 2 of 3 seeds)"


def test_intervals():
    """Of six seeds the middle four count; the same seeds are drawn each time, since `--check` compares texts."""
    scores = [5.45, 6.56, 5.25, 5.22, 6.79, 4.3]
    mean, low, high = map(float, re.findall(r"[\d.]+", report.interval(scores)))
    assert mean == pytest.approx(np.mean(sorted(scores)[1:5]), abs=0.005) and 4.3 < low < mean < high < 6.79
    assert report.interval(scores) == report.interval(scores) and report.interval(scores[:2]) == "-"


def test_splits_have_their_own_published_numbers(tmp_path):
    """The 200-level setting: training levels beside OpenAI's training return, all levels beside its test return."""
    points, job = report.reference(), run.jobs_of("gpu", "ppo_procgen-openai")[0]
    for split, series in (("train", "train200_PPO"), ("test", "test_full_PPO")):
        (found,) = report.published(job, split, 25_000_000, points)
        assert found[0] == points["procgen", "coinrun", series][25_001_984]
    (one_million,) = run.jobs_of("two_cores", "ppo_procgen-openai/starpilot/seed1")  # --num-levels 0: all of them
    assert report.published(one_million, "test", 1_000_000, points)[0][1:] == ("OpenAI's PPO", "training return")
    curve = report.checkpoints(job, 25_000_000, points)[0][1]
    assert curve[-1] == (25_001_984, points["procgen", "coinrun", "train200_PPO"][25_001_984])


def test_another_folder_of_results(tmp_path, capsys):
    """report.py --results: what run.py --results wrote, tabulated there; the repository's own files stay."""
    write(tmp_path, "gpu", "ppo_procgen/bigfish/seed1", 12.0)
    before = (ROOT / "benchmark" / "README.md").read_text()
    assert report.main(["--results", str(tmp_path)]) == 0 and "12.00 (+- 0.50" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "index.html").exists() and (tmp_path / "plots" / "gpu_ppo_procgen_bigfish.png").exists()
    assert (ROOT / "benchmark" / "README.md").read_text() == before
    with pytest.raises(SystemExit):
        report.main(["--results", str(tmp_path / "nowhere")])
    assert "no such folder" in capsys.readouterr().err


def test_published_is_the_nearest_within_a_tenth():
    job, points = run.jobs_of("gpu", "ppo_procgen/bigfish")[0], report.reference()
    series = points["procgen", "bigfish", "all_levels_PPO"]
    assert report.published(job, "test", 8_400_000, points)[0][0] == series[7_995_392]
    assert report.published(job, "test", 6_000_000, points) == []
    montezuma = run.jobs_of("gpu", "ppo_atari_snd")[0]  # published in frames, four to an agent step
    assert report.published(montezuma, "game", 128_000_000, points)[0][0] == pytest.approx(13_213, abs=10)


def test_page_and_plots(tmp_path):
    """One file that needs no other, with every cell's command; a plot for every curve."""
    write(tmp_path, "gpu", "ppo_procgen/bigfish/seed1", 12.0)
    page = report.page(tmp_path)
    assert "http" not in page.split("<script>")[0] and "src=" not in page and "href=" not in page
    data = json.loads(re.search(r"const cells = (.*);\n", page)[1])
    assert len(data) == len(report.cells(tmp_path)) and data[0]["command"].startswith("python ")
    (cell,) = [cell for cell in data if cell["n"]]
    assert cell["game"] == "bigfish" and cell["curves"] == [[[4_000_000, 1.0], [7_996_800, 3.0]]] and cell["known"]
    report.plots(tmp_path)
    (picture,) = (tmp_path / "plots").iterdir()
    assert picture.read_bytes().startswith(b"\x89PNG")


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
    assert body.count("<tr") == len(cells) + 1 and body.count("<option") == 2 + len(
        {cell["job"].script for cell in cells}
    ) + len({cell["job"].game for cell in cells})
    size = ["--window-size=1400,2000", f"--screenshot={picture}"]
    subprocess.run([*command, *size, page.as_uri()], capture_output=True, timeout=120, check=True)
    assert picture.stat().st_size > 20_000


def test_marked_tables_are_filled(tmp_path):
    """Only what stands between the marks is written, and twice is once."""
    write(tmp_path, "gpu", "ppo_procgen/bigfish/seed1", 12.0)
    (tmp_path / "floor").mkdir()
    shares = dict(learner_share=0.75, acting_share=0.5, paused_share=0.6, acting_batch=16)
    shares |= dict(learner_shares=[0.75, 0.7, 0.9], acting_shares=[0.5, 0.5, 0.52])
    rates = dict(layers_alone_rows_per_s=1000, layers_alone_gflops=50, learner_rows_per_s=750, forward_rows_per_s=200)
    rates |= dict(acting_rows_per_s=100, matrix_product_gflops=80, update_shares=dict(layers=0.7, none=0.0, rest=0.3))
    (tmp_path / "floor" / "x.json").write_text(json.dumps(dict(script="appo_atari", flags="--sync") | shares | rates))
    text = "a\n<!-- results -->\nold\n<!-- end of results -->\nb\n<!-- floor -->\n<!-- end of floor -->\nc"
    done = report.filled(text, tmp_path)
    assert report.filled(done, tmp_path) == done and done.startswith("a\n<!-- results -->\n| ") and "old" not in done
    assert done.endswith("<!-- end of floor -->\nc") and "\nb\n" in done
    (line,) = (line for line in done.splitlines() if "bigfish" in line)
    assert "12.00 (+- 0.50 over games)" in line and "1 seed" in line and "9.57, OpenAI's PPO" in line
    (line,) = rows(done, "`appo_atari --sync`")
    assert line[2:] == [
        "1,000 rows/s, 50 GFLOP/s",
        "750",
        "**0.75** (0.70 to 0.90)",
        "70 layers, 30 rest",
        "200 (batch 16)",
        "100",
        "**0.50** (0.50 to 0.52); 0.60",
    ]


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
