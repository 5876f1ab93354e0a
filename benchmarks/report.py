"""Tables and charts from what run.py has measured.

    python benchmarks/report.py

writes docs/benchmarks.md from all files in docs/benchmarks, and beside each file
its chart. To add one: run.py --output docs/benchmarks/NAME, without NAME.md. That of
images is storage.json, by storage.py.
"""

import argparse
import json
import statistics
import sys
import textwrap
from pathlib import Path

import pyperf
import storage_page

BASES = ["v2", "C", "cydriver", "process"]
RIVALS = ["cuckpt", "v2", "v1", "ctypes", "C", "cydriver", "pointer", "process"]
DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "benchmarks.md"
INTRODUCTION = """\
# Benchmarks

Made by `benchmarks/report.py` from what `benchmarks/run.py` measured; the files
with all values lie in `docs/benchmarks/` and are read by pyperf as well. Do not
edit this page.

A call costs about 10 ns less than that of cuda.bindings v2, an args object 15 ns less,
an error a third less, an import a tenth. A checkpoint takes as long as the driver
needs, whoever asks for it. Where cuckpt takes longer, it does more: args with pairs
copy them and keep them, a view keeps its owner, and the text of an error looks up
the cause in /proc, when somebody asks for the text.

Times are medians, and mean little on another machine. The ratios do: the rivals of
a row are measured in turn in one process, and "x v2" is the median of what cuckpt
took as a multiple of what its rival took in the same round. Where it says "at
most", that is what cuckpt promises. On a GPU the rounds are few: there, what differs
from 1 a little is chance.

| rival | what it is |
|---|---|
| v2 | `cuda.bindings._v2.driver` |
| v1 | `cuda.bindings.driver` |
| C | a hand-written extension: the floor for calls; its objects have no free list |
| ctypes | `ctypes.CDLL` |
| cydriver | `cuda.bindings.cydriver`, from Cython |
| pointer | a C function pointer, from Cython |
| process | a C program for each call, as a tool does it |
"""


class Row:
    """One case: a pyperf.Benchmark for each rival."""

    def __init__(self, name):
        self.name = name
        self.rivals = {}

    def figure(self, rival):
        """Return the median, as text with a unit; nothing if it was not measured."""
        if rival not in self.rivals:
            return ""
        benchmark = self.rivals[rival]
        return quantity(benchmark.median(), benchmark.get_unit())

    def ratio(self, rival):
        """Return what cuckpt took as a multiple of a rival, or None."""
        if rival not in self.rivals:
            return None
        own, other = (self.rivals[name].get_runs() for name in ("cuckpt", rival))
        return statistics.median(
            statistics.median(a / b for a, b in zip(x.values, y.values, strict=True))
            for x, y in zip(own, other, strict=True)
        )

    def limit(self, rival):
        """Return the most that this ratio may be, or None."""
        return self.fact("limit", rival)

    def fact(self, name, rival="cuckpt"):
        """Return a fact about the measurement."""
        return self.rivals[rival].get_metadata().get(name)


def groups(suite):
    """Return the rows of each group."""
    found = {}
    for benchmark in suite.get_benchmarks():
        facts = benchmark.get_metadata()
        rows = found.setdefault(facts["group"], {})
        row = rows.setdefault(facts["case"], Row(facts["case"]))
        row.rivals[facts["rival"]] = benchmark
    return {group: list(rows.values()) for group, rows in found.items()}


def quantity(value, unit):
    """Return a time or a size with three digits."""
    if unit == "byte":
        return f"{value / (1 << 20):.1f} MiB"
    for factor, name in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if value * factor >= 1:
            return f"{digits(value * factor)} {name}"
    return f"{digits(value * 1e9)} ns"


