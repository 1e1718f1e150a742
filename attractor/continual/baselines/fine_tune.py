"""Plain fine-tuning: the control that forgets."""

from attractor.continual.baselines.baseline import Baseline


class FineTune(Baseline):
    """Every parameter (`train="all"`), or those of the feed-forward layers (`train="ffn"`), and no guard."""
