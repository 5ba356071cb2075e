"""What every figure starts from: colours, a figure outside pyplot, panels, checked values."""

import math
from collections.abc import Iterator, Mapping
from itertools import cycle, product

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from ..metrics.arguments import SLACK
from ..ops.checks import refuse

Values = ArrayLike | Tensor

OLDEST_MATPLOTLIB = 3, 7  # before, figures had no legends outside of their axes

BLUE, ORANGE, GREY, LIGHT_GREY = "#0072b2", "#d55e00", "#8a8a8a", "#d9d9d9"
# Stay apart for most colour-blind readers (after Okabe and Ito).
COLORS = "#0072b2 #e69f00 #009e73 #cc79a7 #56b4e9 #d55e00 #f0e442 #8a8a8a".split()
# Twelve that stay apart side by side; `class_colors` has more.
CLASS_COLORS = [*COLORS, "#882255", "#332288", "#999933", "#44aa99"]


def curve_styles(colors, ax) -> Iterator[dict]:
    """Of one curve after another, those first that no line in the axis has: styles of a second
    round of the colours are dotted, of a third dash-dotted."""
    from matplotlib.colors import to_hex

    rounds = product(({}, {"linestyle": ":"}, {"linestyle": "-."}), colors)
    styles = [line | {"color": color} for line, color in rounds]
    taken = [(to_hex(line.get_color()), line.get_linestyle()) for line in ax.lines]
    free = [s for s in styles if (s["color"], s.get("linestyle", "-")) not in taken]
    return cycle(free or styles)


def class_colors(count: int) -> list:
    """`CLASS_COLORS`, then those of a grid that are each the farthest from all before, and from
    grounds and what stands for no class."""
    check_matplotlib()
    from matplotlib.colors import to_rgb

    colors, levels = CLASS_COLORS[:count], max(6, math.ceil(count ** (1 / 3)) + 1)
    grid = np.array([*product(np.linspace(0, 1, levels), repeat=3)])
    taken = np.array([to_rgb(color) for color in ("white", "black", LIGHT_GREY, *CLASS_COLORS)])
    distance = np.linalg.norm(grid[:, None] - taken, axis=2).min(1)
    while len(colors) < count:
        farthest = grid[distance.argmax()]
        colors.append(tuple(farthest.tolist()))
        distance = np.minimum(distance, np.linalg.norm(grid - farthest, axis=1))
    return colors


def check_matplotlib():
    """Its class Figure; refused by name where it is not installed or too old,
    also for runs that draw at their end."""
    how = "(pip install 'bnuq_ext[demo]')"
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        refuse("plots", "matplotlib", f"be installed {how}", error, ModuleNotFoundError)
    if matplotlib.__version_info__ < OLDEST_MATPLOTLIB:
        oldest = ".".join(map(str, OLDEST_MATPLOTLIB))
        found = matplotlib.__version__
        refuse("plots", "matplotlib", f"be {oldest} or newer {how}", found, ImportError)
    return Figure


def new_figure(width: float, height: float):
    """A figure that pyplot does not know, so that it needs no closing and no display."""
    return check_matplotlib()(figsize=(width, height), layout="constrained")


def take_axes(ax, width: float = 5.4, height: float = 3.6):
    if ax is None:
        return new_figure(width, height).subplots()
    from matplotlib.axes import Axes

    if not isinstance(ax, Axes):
        refuse("plots", "ax", "be one matplotlib Axes", type(ax).__name__, TypeError)
    return ax


