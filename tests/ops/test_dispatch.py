"""Which implementation runs: the best that takes device and arguments, or exactly the named one."""

import pytest

from dsv4_jax.ops import dispatch, use_implementation


def refuses(x):
    raise NotImplementedError(f"the kernel takes even numbers, got {x}")


BOTH = {"xla": lambda x: ("xla", x), "mosaic_gpu": lambda x: ("mosaic_gpu", x) if x % 2 == 0 else refuses(x)}


@pytest.fixture(params=[None, "the default backend is 'cpu', not an NVIDIA GPU"])
def reason(request, monkeypatch):
    """With a GPU, and without."""
    monkeypatch.setattr(dispatch, "why_no_mosaic_gpu", lambda: request.param)
    return request.param


def test_none_takes_the_best_that_can(reason):
    best = "xla" if reason else "mosaic_gpu"
    assert dispatch.run("op", BOTH, None, 2) == (best, 2)
    # The kernel refuses the arguments: XLA takes them.
    assert dispatch.run("op", BOTH, None, 3) == ("xla", 3)
    assert dispatch.run("op", {"xla": BOTH["xla"]}, None, 2) == ("xla", 2)


def test_a_named_one_runs_or_says_why_not(reason):
    assert dispatch.run("op", BOTH, "xla", 2) == ("xla", 2)
    if reason:
        with pytest.raises(NotImplementedError, match="op cannot run as 'mosaic_gpu': the default backend is 'cpu'"):
            dispatch.run("op", BOTH, "mosaic_gpu", 2)
    else:
        assert dispatch.run("op", BOTH, "mosaic_gpu", 2) == ("mosaic_gpu", 2)
        with pytest.raises(NotImplementedError, match="takes even numbers, got 3"):
            dispatch.run("op", BOTH, "mosaic_gpu", 3)
    with pytest.raises(
        NotImplementedError, match=r"op has no implementation 'interpret'; it has \['mosaic_gpu', 'xla'"
    ):
        dispatch.run("op", BOTH, "interpret", 2)
    with pytest.raises(ValueError, match="implementation='cuda' is not known; choose None or one of"):
        dispatch.run("op", BOTH, "cuda", 2)


def test_a_context_decides_for_ops_that_have_it(reason):
    with use_implementation("mosaic_gpu"):
        assert dispatch.run("op", BOTH, None, 2) == ("mosaic_gpu", 2)
        assert dispatch.run("op", BOTH, None, 3) == ("xla", 3)
        assert dispatch.run("op", BOTH, "xla", 2) == ("xla", 2)
    with pytest.raises(ValueError, match="implementation='cuda' is not known"), use_implementation("cuda"):
        pass
