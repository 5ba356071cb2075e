"""Dates: the abscissa of a regression, and no numbers elsewhere."""

from datetime import date, datetime, timedelta, timezone

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.dates import num2date

from bnuq_ext import plots

DAYS = np.datetime64("2024-02-27") + np.arange(6).astype("timedelta64[D]")
MEAN = np.arange(6.0)
LISTS = {
    "numpy": DAYS,
    "column": DAYS[:, None],
    "seconds": DAYS.astype("datetime64[s]"),
    "dates": [date(2024, 2, 27) + timedelta(k) for k in range(6)],
    "datetimes": [datetime(2024, 2, 27) + timedelta(k) for k in range(6)],
}


@pytest.mark.parametrize("kind", LISTS)
def test_the_abscissa_may_be_dates(kind):
    x = LISTS[kind]
    data = x[::2], MEAN[::2]
    ax = plots.regression_band(x[::-1], MEAN[::-1], np.ones(6), data=data, constant_std=1.0)
    expected = [datetime(2024, 2, 27) + timedelta(k) for k in range(6)]
    mean, dots = ax.lines[0], ax.lines[-1]
    assert [d.replace(tzinfo=None) for d in num2date(mean.get_xdata())] == expected
    np.testing.assert_array_equal(mean.get_ydata(), MEAN)
    assert [d.replace(tzinfo=None) for d in num2date(dots.get_xdata())] == expected[::2]
    band = ax.collections[0].get_paths()[0].vertices
    np.testing.assert_array_equal(np.unique(band[:, 0]), mean.get_xdata())
    FigureCanvasAgg(ax.figure).draw()
    words = [label.get_text() for label in ax.get_xticklabels()]
    assert {"28", "29", "Mar"} <= {*words}  # 2024 has a leap day
    ends = [d.replace(tzinfo=None) for d in num2date(ax.get_xlim())]
    assert ends == [expected[0], expected[-1]]


def test_dates_have_their_time_zone():
    zone = timezone(timedelta(hours=2))
    x = [datetime(2024, 2, 27, hour, tzinfo=zone) for hour in range(6)]
    ax = plots.regression_band(x, MEAN, np.ones(6))
    FigureCanvasAgg(ax.figure).draw()
    assert num2date(ax.lines[0].get_xdata()[0]) == x[0]
    assert "03:00" in [label.get_text() for label in ax.get_xticklabels()]


def test_one_date_is_seen():
    (mean,) = plots.regression_band(DAYS[:1], [2.0], [0.1]).lines
    around = [datetime(2024, 2, 26, 12), datetime(2024, 2, 27, 12)]
    assert [d.replace(tzinfo=None) for d in num2date(mean.get_xdata())] == around


ONES = np.ones(6)
REFUSED = {
    "data[0] must be numbers, got datetime64[D]": lambda: plots.regression_band(
        MEAN, MEAN, ONES, data=(DAYS, MEAN)
    ),
    "data[0] must be dates like x, got ndarray": lambda: plots.regression_band(
        DAYS, MEAN, ONES, data=(MEAN, MEAN)
    ),
    "data[1] must be numbers, got datetime64[D]": lambda: plots.regression_band(
        DAYS, MEAN, ONES, data=(DAYS, DAYS)
    ),
    "mean must be numbers, got datetime64[D]": lambda: plots.regression_band(MEAN, DAYS, ONES),
    "x must be numbers, got timedelta64[D]": lambda: plots.regression_band(
        DAYS - DAYS[0], MEAN, ONES
    ),
    "x must be numbers, got list": lambda: plots.regression_band(
        [date(2024, 1, 1), *MEAN[1:]], MEAN, ONES
    ),
    "x must have 6 values like mean, got 2": lambda: plots.regression_band(DAYS[:2], MEAN, ONES),
    "a must be numbers, got datetime64[D]": lambda: plots.entropy_cdf({"a": DAYS}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_rejects(message):
    with pytest.raises((TypeError, ValueError)) as caught:
        REFUSED[message]()
    assert str(caught.value).partition(": ")[2] == message
