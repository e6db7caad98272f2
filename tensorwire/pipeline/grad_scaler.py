"""Loss scaling for mixed precision whose check for infinite gradients spans all stages."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tensorwire.pipeline import remote_optimizer as remote
from tensorwire.pipeline.backups.coordinator import Kind

if TYPE_CHECKING:
    from tensorwire.pipeline.optimizer import PipelineOptimizer
    from tensorwire.pipeline.pipeline import Pipeline


class GradScaler:
    """A ``torch.amp.GradScaler`` for a pipeline.

    :meth:`Pipeline.batches` keeps its state with the place in the data, in checkpoints and in
    backups.

    Args:
        pipeline: whose gradients are scaled.
        init_scale: the first scale.
        growth_factor: what the scale is multiplied with after ``growth_interval`` steps
            without infinite gradients.
        backoff_factor: what the scale is multiplied with after a step with some.
        growth_interval: steps.

    Raises:
        ValueError: ``growth_factor`` or ``backoff_factor`` is out of range.

    Example::

        scaler = GradScaler(pipe)
        for x, y in loader:
            pipe.train_step(x, target=y, scale=scaler.get_scale())
            scaler.step(optimizer)      # skipped if a gradient of any stage is infinite
            scaler.update()
            optimizer.zero_grad()
    """

    def __init__(
        self,
        pipeline: Pipeline,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if growth_factor <= 1.0:
            raise ValueError(f"{growth_factor=} must be greater than 1")
        if not 0.0 < backoff_factor < 1.0:
            raise ValueError(f"{backoff_factor=} must be between 0 and 1")
        self._pipeline = pipeline
        self._scale = init_scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._growth_tracker = 0
        self._found_inf: bool | None = None
        pipeline.driver.places.add(self)

    def get_scale(self) -> float:
        """The scale for the next ``train_step``."""
        return self._scale

    def unscale_(self, optimizer: PipelineOptimizer) -> bool:
        """Takes the scale out of the gradients, for example to clip them before :meth:`step`.

        Returns:
            True if a gradient of any stage is infinite or no number.

        Raises:
            RuntimeError: that was done since the last :meth:`update`.
        """
        if self._found_inf is not None:
            raise RuntimeError("unscale_() has already been called since the last update()")
        unscale = partial(
            self._pipeline.driver.call_all, remote.unscale_gradients, 1.0 / self._scale
        )
        by_worker = self._pipeline.driver.perform(Kind.CHANGE, lambda _: unscale())
        self._found_inf = any(by_worker.values())
        return self._found_inf

    def step(self, optimizer: PipelineOptimizer) -> Any:
        """Steps the optimizer, unless a gradient of any stage is infinite or no number."""
        if self._found_inf is None:
            self.unscale_(optimizer)
        return None if self._found_inf else optimizer.step()

    def update(self) -> None:
        """Chooses the next scale.

        Raises:
            RuntimeError: no gradient was looked at since the last time.
        """
        if self._found_inf is None:
            raise RuntimeError("update() needs a step() or unscale_() before it")
        if self._found_inf:
            self._scale *= self._backoff_factor
            self._growth_tracker = 0
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self._growth_interval:
                self._scale *= self._growth_factor
                self._growth_tracker = 0
        self._found_inf = None

    def state_dict(self) -> dict[str, Any]:
        """The scale and its history, as ``torch.amp.GradScaler`` has them."""
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what :meth:`state_dict` returned."""
        self._scale = state_dict["scale"]
        self._growth_factor = state_dict["growth_factor"]
        self._backoff_factor = state_dict["backoff_factor"]
        self._growth_interval = state_dict["growth_interval"]
        self._growth_tracker = state_dict["_growth_tracker"]
