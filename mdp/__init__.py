"""The broker: the protocol, the machine, and the server that runs it on a socket."""

from .broker.machine import Broker
from .errors import BindError, SettingError, ZmdpError
from .limits import Limits
from .broker.server import Server

__all__ = ["BindError", "Broker", "Limits", "Server", "SettingError", "ZmdpError"]
