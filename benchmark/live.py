"""A curve that follows a run: mean and spread of a metric, in the terminal or as a PNG.

    python benchmark/live.py runs/NAME                       # redrawn every ten seconds, until Ctrl-C
    python benchmark/live.py runs/NAME --png curve.png --once --metric int/reward_raw

Drawn are the mean (#) and one standard deviation to each side (.) of the last --average iterations that have a value.
It only reads metrics.csv, so it can be started and stopped while the run goes on.
"""

import argparse
import csv
import shutil
import sys
import time
from pathlib import Path

import numpy as np


def read(path: Path, metric: str):
    """Steps and values of the rows that have one; a half-written last row does not count."""
    with open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if None not in row.values()]
    if rows and metric not in rows[0]:
        raise SystemExit(f"--metric {metric}: {path} has {', '.join(name for name in rows[0])}")
    rows = [(int(row["step"]), float(row[metric])) for row in rows if row[metric]]
    return np.array(rows, dtype=float).reshape(-1, 2).T


def smooth(values, window: int):
    """Mean and deviation of each value and the window - 1 before it (fewer at the start)."""
    parts = [values[max(i + 1 - window, 0) : i + 1] for i in range(len(values))]
    return np.array([part.mean() for part in parts]), np.array([part.std() for part in parts])


def draw(steps, mean, spread, title: str, width: int, height: int) -> str:
    """The curve in characters; the mean of the rows that share a column."""
    if not len(steps):
        return f"{title}: no value yet"
    low, high = (mean - spread).min(), (mean + spread).max()
    scale, canvas = (height - 1) / max(high - low, 1e-9), np.full((height, width), " ")
    columns = ((steps - steps[0]) / max(steps[-1] - steps[0], 1) * (width - 1)).astype(int)
    for column in np.unique(columns):
        part = columns == column
        middle, around = mean[part].mean(), spread[part].mean()
        bottom, top = (round((value - low) * scale) for value in (middle - around, middle + around))
        canvas[bottom : top + 1, column] = "."
        canvas[round((middle - low) * scale), column] = "#"
    labels = [f"{high:10.4g} ", *[" " * 11] * (height - 2), f"{low:10.4g} "]
    lines = [label + "".join(row) for label, row in zip(labels, canvas[::-1], strict=True)]
    footer = f"{' ' * 11}{steps[0]:,.0f} to {steps[-1]:,.0f} steps; now {mean[-1]:.4g} +- {spread[-1]:.2g}"
    return "\n".join([title, *lines, footer])


def save(path: Path, steps, mean, spread, title: str):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.fill_between(steps, mean - spread, mean + spread, alpha=0.25, linewidth=0)
    axes.plot(steps, mean)
    axes.set(title=title, xlabel="agent steps")
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(path)  # a viewer never sees half a picture
    pyplot.close(figure)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--metric", default="episode/return", help="column of metrics.csv")
    parser.add_argument("--average", type=int, default=20, help="iterations in a mean")
    parser.add_argument("--every", type=float, default=10, help="seconds between drawings")
    parser.add_argument("--once", action="store_true", help="draw once and end")
    parser.add_argument("--png", type=Path, help="write a picture in place of the terminal (needs matplotlib)")
    options = parser.parse_args(argv)
    table = options.run / "metrics.csv"
    if options.average < 1 or not table.exists():
        print(f"no {table}, or --average below 1", file=sys.stderr)
        return 2
    try:
        while True:
            steps, values = read(table, options.metric)
            curve = (steps, *smooth(values, options.average), f"{options.run.name}: {options.metric}")
            if options.png:
                save(options.png, *curve)
            else:
                size = shutil.get_terminal_size()
                clear = "\033[H\033[2J" * (sys.stdout.isatty() and not options.once)
                print(clear + draw(*curve, max(size.columns - 12, 20), max(size.lines - 4, 5)), flush=True)
            if options.once:
                return 0
            time.sleep(options.every)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