def digits(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def names(rows):
    """Return the rivals that a group has, in the order of `RIVALS`."""
    return [name for name in RIVALS if any(name in row.rivals for row in rows)]


def bases(rows):
    return [name for name in names(rows) if name in BASES]


def about(suite):
    """Return where and when this was measured."""
    facts = next(iter(suite)).get_metadata()
    dates = sorted(str(day)[:10] for day in suite.get_dates())
    where = [
        ("GPU", "gpu"),
        ("driver", "driver"),
        ("CPU", "cpu_model_name"),
        ("cores", "cpu_count"),
        ("system", "platform"),
        ("Python", "python_version"),
        ("cuckpt", "cuckpt"),
        ("cuda-bindings", "cuda-bindings"),
        ("Cython", "cython"),
    ]
    said = [f"{title} {facts[name]}" for title, name in where if name in facts]
    return [f"measured {dates[0]}", *said]


def markdown(suites):
    """Return the tables of all suites, which are given by the file of their chart."""
    parts = []
    for file, suite in suites.items():
        facts = next(iter(suite)).get_metadata()
        parts.append(f"## On {facts.get('gpu', facts.get('cpu_model_name'))}\n")
        parts.append("; ".join(about(suite)) + ".\n")
        if charted(suite):
            parts.append(f"![chart]({file})\n")
        for group, rows in groups(suite).items():
            head = ["", *names(rows), *(f"x {name}" for name in bases(rows))]
            parts.append(f"### {group}\n")
            parts.append("| " + " | ".join(head) + " |")
            parts.append("|---|" + "---:|" * (len(head) - 1))
            parts += [line(row, rows) for row in rows]
            parts.append("")
    return "\n".join(parts)


def line(row, rows):
    cells = [f"`{row.name}`" if "(" in row.name else row.name]
    cells += [row.figure(name) for name in names(rows)]
    for name in bases(rows):
        ratio = row.ratio(name)
        cell = "" if ratio is None else f"{ratio:.2f}"
        if ratio is not None and row.limit(name):
            kept = "at most" if ratio <= row.limit(name) else "NOT at most"
            cell += f" ({kept} {row.limit(name):.2f})"
        cells.append(cell)
    return "| " + " | ".join(cells) + " |"


def text(suite):
    """Return the table for a terminal of 80 columns, and what is beyond its limit."""
    lines, beyond = [textwrap.fill("; ".join(about(suite)), 79)], []
    for group, rows in groups(suite).items():
        shown = names(rows)[:5]
        base = (bases(rows) or [None])[0]
        head = "".join(f"{name[:8]:>9}" for name in shown)
        last = f"x {base[:3]}" if base else ""
        lines += ["", f"{group:28}{head}{last:>7}"]
        for row in rows:
            ratio = base and row.ratio(base)
            figures = "".join(f"{row.figure(name):>9}" for name in shown)
            last = f"{ratio:7.2f}" if ratio else ""
            lines.append(f"{row.name[:28]:28}{figures}{last}")
            beyond += over_limit(row)
    return "\n".join([*lines, "", *beyond])


def over_limit(row):
    return [
        f"Beyond its limit: {row.name}, {row.ratio(name):.3f} x {name}, "
        f"at most {row.limit(name):.2f}"
        for name in row.rivals
        if row.limit(name) and row.ratio(name) > row.limit(name)
    ]


def charted(suite):
    """Return the rows that the chart shows."""
    return [row for rows in groups(suite).values() for row in rows if row.fact("chart")]


def chart(suite, file):
    """Draw what cuckpt takes where cuda.bindings takes 1, and where the floor is."""
    import matplotlib

    matplotlib.use("Agg")
    # Text as text, and the same file from the same figures.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "cuckpt"}
    from matplotlib import pyplot

    rows = charted(suite)
    if not rows:
        return
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.36 * len(rows)))
    for place, row in enumerate(rows):
        draw(axes, place, row)
    axes.axvline(1, color="#8d99ae")
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.65)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    dots = (
        "; dots: C" if any({"C", "pointer"} & row.rivals.keys() for row in rows) else ""
    )
    axes.set_xlabel(f"cuckpt, where cuda.bindings takes 1{dots}", loc="left")
    axes.set_title("; ".join(about(suite)[:3]), fontsize=8, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None}, facecolor="white")
    pyplot.close(figure)


def draw(axes, place, row):
    base = "v2" if "v2" in row.rivals else "cydriver"
    length = row.ratio(base)
    axes.barh(place, length, 0.7, color="#3a7d44")
    for floor in {"C", "pointer"} & row.rivals.keys():
        axes.plot(length / row.ratio(floor), place, "o", color="#2b2d42", markersize=4)
    label = f"{row.figure('cuckpt')}, {base} {row.figure(base)}"
    axes.text(max(length, 1) + 0.03, place, label, va="center", fontsize=8)


def main():
    """Write the page and the charts, or compare the page with what it would be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="only fail if the page is outdated"
    )
    options = parser.parse_args()
    suites = {
        file.with_name(file.name.replace(".json.gz", ".svg")): (
            pyperf.BenchmarkSuite.load(str(file))
        )
        for file in sorted(DOCS.glob("benchmarks/*.json.gz"))
    }
    shown = {str(file.relative_to(DOCS)): suite for file, suite in suites.items()}
    page = f"{INTRODUCTION}\n{markdown(shown)}"
    images = DOCS / "benchmarks/storage.json"
    found = json.loads(images.read_text())
    drawn = images.with_suffix(".svg")
    page += "\n" + storage_page.markdown(found, str(drawn.relative_to(DOCS)))
    if options.check:
        if PAGE.read_text() != page:
            sys.exit(f"{PAGE} is not what {Path(__file__).name} makes of the figures")
        return
    PAGE.write_text(page)
    storage_page.chart(found, drawn)
    for file, suite in suites.items():
        chart(suite, file)


if __name__ == "__main__":
    main()
