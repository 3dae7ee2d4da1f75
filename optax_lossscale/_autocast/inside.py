"""The mark that a function is traced by `autocast`, which hides how its arguments are stored."""

import contextlib
import threading
from collections.abc import Generator


class _Thread(threading.local):
    hides_storage = False


_thread = _Thread()


@contextlib.contextmanager
def hidden_storage() -> Generator[None]:
    """Mark that this thread traces a function in which stored half precision looks like float32."""
    before, _thread.hides_storage = _thread.hides_storage, True
    try:
        yield
    finally:
        _thread.hides_storage = before


def refuse_hidden_storage(wrapper: str) -> None:
    """Raise if the update of `wrapper` is inside `autocast`, which hides half precision."""
    if _thread.hides_storage:
        raise ValueError(
            f"`{wrapper}` must not be updated inside `autocast`, where arrays in half precision "
            "look like float32, so that nothing would be rounded. Wrap the loss function, not the "
            "training step: `value_and_grad(autocast(loss_fn, dtype))`."
        )
