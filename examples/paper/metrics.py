"""Metrics: from true labels and predictions to scores in percent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean
from typing import Any

ROUGE = ("rouge1", "rouge2", "rougeL")


def scores(metric: str, labels: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    """The metric's values in percent by their names; a NaN, of a constant predictor, counts as 0."""
    found = METRICS[metric](labels, predictions)
    values = found if isinstance(found, dict) else {metric: float(found)}
    return {name: 0.0 if value != value else round(100 * value, 3) for name, value in values.items()}


def _accuracy(labels: Sequence[int], predictions: Sequence[int]) -> float:
    return sum(label == found for label, found in zip(labels, predictions, strict=True)) / len(labels)


def _matthews(labels: Sequence[int], predictions: Sequence[int]) -> float:
    from sklearn.metrics import matthews_corrcoef

    return matthews_corrcoef(labels, predictions)


def _correlation(labels: Sequence[float], predictions: Sequence[float]) -> float:
    """Mean of Pearson's and Spearman's."""
    from scipy.stats import pearsonr, spearmanr

    if not all(map(math.isfinite, predictions)):
        return math.nan
    if len(set(predictions)) == 1:
        return 0.0
    return (pearsonr(labels, predictions).statistic + spearmanr(labels, predictions).statistic) / 2


def _entity_f1(labels: Sequence[list[str]], predictions: Sequence[list[str]]) -> float:
    try:
        from seqeval.metrics import f1_score
    except ImportError:
        raise SystemExit("the F1 of entities is seqeval's: pip install 'sparsify-ft[paper]'.") from None
    return f1_score(labels, predictions, zero_division=0)


def _rouge(labels: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """F1 of common words, pairs of words and longest common subsequence of words, by their stems; means over texts."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise SystemExit("ROUGE is rouge-score's: pip install 'sparsify-ft[paper]'.") from None
    scorer = RougeScorer(ROUGE, use_stemmer=True)
    found = [scorer.score(label, text) for label, text in zip(labels, predictions, strict=True)]
    return {name: mean(one[name].fmeasure for one in found) for name in ROUGE}


METRICS = {
    "accuracy": _accuracy,
    "matthews": _matthews,
    "correlation": _correlation,
    "entity f1": _entity_f1,
    "rouge": _rouge,
}
