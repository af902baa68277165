"""Drawings and words of the pages: lineage, plots, numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evaluation.pages.charts import IntervalRow, Mark, interval_plot, line_chart, smoothed, thinned, ticks
from evaluation.pages.charts import Line as PlotLine
from evaluation.pages.lineage import Edge, edges_of, layers_of, lineage_picture, ordered_layers
from evaluation.pages.words import p_value, percent, seconds, signed
from evaluation.results.pipeline import PipelineResults
from tests.evaluation.pipeline import HOSTILE, write_pipeline


class TestLineage:
    def test_edges_follow_the_manifests(self, tmp_path: Path) -> None:
        edges = edges_of(PipelineResults(write_pipeline(tmp_path / "store")).artifacts)
        assert Edge("clean", "shard") in edges and Edge("validate", "clean", requires=True) in edges
        assert Edge("sft", "rlhf") in edges and Edge("ingest", "rlhf") not in edges

    def test_every_edge_goes_to_the_right_and_boxes_do_not_overlap(self, tmp_path: Path) -> None:
        artifacts = PipelineResults(write_pipeline(tmp_path / "store")).artifacts
        edges = edges_of(artifacts)
        depth = layers_of(list(artifacts), edges)
        assert all(depth[edge.source] < depth[edge.target] for edge in edges)
        svg = str(lineage_picture(artifacts))
        numbers = re.findall(r'<rect x="(\d+)" y="(\d+)" width="(\d+)" height="(\d+)"', svg)
        boxes = [tuple(map(float, four)) for four in numbers]
        assert len(boxes) == len(artifacts)
        for i, (x, y, w, h) in enumerate(boxes):
            for other_x, other_y, _, _ in boxes[i + 1 :]:
                assert abs(other_x - x) >= w or abs(other_y - y) >= h

    def test_long_edges_take_a_place_in_each_layer_between(self) -> None:
        edges = [Edge("a", "b"), Edge("b", "c"), Edge("a", "c")]
        layers, steps = ordered_layers(["a", "b", "c"], edges, {"a": 0, "b": 1, "c": 2})
        assert layers[0] == ["a"] and set(layers[1]) == {"b", "a>c@1"} and ("a>c@1", "c") in steps


class TestPlots:
    @pytest.mark.parametrize(
        ("low", "high", "expected"),
        [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (3, 3, [3, 3.2, 3.4, 3.6, 3.8, 4]), (-1, 9, [-2, 0, 2, 4, 6, 8, 10])],
    )
    def test_ticks_are_round_and_span_the_values(self, low: float, high: float, expected: list[float]) -> None:
        assert ticks(low, high) == pytest.approx(expected)

    def test_long_curves_are_thinned_without_moving_their_mean(self) -> None:
        points = [(float(i), float(i % 7)) for i in range(4000)]
        thin = thinned(points)
        assert len(thin) == 400 and sum(y for _, y in thin) / 400 == pytest.approx(sum(y for _, y in points) / 4000)
        assert thinned(points[:10]) == points[:10]

    def test_smoothing_starts_at_the_first_value_and_keeps_a_constant(self) -> None:
        assert [y for _, y in smoothed([(i, 3.0) for i in range(5)], 2)] == pytest.approx([3.0] * 5)
        assert smoothed([(0, 8.0), (1, 0.0)], 1)[0] == (0, 8.0)

    def test_labels_are_escaped(self) -> None:
        row = IntervalRow(HOSTILE, [Mark(HOSTILE, "base", 0.5, 0.4, 0.6)], 0.5)
        drawn = interval_plot(HOSTILE, [row], value_format=percent) + line_chart(
            HOSTILE, [PlotLine(HOSTILE, [(0, 1), (1, 2)], "train")], x_label=HOSTILE, y_label=HOSTILE
        )
        assert "<script" not in drawn and "<img" not in drawn

    @pytest.mark.parametrize("points", [[(1, 2.0)], [(1, 2.0), (2, 2.0)]])
    def test_a_single_value_can_be_drawn(self, points: list[tuple[float, float]]) -> None:
        assert "nan" not in line_chart("t", [PlotLine("l", points, "train")], x_label="x", y_label="y")

    def test_nothing_to_draw_is_nothing(self) -> None:
        assert line_chart("t", [PlotLine("l", [], "train")], x_label="x", y_label="y") == ""
        assert interval_plot("t", [IntervalRow("r")], value_format=percent) == ""


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (seconds(8.21), "8.2 s"), (seconds(200), "3 min 20 s"), (seconds(7500), "2 h 5 min"), (signed(-1.234), "−1.23"),
        (signed(0.5), "+0.50"), (percent(float("nan")), "–"), (p_value(1e-9), "p < 0.0001"),
        (p_value(0.034), "p = 0.034"),
    ],
)  # fmt: skip
def test_numbers_read_well(told: str, expected: str) -> None:
    assert told == expected
