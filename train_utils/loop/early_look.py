"""What is likely wrong with a training, said while there is still time to change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from train_utils.run.log import HINT
from train_utils.scores.detections import Detections, GroundTruth
from train_utils.scores.operating_points import overlooked_share

WATCHED_EPOCHS = 6  # in which the loss must not rise above that of the first
MANY_OVERLOOKED = 0.5  # of the validation boxes
LEAST_DONE = 0.1  # of the training: before, a healthy network of many classes may detect nothing


class EarlyLook:
    """Watches the first epochs of a training; silent when all is well.

    It tells each thing once by ``say``. A resumed run has been told about its data and loss, and if
    there was an evaluation that counts, ``scored`` being the part of the training done at the last
    one, 0..1, about that, too. Nothing here changes the training. ``learning_rate`` is optim.lr.
    """

    def __init__(self, say: Callable[[str], object], learning_rate: float, scored: float = 0.0) -> None:
        self._say, self._rate = say, learning_rate
        self._first_loss: float | None = None  # None: not trained here, or its rise was told
        self._to_score = scored < LEAST_DONE

    def trained(self, epoch: int, loss: float, about_data: Callable[[], Sequence[str]]) -> None:
        """Look at an epoch's mean ``loss``, and after epoch 1, the first, at the data."""
        if epoch == 1:
            self._first_loss = loss
            for sentence in about_data():
                self._say(HINT + sentence)
        elif self._first_loss is not None and epoch <= WATCHED_EPOCHS and loss > self._first_loss:
            self._say(
                f"{HINT}the mean loss rose from {self._first_loss:.4g} in epoch 1 to {loss:.4g} in epoch {epoch}. "
                f"fix: a lower learning rate, as optim.lr={self._rate / 3:.2g}"
            )
            self._first_loss = None

    def scored(self, truth: GroundTruth, detections: Detections, done: float) -> None:
        """Look at the first evaluation after a part ``done`` of the training, 0..1, that counts."""
        if not self._to_score or done < LEAST_DONE:
            return
        self._to_score = False
        share = overlooked_share(truth, detections)
        if share > MANY_OVERLOOKED:
            self._say(
                f"{HINT}no detection overlaps {share:.0%} of the validation boxes. fix: see in train_batch.jpg whether "
                "the boxes lie on the objects; else more train.epochs or a higher optim.lr"
            )
