"""The part of the page on images, from what storage.py has measured."""

import textwrap

INTRODUCTION = """\
## Images

Made by `benchmarks/storage.py`, of ordinary GPU memory full of random bytes; the
figures lie in `docs/benchmarks/storage.json`. "x" is how many times as fast it was as
the driver's own checkpoint or restore of a process of that size in the same run. A save
begins with the reservation of space; "after space is reserved" is for how long the
process is locked. "tmpfs of huge pages" is mounted with `huge=within_size`. "page
cache" takes what the kernel lets be dirty (`vm.dirty_ratio`, here 20 % of 125 GiB): a
larger save waits for the disk. "disk" is with O_DIRECT, and waits until all is on it.
"""
CHARTED = [
    "driver's checkpoint",
    "tmpfs, save",
    "tmpfs of huge pages, save",
    "page cache, save",
    "KvikIO, tmpfs, save",
    "bus, to host",
    "driver's restore",
    "tmpfs, load",
    "tmpfs of huge pages, load",
    "page cache, load",
    "KvikIO, tmpfs, load",
    "bus, to GPU",
]


def markdown(found, chart):
    """Return the part of the page.

    Parameters
    ----------
    found : dict
        What storage.py wrote.
    chart : str
        The file of the chart.
    """
    figures = found["figures"]
    heads = [head for size in figures for head in (f"{size}, GB/s", "x")]
    lines = [
        INTRODUCTION,
        textwrap.fill("; ".join(about(found)) + ".", 88),
        "",
        f"![images: GB/s of each way]({chart})",
        "",
        f"| | {' | '.join(heads)} |",
        f"|---|{'---:|' * len(heads)}",
    ]
    for what in dict.fromkeys(what for rows in figures.values() for what in rows):
        cells = [cell for rows in figures.values() for cell in cells_of(rows.get(what))]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    costs = [
        f"{what} of {size} {row['x without checksums'] - 1:+.0%}"
        for size, rows in figures.items()
        for what, row in rows.items()
        if "x without checksums" in row
    ]
    lines += [
        "",
        textwrap.fill(
            "With checksums it takes longer than without, as medians of rounds by "
            f"turns: {'; '.join(costs)}.",
            88,
        ),
        "",
    ]
    if "peak_bytes" in found:
        peak = found["peak_bytes"] / (1 << 30)
        lines += [f"Host memory of the program at its peak: {peak:.2f} GiB.", ""]
    return "\n".join(lines)


def about(found):
    """Return where and when this was measured."""
    facts = dict(found["facts"])
    said = [f"measured {facts.pop('date')}", facts.pop("gpu")]
    return said + [f"{name} {value}" for name, value in facts.items()]


def cells_of(row):
    """Return rate and ratio as text."""
    if row is None:
        return "", ""
    return f"{row['GB/s']:.1f}", f"{row['x']:.1f}" if "x" in row else ""


def chart(found, file):
    """Draw how fast each way is, for the first size."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "cuckpt"}
    from matplotlib import pyplot

    size, rows = next(iter(found["figures"].items()))
    names = [name for name in CHARTED if name in rows]
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.36 * len(names)))
    for place, name in enumerate(names):
        rate = rows[name]["GB/s"]
        own = name.startswith(("tmpfs", "page cache"))
        axes.barh(place, rate, 0.7, color="#3a7d44" if own else "#8d99ae")
        ratio = f", {rows[name]['x']:.1f} x" if "x" in rows[name] else ""
        axes.text(rate + 0.6, place, f"{rate:.1f}{ratio}", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(f"GB/s, {size}; x: beside the driver's own way", loc="left")
    axes.set_title("; ".join(about(found)[:3]), fontsize=8, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None}, facecolor="white")
    pyplot.close(figure)
