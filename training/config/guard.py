"""Config of the guard against loss spikes and divergence."""

from __future__ import annotations

from pydantic import Field

from infra.config import Config


class GuardConfig(Config):
    """Watches training. On a loss spike it rolls back, lowers the learning rate and skips the data around the spike.

    All lengths are in batches. The answer follows OPT (Zhang et al. 2022, section 2.5: a lower learning rate from a
    healthy checkpoint) and PaLM (Chowdhery et al. 2022, section 5.1: the batches around the spike are left out).
    """

    enabled: bool = True
    """Enable the guard."""
    window: int = Field(100, ge=10)
    """Number of batches whose median absolute deviation defines the normal range."""
    window_least: int = Field(20, ge=3)
    """Minimum number of batches in the window before it is used; until then the spread of the examples of each batch
    bounds the distance to the next batch's loss. Also the number of last batches whose median a loss is compared
    with."""
    limit: float = Field(6.0, gt=0)
    """Spreads above normal at which a batch counts fully towards an alarm; half of it counts nothing, and less counts
    against an alarm. Half is enough if the gradient norm or activation norm is that far above normal too. A spread is
    1.4826 × MAD (Iglewicz & Hoaglin 1993 take 3.5 of them for one sample; a training looks at millions), or more where
    the upper tail is heavier than a normal one's."""
    patience: int = Field(5, ge=1)
    """Consecutive batches that raise an alarm if each counts fully; NaN and infinity need one. A single outlier is not
    a spike."""
    divergence: float = Field(1.2, gt=1)
    """Multiple of the mean loss of the first five batches above which a loss is held against that mean at any time, in
    spreads of its noise: worse by a fifth than before training. Of a reward model no loss below this multiple of
    guessing's, log 2, is suspicious at all."""
    least_loss_scale: float = Field(1.0e-4, gt=0)
    """fp16 only: a loss scale below this is an alarm; 1e-4 is fairseq's `min_loss_scale`, by which OPT was trained."""
    rollback_every: int = Field(100, ge=1)
    """Batches between checkpoints that the guard may roll back to. Unlike `checkpoint_every` it affects the result."""
    healthy_after: int = Field(20, ge=0)
    """A checkpoint is healthy if no suspicious batch occurred within this number of batches after it."""
    cut: float = Field(0.5, gt=0, lt=1)
    """Factor on the healthy learning rate after a correction. Each further attempt at the same place cuts as much as
    all earlier attempts there together; cuts at different places are not multiplied."""
    cut_at_start: float = Field(0.01, gt=0, lt=1)
    """The same where the alarm came before `window_least`: a training that never got going has a learning rate that is
    wrong by far, by a hundred times and more where it was tried. This one is for good, its first try leaves out no
    data, and each further one cuts by the square root of it."""
    recover: int = Field(100, ge=0)
    """Batches over which the learning rate climbs back after a correction: PaLM passed over the data and left its rate
    as it was. 0: it stays cut, as in OPT, figure 1. A new alarm before that counts as one at the same place."""
    skip_before: int = Field(2, ge=0)
    """Batches before the first suspicious one whose data is skipped."""
    skip_after: int = Field(5, ge=0)
    """Batches from the first suspicious one whose data is skipped; each further attempt at the same place doubles it.
    PaLM skipped 200 to 500, in a run of 255,000."""
    tries: int = Field(4, ge=1)
    """Maximum number of corrections at the same place before training fails."""
    corrections: int = Field(35, ge=1)
    """Maximum number of corrections in total before training fails; OPT-175B needed 35 restarts."""
