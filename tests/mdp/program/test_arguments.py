"""What kind of function somebody has passed."""

import functools

from zmdp.mdp.program.arguments import is_async


def test_which_functions_are_for_asyncio():
    def function(request):
        return request

    async def coroutine(request):
        return request

    async def generator(request):
        yield request

    class Both:
        def plain(self, request):
            return request

        async def __call__(self, request):
            return request

    for handler in (coroutine, generator, Both(), Both().__call__, functools.partial(functools.partial(coroutine))):
        assert is_async(handler), handler
    for handler in (function, list, sum, Both, Both().plain, functools.partial(function), b"".join):
        assert not is_async(handler), handler
