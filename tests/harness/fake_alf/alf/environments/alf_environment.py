import abc


class AlfEnvironment(abc.ABC):
    @abc.abstractmethod
    def observation_spec(self): ...

    @abc.abstractmethod
    def _step(self, action): ...

    @abc.abstractmethod
    def _reset(self): ...

    _step = _reset = lambda self, *args: None