def share_axes(
    ax, labels: list[str], place: int, *, rows=False, ratios=None, gaps=None, **options
) -> list:
    """Panels in the place of `ax`, which keeps the one that is number `place` of them.

    Args:
        labels: one for each panel, from the left or from the top; that of `ax` is not used.
        rows: one under the other, else side by side.
        ratios: their heights or widths, equal by default.
        gaps: behind each panel, in heights of a letter; a constrained layout finds its own.
        options: of the new Axes, such as sharex.
    """
    figure = ax.figure
    ratios, step, spaces = [1] * len(labels) if ratios is None else ratios, 1, {}
    if gaps and not _is_constrained(figure):
        length = ax.bbox.size[int(rows)] / figure.dpi
        ratios, step, spaces = _with_gaps(ratios, gaps, length), 2, {"wspace": 0, "hspace": 0}
    places = _places(ax, ratios, rows, spaces)[::step]
    move, add = ax.set_position, figure.add_axes
    if ax.get_subplotspec() is not None:
        move, add = ax.set_subplotspec, figure.add_subplot
    move(places[place])
    return [
        ax if i == place else add(places[i], label=label, **options)
        for i, label in enumerate(labels)
    ]


def _places(ax, ratios: list[float], rows: bool, spaces: dict) -> list:
    """Those in `ax` of panels with these heights or widths: cells where it has one itself, else
    rectangles."""
    from matplotlib.gridspec import GridSpec

    n, spec = len(ratios), ax.get_subplotspec()
    shape = {"nrows": n, "ncols": 1, "height_ratios": ratios}
    if not rows:
        shape = {"nrows": 1, "ncols": n, "width_ratios": ratios}
    if spec is not None:
        cells = spec.subgridspec(**shape, **spaces)
        return [cells[i] for i in range(n)]
    sides = zip(("left", "bottom", "right", "top"), ax.get_position().extents, strict=True)
    cells = GridSpec(figure=ax.figure, **dict(sides), **shape, **spaces)
    return [cells[i].get_position(ax.figure) for i in range(n)]


def _is_constrained(figure) -> bool:
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return isinstance(figure.get_layout_engine(), ConstrainedLayoutEngine)


def _with_gaps(ratios, gaps, inches: float) -> list[float]:
    """Of panels and the gaps behind them, in turn; these take half of the place at most."""
    gaps = np.array(gaps) * text_points() / 72
    gaps *= min(1, 0.5 * inches / max(gaps.sum(), 1e-9))
    panels = (inches - gaps.sum()) * np.array(ratios) / np.sum(ratios)
    return np.column_stack([panels, gaps]).reshape(-1).tolist()


def make_room(panels, letters: float) -> None:
    """For words under panels, as high as so many letters; a constrained layout finds it."""
    for ax in panels:
        if letters > 0 and not _is_constrained(ax.figure):
            share_axes(ax, [""], 0, rows=True, gaps=[letters])


def begin_at(ax, axis: str, start: float) -> None:
    """An axis, "x" or "y", from `start` to behind the data of all axes that share it."""
    shared = getattr(ax, f"get_shared_{axis}_axes")().get_siblings(ax)
    ends = [getattr(one.dataLim, f"{axis}1") for one in shared]
    length = max((end - start for end in ends if np.isfinite(end)), default=0)
    getattr(ax, f"set_{axis}lim")(start, start + (1.05 * length or 1))


def ground(ax) -> dict:
    """Of a legend over the data: the axis' own colours, whatever the style is by now."""
    face = ax.get_facecolor()
    face = face if face[3] else "none"  # a transparent one would come out black
    return {"facecolor": face, "edgecolor": "none", "labelcolor": ax.xaxis.label.get_color()}


def legend_outside(panels, place: str, **options) -> None:
    """The first panel's legend for all of them, `place` (upper, lower) of these;
    their own are taken away."""
    for ax in panels:
        if ax.get_legend():
            ax.get_legend().remove()
    handles, labels = panels[0].get_legend_handles_labels()
    options = {"ncols": len(labels), "frameon": False, **options}
    panels[0].figure.legend(handles, labels, loc=f"outside {place} center", **options)


def text_points(size: str = "medium") -> float:
    """Of that name of a size, or parameter of the style."""
    from matplotlib import rcParams
    from matplotlib.font_manager import FontProperties

    return FontProperties(size=rcParams.get(size, size)).get_size_in_points()


