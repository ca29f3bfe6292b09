"""The errors that the package raises on purpose. Messages are one line: object, expected and found value."""


class KVPlugError(Exception):
    """Base class of the package's errors."""


class SettingsError(KVPlugError, ValueError):
    """The choice of a manager or a setting is malformed: names the key, what is allowed and what was found."""


class UnsupportedError(KVPlugError, ValueError):
    """A vLLM version, model or feature that the chosen manager does not serve: names it and says what works instead."""


class ContractError(KVPlugError, TypeError):
    """A manager class or a scheduler does not keep the contract of vLLM's scheduler: names the member and the drift."""


class CallError(KVPlugError, ValueError):
    """A call with arguments that cannot be right. Nothing was changed."""


class BlockError(KVPlugError, RuntimeError):
    """A call that would corrupt the block pool (double free, foreign block id). Nothing was changed."""


class TraceError(KVPlugError, ValueError):
    """A file that is no trace, or one that cannot be read or written: names the file and what was found."""


class UsageError(KVPlugError, ValueError):
    """What was typed cannot be: names the option, the expected and the found value. A command exits with status 2."""
