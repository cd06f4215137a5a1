"""Every error that tilewise raises on purpose, as one small tree."""


class TilewiseError(Exception):
    """Base of all errors that tilewise raises on purpose."""


class InvalidShapeError(TilewiseError, ValueError):
    """A launch shape has a value outside what the op accepts."""


class InvalidConfigError(TilewiseError, ValueError):
    """A config is malformed, or may not launch for this shape on this GPU."""


class InvalidTensorError(TilewiseError, ValueError):
    """A tensor handed to a kernel has the wrong shape, dtype, stride or device."""


class CaptureError(TilewiseError, RuntimeError):
    """A call would allocate, compile or read the device while a graph is being captured."""


class UnsupportedError(TilewiseError, RuntimeError):
    """This GPU, layout or installed version has no kernel for the request."""


class InvalidProfileError(TilewiseError, ValueError):
    """A profile file or row breaks the schema."""


class InvalidBundleError(TilewiseError, ValueError):
    """A model bundle is malformed, altered, or of another format or feature spec."""


class InvalidContextError(TilewiseError, ValueError):
    """Context lengths that are none: a length out of range, a range upside down, a histogram without weight."""


class SelectionMissError(TilewiseError, LookupError):
    """In strict mode: neither a measurement nor the model answers for this shape."""


class InvalidPlanError(TilewiseError, ValueError):
    """A capture plan that is none, or of another format."""
