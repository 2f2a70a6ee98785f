"""The checks of annotations, which `conftest.py` applies to every function of both packages."""

import functools
import inspect
import typing

import jaxtyping


def checked(*, typechecker, jaxtyped=jaxtyping.jaxtyped):
    """Does what `jaxtyping.jaxtyped` does, for less: that takes 1 ms to wrap a function, and 0.1 ms a call.

    Shapes are compared with each other by jaxtyping. A function without shapes needs only the type checker, and one
    without annotations nothing: most are nested ones, which would be wrapped whenever the outer one is called.
    """
    compared = jaxtyped(typechecker=typechecker)

    def decorate(function):
        if not inspect.isfunction(function) or any(map(_may_have_shape, function.__annotations__.values())):
            return compared(function)
        if not function.__annotations__:
            return function
        typed = typechecker(function)

        @functools.wraps(function)
        def call(*args, **kwargs):
            return (function if jaxtyping.config.jaxtyping_disable else typed)(*args, **kwargs)

        return call

    return decorate


def _may_have_shape(annotation):
    is_array = isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray)
    return is_array or isinstance(annotation, str) or any(map(_may_have_shape, typing.get_args(annotation)))