def text_width(text: str, points: float) -> float:
    """In inches, of letters of that size."""
    check_matplotlib()
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=points)
    return text_to_path.get_text_width_height_descent(text, font, False)[0] / 72


def wrapped(words: list[str], inches: float, points: float) -> str:
    """In lines of at most that width, but for a longer word."""
    lines = words[:1]
    for word in words[1:]:
        longer = f"{lines[-1]} {word}"
        if text_width(longer, points) <= inches:
            lines[-1] = longer
        else:
            lines.append(word)
    return "\n".join(lines)


def legend_columns(labels, inches: float, points: float, most: int) -> int:
    """How many entries of a legend, in letters of `points`, stand side by side in that width."""
    widest = 72 * max((text_width(label, points) for label in labels), default=0)
    # In heights of a letter: a handle 2, behind it 0.8, between columns 2, around all of them 0.8.
    fit = (72 * inches + 1.2 * points) / (widest + 4.8 * points)
    return min(max(int(fit), 1), most)


def dots(count: int, largest: float) -> dict:
    """Style of so many points: smaller and paler where there are thousands."""
    size = largest * np.clip((500 / max(count, 1)) ** 0.5, 0.37, 1)
    alpha = np.clip((2000 / max(count, 1)) ** 0.5, 0.4, 1)
    return {"marker": "o", "linestyle": "", "ms": size, "mew": 0, "alpha": alpha}


def take_array(values):
    """Numbers as numpy has them; a tensor may be on any device, of any dtype, with a gradient."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.double() if values.is_floating_point() else values
    return np.asarray(values)


def take_numbers(op: str, name: str, values):
    """`take_array` in float64; what does not hold numbers is refused."""
    try:
        given = take_array(values)
        numbers = np.asarray(given, float)
    except (TypeError, ValueError):
        refuse(op, name, "be numbers", type(values).__name__, TypeError)
    if given.dtype.kind in "mM":  # dates and times, of which numpy counts the units since 1970
        refuse(op, name, "be numbers", given.dtype, TypeError)
    return numbers


def check_mapping(op: str, name: str, entries, values: str = "values") -> None:
    if not isinstance(entries, Mapping):
        refuse(op, name, f"be a dict of label -> {values}", type(entries).__name__, TypeError)


def take_options(op: str, name: str, entries, values: str = "values"):
    """A dict of label -> values; empty for None."""
    if entries is None:
        return {}
    check_mapping(op, name, entries, values)
    return entries


def check_labels(op: str, name: str, options, entries) -> None:
    """Raises for options of a curve that is not drawn."""
    if unknown := [label for label in options if label not in entries]:
        refuse(op, name, f"name some of the curves {list(entries)}", unknown)


def take_probs(op: str, name: str, values):
    """Probabilities; what rounding may have made of them counts."""
    values = take_numbers(op, name, values)
    inside = (values >= -SLACK) & (values <= 1 + SLACK)  # NaN does not
    if not inside.all():
        refuse(op, name, "lie in [0, 1]", values[~inside][0])
    return values


def take_one(op: str, name: str, value, requirement: str = "be one number") -> float:
    value = take_numbers(op, name, value)
    if value.size != 1:
        refuse(op, name, requirement, f"{value.size} of them")
    return value.item()


def check_entries(op: str, name: str, entries) -> None:
    """A dict of label -> values, with an entry."""
    check_mapping(op, name, entries)
    if not entries:
        refuse(op, name, "have an entry", 0)


def take_finite(op: str, name: str, values):
    """`take_values` without nan and infinity, which have no place in a histogram."""
    values = take_values(op, name, values)
    if not np.isfinite(values).all():
        refuse(op, name, "be finite", f"{(~np.isfinite(values)).sum()} values that are not")
    return values


def take_values(op: str, name: str, values):
    """Numbers (N,), or (N, 1) as of a network with one output."""
    values = take_numbers(op, name, values)
    values = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    if values.ndim != 1 or len(values) == 0:
        refuse(op, name, "have shape (N,) with N > 0", list(values.shape))
    return values
